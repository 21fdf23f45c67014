"""Integer divisions that end the process are given another form before ONNX Runtime sees them.

ONNX Runtime divides 32 and 64 bit integers by the processor's instruction, which faults where the least integer is
divided by -1: the server dies of SIGFPE, and whoever sends a request chooses both numbers. (Narrower integers are
widened first; Mod, and a zero divisor, are looked after by ONNX Runtime itself.)

    a / d   becomes   (a * s) / (d * s)   with s = -1 where d is -1, and 1 elsewhere

which is the same for every pair of integers, never divides by -1, and wraps for the one quotient that does not fit. A
zero divisor stays zero, and gets ONNX Runtime's own error.

A file is read as protobuf's wire format first, which takes little time, and copies no weights that are initializers.
What has no such division, and that is nearly every model, is left to ONNX Runtime as the file that it is. For others
the `onnx` package (60 ms, once a process) reads the graph without its weights, and tells which divisions are of
integers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.engines.onnx_assembly import STANDARD_DOMAINS, TooLarge, assemble, domain_of, outline_of, parse
from hone.engines.protobuf import Malformed, contents_of
from hone.errors import EngineError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_log = logging.getLogger(__name__)

#: Types of values of the main graph by name, asked of somebody who knows more than the `onnx` package: operators of
#: other domains, too. (the model with these values as its last outputs, names) -> TensorProto.DataType or None, each.
TypeOracle = Callable[[bytes, Sequence[str]], Sequence[int | None]]


def guarded_model(path: Path, oracle: TypeOracle) -> bytes | None:
    """The model of a file with its integer divisions made safe; None where the file is safe as it is.

    External data is not read: the result names it as the file does. Raises OSError, and EngineError for a model whose
    divisions cannot be told. A file that is no model is None: ONNX Runtime's words about it are better.
    """
    data = contents_of(path)
    try:
        outline = outline_of(data, "Div")
    except Malformed:
        return None
    if outline is None:
        return None
    model = parse(outline)
    if model is None:
        return None
    inlined = any(node.op_type == "Div" for function in model.functions for node in _nodes(function.node))
    if inlined:
        model = _inline(model, path)
        _warn_of_functions(model, path)
    guard = _Guard(model)
    if not guard.candidates:
        return None
    guard.learn_types()
    unknown = guard.unknown()
    if unknown:
        probe = _assembled(data, _with_outputs(model, unknown), path, inlined=inlined)
        guard.learn(dict(zip(unknown, oracle(probe, unknown), strict=True)))
    if not guard.rewrite(path):
        return None
    return _assembled(data, model, path, inlined=inlined)


def _inline(model: ModelProto, path: Path) -> ModelProto:
    """With the model's own functions put in place of their calls, since types differ from call to call. Functions of
    another opset that cannot be converted to the model's stay, and so do their calls."""
    import onnx.inliner

    # What comes from a function may be of domains that the model itself does not list.
    wanted = {domain_of(entry): entry for function in model.functions for entry in function.opset_import}
    try:
        try:
            inlined = onnx.inliner.inline_local_functions(model, convert_version=True)
        except Exception as problem:  # one function that cannot be converted ends it for all
            _log.debug("functions of another opset could not be converted: %s", problem)
            inlined = onnx.inliner.inline_local_functions(model)
    except Exception as problem:  # the inliner's exceptions have no common root below Exception
        raise EngineError(
            f"{path.name} divides inside of its own functions, which cannot be inlined to make that division safe:"
            f" {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}"
        ) from problem
    listed = {domain_of(entry) for entry in inlined.opset_import}
    inlined.opset_import.extend(entry for domain, entry in wanted.items() if domain not in listed)
    return inlined


def _warn_of_functions(model: ModelProto, path: Path) -> None:
    """Of functions that could not be put in place of their calls, and divide."""
    for function in model.functions:
        if any(_divides(node) for node in _nodes(function.node)):
            _log.warning(
                "%s: its function '%s' divides, and cannot be put in place of its calls (its opset is another one than"
                " the model's); if it divides integers, a request that divides the least of them by -1 ends the server",
                path.name,
                function.name,
            )


