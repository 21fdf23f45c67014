"""An ONNX model with fixed shapes becomes a Relax module, its weights apart: `import_model`.

What cannot be imported is an answer, not an error: `Unsupported` names the operator.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from onnx import GraphProto, TensorProto, helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from hone.compiler.build import BuildFailed, is_of_the_machine
from hone.compiler.canonical import canonicalize, digest_graph, digest_tensor
from hone.compiler.converters import CONVERTERS
from hone.compiler.onnx_graph import ONNX_DOMAINS, Graph, attribute, subgraphs
from hone.compiler.rewrites import resolve_control_flow, rewrite
from hone.compiler.rewrites.bounds import UnboundedIndex, bound_indices
from hone.compiler.rewrites.division import DividesByZero, guard_divisions, hold_shifts
from hone.compiler.rewrites.evaluate import fold
from hone.compiler.rewrites.guards import GUARD, combine_guards
from hone.compiler.simplify import (
    CannotSimplify,
    first_line,
    inline_functions,
    load_with_shapes,
    raise_opset,
    simplify,
)
from hone.types import BYTES, NUMPY_DTYPES, Array, Shape, TensorSpec

logger = logging.getLogger(__name__)

#: Rewrites may open the way for others (an unrolled loop may hold an LSTM); a model needs two or three rounds.
MAX_ROUNDS = 8

_DATATYPES = {dtype.name: datatype for datatype, dtype in NUMPY_DTYPES.items() if datatype != BYTES}

#: Operators whose output's shape depends on values. A specialization has fixed shapes; and the importer gives
#: NonMaxSuppression a shape that does not hold, and thresholds of its own where they are no constants.
_SHAPED_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The model cannot be compiled; the baseline serves on. `operator` is empty where no single one is to blame."""

    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model as the compiler takes it.

    `mod`'s `main` takes the model's inputs in the order of `inputs`, then the weights in the order of `params` (its
    attribute `num_input` tells how many are inputs), and returns one tensor, or a tuple in the order of `outputs`.
    Where it is `guarded` there is one output more, the last: the guard, a scalar of type INT32, 1 where the outputs
    count (see rewrites/guards.py).

    Constants of at most 8 items (64-bit integers: 1024) are in the code.
    """

    mod: tvm.IRModule
    params: dict[str, Array]
    initializers: dict[str, str]
    """Parameter -> the model file's initializer of the same dtype, shape and bytes; derived parameters are absent."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graph_digest: str
    """Of the graph, its interface and its weights; not of the names inside it or the order its nodes are listed in."""
    guarded: bool = False


#: Operators that the importer knows in ONNX Runtime's own domain, not in ONNX's (whose Attention is another one).
_CONTRIBUTED_DOMAIN = "com.microsoft"
_CONTRIBUTED = frozenset({"Attention", "BiasGelu", "FastGelu", "SkipLayerNormalization"})