def _assembled(data: memoryview, model: ModelProto, path: Path, *, inlined: bool) -> bytes:
    """See `assemble`. Raises EngineError where it is too large."""
    try:
        return assemble(data, model, inlined=inlined)
    except TooLarge as problem:
        raise EngineError(
            f"{path.name}: with its integer divisions made safe it exceeds protobuf's 2 GiB; keep its weights as"
            " external data"
        ) from problem


def _with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """A copy whose last outputs are these values."""
    import onnx

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    kept = [output for output in model.graph.output if output.name not in names]
    del probe.graph.output[:]
    probe.graph.output.extend(kept)
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return probe


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for item in node.attribute:
        if item.HasField("g"):
            yield item.g
        yield from item.graphs


def _nodes(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """These nodes and those inside of them."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes(graph.node)


class _Guard:
    """The divisions of a model that may fault. Types and constants are known by name and scope: two branches may use
    one name for two values."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        self._types: dict[tuple[int, ...], dict[str, int]] = {}
        self.candidates = list(self._search(model.graph, (), ({},)))

    def _search(
        self, graph: GraphProto, scope: tuple[int, ...], around: tuple[Mapping[str, Any], ...]
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        """(scope, output) of every division that constants do not show to be safe."""
        constants = dict.fromkeys((value.name for value in graph.input), None)
        constants |= {tensor.name: tensor for tensor in graph.initializer if tensor.name not in constants}
        known = (*around, constants)
        for number, node in enumerate(graph.node):
            if _is_constant(node):
                constants[node.output[0]] = _constant_of(node)
            elif _divides(node) and not _is_safe(*(_find(known, name) for name in node.input)):
                yield scope, node.output[0]
            for place, inner in enumerate(_subgraphs(node)):
                yield from self._search(inner, (*scope, number, place), known)

    def learn_types(self) -> None:
        """By ONNX's own inference. It knows nothing of operators of other domains, and then leaves them out."""
        import onnx

        try:
            graph = onnx.shape_inference.infer_shapes(self._model).graph
        except Exception as problem:  # it raises what it likes; what it cannot tell is asked of the oracle
            _log.debug("types of a model could not be inferred: %s", problem)
            graph = self._model.graph
        self._collect(graph, ())

    def _collect(self, graph: GraphProto, scope: tuple[int, ...]) -> None:
        types = self._types.setdefault(scope, {})
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
                types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for number, node in enumerate(graph.node):
            if _is_constant(node):
                found = _constant_of(node)
                if found is not None:
                    types[node.output[0]] = found.data_type
            for place, inner in enumerate(_subgraphs(node)):
                self._collect(inner, (*scope, number, place))

    def unknown(self) -> list[str]:
        """Divisions of the main graph of which nothing is known yet."""
        divisions = {node.output[0]: node for node in self._model.graph.node if _divides(node)}
        return [name for scope, name in self.candidates if not scope and self._type(scope, divisions[name]) is None]

    def learn(self, types: Mapping[str, int | None]) -> None:
        self._types.setdefault((), {}).update({name: kind for name, kind in types.items() if kind is not None})

    def _type(self, scope: tuple[int, ...], node: NodeProto) -> int | None:
        """Of a division: its operands and its quotient have one type."""
        for depth in range(len(scope), -1, -2):
            types = self._types.get(scope[:depth], {})
            for name in (*node.output, *node.input) if depth == len(scope) else node.input:
                if name in types:
                    return types[name]
        return None

    def rewrite(self, path: Path) -> bool:
        """Give the divisions of integers their other form, in the model itself. Whether there were any."""
        prefix = "hone/division"
        used = {name for node in _nodes(self._model.graph.node) for name in node.output}
        while any(name.startswith(prefix) for name in used):
            prefix += "_"
        return self._rewrite(self._model.graph, (), set(self.candidates), f"{prefix}/", path) > 0

    def _rewrite(
        self,
        graph: GraphProto,
        scope: tuple[int, ...],
        wanted: set[tuple[tuple[int, ...], str]],
        prefix: str,
        path: Path,
    ) -> int:
        from onnx import NodeProto, TensorProto

        nodes: list[NodeProto] = []
        count = 0
        for number, node in enumerate(graph.node):
            for place, inner in enumerate(_subgraphs(node)):
                count += self._rewrite(inner, (*scope, number, place), wanted, prefix, path)
            if not _divides(node) or (scope, node.output[0]) not in wanted:
                nodes.append(node)
                continue
            kind = self._type(scope, node)
            if kind is None:
                _log.warning(
                    "%s: nothing tells the type of what Div '%s' divides; if it is integers, a request that divides the"
                    " least of them by -1 ends the server",
                    path.name,
                    node.name or node.output[0],
                )
            if kind not in (TensorProto.INT32, TensorProto.INT64):
                nodes.append(node)
                continue
            count += 1
            nodes += _safe_division(node, int(kind), prefix)
        if count:
            copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
            del graph.node[:]
            graph.node.extend(copies)
        return count


def _safe_division(node: NodeProto, kind: int, prefix: str) -> list[NodeProto]:
    """The nodes in a division's place, of operators that every opset from 7 on has."""
    from onnx import helper, numpy_helper

    dtype = helper.tensor_dtype_to_np_dtype(kind)
    made: list[NodeProto] = []

    def emit(operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{prefix}{node.output[0]}/{len(made)}"
        made.append(helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name

    dividend, divisor = node.input
    one = emit("Constant", value=numpy_helper.from_array(np.array(1, dtype)))
    minus_one = emit("Constant", value=numpy_helper.from_array(np.array(-1, dtype)))
    negates = emit("Cast", emit("Equal", divisor, minus_one), to=kind)
    sign = emit("Sub", one, emit("Add", negates, negates))
    safe = helper.make_node(
        "Div", [emit("Mul", dividend, sign), emit("Mul", divisor, sign)], list(node.output), node.name
    )
    return [*made, safe]


def _divides(node: NodeProto) -> bool:
    """Of a malformed node, which no server runs, ONNX Runtime's words are better."""
    is_division = node.op_type == "Div" and node.domain in STANDARD_DOMAINS
    return is_division and len(node.input) == 2 and len(node.output) == 1 and all((*node.input, *node.output))


def _is_constant(node: NodeProto) -> bool:
    return node.op_type == "Constant" and node.domain in STANDARD_DOMAINS and len(node.output) == 1


def _find(scopes: Sequence[Mapping[str, Any]], name: str) -> Any:
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return None


def _constant_of(node: NodeProto) -> Any:
    """The tensor of a Constant; None for forms that a division of integers rarely has."""
    from onnx import helper, numpy_helper

    for item in node.attribute:
        if item.name == "value":
            return item.t
        if item.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.array(helper.get_attribute_value(item), np.int64))
        if item.name in ("value_float", "value_floats"):
            return numpy_helper.from_array(np.array(helper.get_attribute_value(item), np.float32))
    return None


def _is_safe(dividend: Any, divisor: Any) -> bool:
    """Whether constants alone show that a division does not fault."""
    from onnx import TensorProto

    faulting = (TensorProto.INT32, TensorProto.INT64)
    for tensor in (dividend, divisor):
        if tensor is not None and tensor.data_type not in faulting:
            return True
    items = _items(divisor)
    if items is not None and not np.any(items == -1):
        return True
    items = _items(dividend)
    return items is not None and not np.any(items == np.iinfo(items.dtype).min)


def _items(tensor: Any) -> Any:
    """A constant's items; None where there is none, or they were left out."""
    from onnx import TensorProto, numpy_helper

    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return None
    return numpy_helper.to_array(tensor)