class _CannotImport(Exception):
    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(reason)
        self.operator = operator
        self.reason = reason


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, which remembers at which operator it is."""

    operator = ""

    def _check_for_unsupported_ops(self, graph: GraphProto) -> None:
        """`_check_operators` did, and knows of `CONVERTERS`."""

    def _convert_operator(self, op_name: str, inputs: Any, attrs: Any, opset: Any) -> Any:
        self.operator = op_name
        if op_name in CONVERTERS:
            return self.bb.normalize(CONVERTERS[op_name](self.bb, inputs, attrs))
        return super()._convert_operator(op_name, inputs, attrs, opset)


def import_model(path: Path, shapes: Mapping[str, Shape]) -> ImportedModel | Unsupported:
    """Import an ONNX file for one signature: a shape for every input that the file leaves open.

    Raises OSError where the file cannot be read, and BuildFailed where the machine has not what importing takes
    (memory, say); every other difficulty is an `Unsupported`. What crashes the process (TVM can) is for the caller's
    child process to survive.
    """
    try:
        graph = load_with_shapes(path, shapes)
        inputs, outputs = list(graph.input_names), [value.name for value in graph.model.graph.output]
        initializers = {digest_tensor(array): name for name, array in reversed(graph.weights.items())}
        make_importable(graph)
        graph, mod = _convert_or_inline(graph)
        guarded = bool(graph.guards)
        results = _output_types(mod, graph)
        digests = {name: digest_tensor(array) for name, array in graph.weights.items()}
        return ImportedModel(
            mod=mod,
            params=graph.weights,
            initializers={name: initializers[digest] for name, digest in digests.items() if digest in initializers},
            inputs=_specs(inputs, [param.ty for param in mod["main"].params[: len(inputs)]]),
            outputs=_specs(outputs, results[: len(outputs)]),
            graph_digest=digest_graph(graph, inputs, [*outputs, *([GUARD] if guarded else [])], digests),
            guarded=guarded,
        )
    except CannotSimplify as problem:
        return Unsupported(problem.operator, str(problem))
    except _CannotImport as problem:
        return Unsupported(problem.operator, problem.reason)
    except (OSError, BuildFailed):
        raise
    except Exception as problem:  # a model is anything; what a rewrite stumbles over must not end the tuning child
        if is_of_the_machine(problem):
            raise BuildFailed("importing", problem) from problem
        logger.exception("importing %s", path.name)
        return Unsupported("", f"import failed: {type(problem).__name__}: {first_line(problem)}")


def make_importable(graph: Graph) -> None:
    """Rewrite and simplify until nothing changes. Raises CannotSimplify."""
    resolve_control_flow(graph)
    simplify(graph, with_weights=True)
    raise_opset(graph)
    known = _known_operators()
    for _ in range(MAX_ROUNDS):
        foreign = {node.op_type for node in graph.nodes if node.domain in ONNX_DOMAINS} - known
        changed = [rewrite(graph), inline_functions(graph, foreign | _distrusted(graph)), fold(graph)]
        if not any(changed):
            return
        simplify(graph, with_weights=False)


def _convert_or_inline(graph: Graph) -> tuple[Graph, tvm.IRModule]:
    """Convert; where an operator's converter fails and ONNX defines the operator by others, try with those.

    Gives the graph in the canonical form that was converted.
    """
    while True:
        try:
            _check_operators(graph)
            final = graph.copy()
            bound_indices(final)
            guard_divisions(final)
            hold_shifts(final)
            combine_guards(final)
            canonicalize(final)
            return final, _convert(final)
        except (UnboundedIndex, DividesByZero) as problem:
            raise _CannotImport(problem.operator, str(problem)) from problem
        except _CannotImport as problem:
            if not inline_functions(graph, {problem.operator}):
                raise
            simplify(graph, with_weights=False)
            make_importable(graph)


def _distrusted(graph: Graph) -> set[str]:
    """Operators whose converter is known to be wrong for how they are used here (docs/onnx_coverage.md found them)."""
    used = {name for node in graph.nodes for name in node.input} | {value.name for value in graph.model.graph.output}
    distrusted = set()
    for node in graph.nodes:
        if node.op_type == "LayerNormalization" and not used.isdisjoint(node.output[1:]):
            distrusted.add(node.op_type)  # gives Mean and InvStdDev another shape
        if node.op_type == "RMSNormalization" and attribute(node, "axis", -1) in (
            0,
            -len(graph.shape(node.input[0]) or ()),
        ):
            distrusted.add(node.op_type)  # does not compile over all axes
    return distrusted


def _known_operators() -> set[str]:
    return set(onnx_frontend._get_convert_map()) - _CONTRIBUTED | {"Constant", *CONVERTERS}


def _check_operators(graph: Graph) -> None:
    known = _known_operators()
    for node in graph.nodes:
        if attribute(node, "training_mode", 0) or (node.op_type == "Dropout" and len(node.input) > 2):
            raise _CannotImport(node.op_type, f"{node.op_type} is in training mode")
        if node.domain == _CONTRIBUTED_DOMAIN and node.op_type in _CONTRIBUTED:
            continue
        if node.domain not in ONNX_DOMAINS:
            raise _CannotImport(node.op_type, f"operator {node.op_type} of domain {node.domain} has no converter")
        if node.op_type in _SHAPED_BY_DATA:
            raise _CannotImport(node.op_type, f"the shape of what {node.op_type} gives depends on values")
        if node.op_type not in known or subgraphs(node):
            raise _CannotImport(node.op_type, f"operator {node.op_type} has no converter")
    form = graph.model.graph
    for value in (*form.input, *form.output):
        if not value.type.HasField("tensor_type"):
            raise _CannotImport(_maker(form, value.name), f"{value.name} is no tensor")
        if value.type.tensor_type.elem_type == TensorProto.STRING:
            raise _CannotImport(_maker(form, value.name), f"{value.name} is a tensor of strings")


def _convert(graph: Graph) -> tvm.IRModule:
    """Through TVM's importer, which sees the weights as inputs."""
    form = GraphProto()
    form.CopyFrom(graph.model.graph)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in form.input}
    importer = _Importer(shapes, None, keep_params_in_input=False)
    _inline_constants(form)
    try:
        # The importer prints what it fails at, and warns of what the caller cannot change.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mod = importer.from_onnx(form, graph.opset)
            mod["main"] = mod["main"].with_attr("num_input", len(graph.input_names))
            relax.analysis.well_formed(mod)
            return mod
    except Exception as problem:  # converters raise whatever fails inside them
        if is_of_the_machine(problem):
            raise BuildFailed("importing", problem) from problem
        raise _CannotImport(importer.operator, f"{importer.operator}: {first_line(problem)}") from problem


def _inline_constants(form: GraphProto) -> None:
    """Small constants as nodes: so the importer takes them for constants, not for weights."""
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in form.initializer]
    nodes = list(form.node)
    del form.initializer[:]
    del form.node[:]
    form.node.extend(constants + nodes)


def _output_types(mod: tvm.IRModule, graph: Graph) -> list[Any]:
    """Types of the outputs. Raises _CannotImport where a shape, there or on the way, is known at run time only."""
    main = mod["main"]
    types = list(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    form = graph.model.graph
    for value, kind in zip(form.output, types, strict=True):
        operator = _maker(form, value.name)
        if not isinstance(kind, relax.TensorType):
            raise _CannotImport(operator, f"output {value.name} is no tensor")
        if not _is_fixed(kind):
            raise _CannotImport(operator, f"the shape of an output depends on values ({operator})")
    for block in main.body.blocks:
        for binding in block.bindings:
            kind = binding.var.ty
            parts = kind.fields if isinstance(kind, relax.TupleType) else [kind]
            if not all(_is_fixed(part) for part in parts if isinstance(part, relax.TensorType)):
                made_by = str(getattr(getattr(binding.value, "op", None), "name", "a value")).removeprefix("relax.")
                raise _CannotImport(made_by, f"the shape of what {made_by} gives depends on values")
    return types


def _is_fixed(kind: Any) -> bool:
    return kind.shape is not None and all(isinstance(dim, (int, tvm.tirx.IntImm)) for dim in kind.shape)


def _maker(form: GraphProto, name: str) -> str:
    """The operator that makes a value."""
    return next((str(node.op_type) for node in form.node if name in node.output), "")


def _specs(names: list[str], types: list[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for name, kind in zip(names, types, strict=True):
        datatype = _DATATYPES.get(str(kind.dtype))
        if datatype is None:
            raise _CannotImport("", f"{name} has type {kind.dtype}, which the protocol cannot carry")
        specs.append(TensorSpec(name, datatype, tuple(int(dim) for dim in kind.shape)))
    return tuple(specs)
