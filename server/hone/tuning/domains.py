"""What an ONNX graph says about the values of its inputs. In the child only: it imports `onnx`.

Each input is followed to the operators that use it, through those that hand its values on unchanged. What an operator
demands of its operand there (an index below a size, a positive number, a length) bounds what may be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.tuning.inputs import Domain
from hone.types import BYTES, Shape, TensorSpec

if TYPE_CHECKING:
    import onnx

#: Operators that hand values on: operator -> positions of the operands whose values come out again.
_PASS_ON: Mapping[str, tuple[int, ...]] = {
    "Identity": (0,), "Cast": (0,), "CastLike": (0,), "Reshape": (0,), "Flatten": (0,), "Squeeze": (0,),
    "Unsqueeze": (0,), "Transpose": (0,), "Expand": (0,), "Tile": (0,), "Slice": (0,), "Split": (0,),
    "Gather": (0,), "GatherElements": (0,), "GatherND": (0,), "Concat": (0, 1, 2, 3, 4, 5, 6, 7), "Pad": (0,),
    "Clip": (0,), "Where": (1, 2), "Dropout": (0,), "DepthToSpace": (0,), "SpaceToDepth": (0,), "Compress": (0,),
    "ReduceMax": (0,), "ReduceMin": (0,), "MaxPool": (0,), "Max": (0, 1), "Min": (0, 1),
}  # fmt: skip

#: Operators whose operand says a shape, an axis or a count: (operator, position). Values drawn at random fit none.
_STRUCTURAL = frozenset(
    [
        ("Reshape", 1), ("Expand", 1), ("Tile", 1), ("ConstantOfShape", 0), ("Range", 0), ("Range", 1), ("Range", 2),
        ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4), ("Pad", 1), ("Resize", 2), ("Resize", 3),
        ("Upsample", 1), ("Unsqueeze", 1), ("Squeeze", 1), ("Split", 1), ("Loop", 0), ("OneHot", 1), ("Pad", 3),
        ("MaxUnpool", 2), ("NonMaxSuppression", 2), ("CenterCropPad", 1), ("ReduceSum", 1), ("CumSum", 1),
    ]
)  # fmt: skip

#: Operators that need numbers above 0: operator -> positions.
_POSITIVE: Mapping[str, tuple[int, ...]] = {"Log": (0,), "Sqrt": (0,), "Reciprocal": (0,), "Div": (1,), "Mod": (1,)}
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_MAX_STEPS = 10_000
_MAX_CONSTANT_ITEMS = 1024

_INTEGER_LIMITS = {
    "UINT8": (0, 255), "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767),
    "UINT32": (0, 100), "INT32": (0, 100), "UINT64": (0, 100), "INT64": (0, 100),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoDomain:
    """Nothing can be made up for this model; the reason says what would help."""

    reason: str


def derive_domains(path: Path, inputs: Iterable[TensorSpec]) -> dict[str, Domain] | NoDomain:
    """A domain for each input, whose shapes are concrete. Raises OSError or ValueError for a file that is no model."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as problem:
        raise ValueError(f"{path.name} is no ONNX model: {problem}") from problem
    specs = tuple(inputs)
    graph = _Graph(model, {spec.name: spec.shape for spec in specs})
    domains: dict[str, Domain] = {}
    for spec in specs:
        domain = _domain_of(spec, graph)
        if isinstance(domain, NoDomain):
            return domain
        domains[spec.name] = domain
    return domains


def _domain_of(spec: TensorSpec, graph: _Graph) -> Domain | NoDomain:
    if spec.datatype == BYTES:
        return NoDomain(f"input '{spec.name}' holds texts, which cannot be made up; give model_warmup data")
    domain = _default(spec, graph)
    for node, position, known_shape in graph.uses(spec.name, spec.shape):
        bounded = _demand(domain, node, position, known_shape, graph)
        if isinstance(bounded, NoDomain):
            return NoDomain(
                f"input '{spec.name}' {bounded.reason} ('{node.name or node.op_type}'), so no inputs can be made up;"
                f" give model_warmup data"
            )
        domain = bounded
    return domain


def _default(spec: TensorSpec, graph: _Graph) -> Domain:
    """Without any demand of the graph."""
    name = spec.name.lower()
    if spec.datatype == "BOOL":
        return Domain(spec.datatype, spec.shape, 0, 1, "booleans")
    if spec.datatype in _INTEGER_LIMITS:
        if "mask" in name:
            return Domain(spec.datatype, spec.shape, 0, 1, "a mask by its name")
        if "len" in name:
            return Domain(spec.datatype, spec.shape, 1, graph.longest_axis(spec.name), "a length by its name")
        low, high = _INTEGER_LIMITS[spec.datatype]
        return Domain(spec.datatype, spec.shape, low, high, "integers")
    return Domain(spec.datatype, spec.shape, -1.0, 1.0, "floats")


def _demand(domain: Domain, node: Any, position: int, shape: Shape | None, graph: _Graph) -> Domain | NoDomain:
    """The domain within what an operator demands of its operand at this position."""
    operator = node.op_type
    if (operator, position) in _STRUCTURAL:
        return NoDomain(f"tells {operator} a shape")
    if operator in ("Gather", "GatherElements", "ScatterElements", "Scatter") and position == 1:
        return _below(domain, graph.axis_size(node, default_axis=0), f"indices into {operator}")
    if operator in ("GatherND", "ScatterND") and position == 1:
        return _below(domain, graph.smallest_axis(node), f"indices into {operator}")
    if operator == "OneHot" and position == 0:
        depth = graph.constant_of(node, 1)
        return _below(domain, int(depth) if depth is not None else None, "indices into OneHot")
    if operator == "TopK" and position == 1:
        return NoDomain("tells TopK a count")
    if operator in _RECURRENT and position == 4:
        steps = graph.shape_of(node.input[0])
        return replace(domain, low=1, high=steps[0] if steps else 1, why=f"lengths of {operator}")
    if position in _POSITIVE.get(operator, ()):
        low, high = (1, max(1, domain.high)) if _is_integer(domain) else (0.1, 1.1)
        return replace(domain, low=low, high=high, why=f"positive for {operator}")
    if operator in ("Acos", "Asin", "Atanh") and position == 0:
        return replace(domain, low=-0.9, high=0.9, why=f"within {operator}")
    if operator == "Acosh" and position == 0:
        return replace(domain, low=1.1, high=2.1, why="within Acosh")
    return domain


def _below(domain: Domain, size: int | None, why: str) -> Domain:
    """Indices; an unknown size allows the first two only."""
    high = (size if size is not None else 2) - 1
    return replace(
        domain, low=0, high=max(0, min(domain.high if domain.why.startswith("indices") else high, high)), why=why
    )


def _is_integer(domain: Domain) -> bool:
    return domain.datatype in _INTEGER_LIMITS


class _Graph:
    """The graph with its inputs' shapes fixed, and who uses which value."""

    def __init__(self, model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
        self._shapes: dict[str, Shape] = dict(shapes)
        self._inputs = dict(shapes)
        self._constants: dict[str, Any] = {}
        self._uses: dict[str, list[tuple[Any, int]]] = {}
        for tensor in model.graph.initializer:
            self._shapes[tensor.name] = tuple(tensor.dims)
            if math.prod(tensor.dims) <= _MAX_CONSTANT_ITEMS:
                self._constants[tensor.name] = tensor
        _detach_weights(model)
        inferred = _with_shapes(model, shapes)
        for info in (*inferred.graph.value_info, *inferred.graph.output):
            dims = info.type.tensor_type.shape.dim
            if info.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                self._shapes.setdefault(info.name, tuple(dim.dim_value for dim in dims))
        self._index(model.graph.node)

    def _index(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            for position, name in enumerate(node.input):
                self._uses.setdefault(name, []).append((node, position))
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self._constants[node.output[0]] = attribute.t
                        self._shapes[node.output[0]] = tuple(attribute.t.dims)
            for attribute in node.attribute:
                for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    self._index(inner.node)  # inner graphs may use outer values

    def uses(self, name: str, shape: Shape) -> Iterator[tuple[Any, int, Shape | None]]:
        """Every operator that sees the input's values, and at which of its operands."""
        waiting, seen, steps = [name], {name}, 0
        while waiting and steps < _MAX_STEPS:
            value = waiting.pop()
            for node, position in self._uses.get(value, ()):
                steps += 1
                yield node, position, self.shape_of(value)
                if position in _PASS_ON.get(node.op_type, ()):
                    for output in node.output[:1] if node.op_type != "Split" else node.output:
                        if output and output not in seen:
                            seen.add(output)
                            waiting.append(output)

    def shape_of(self, name: str) -> Shape | None:
        return self._shapes.get(name)

    def axis_size(self, node: Any, default_axis: int) -> int | None:
        data = self.shape_of(node.input[0])
        axis = next((a.i for a in node.attribute if a.name == "axis"), default_axis)
        if data is None or not -len(data) <= axis < len(data):
            return None
        return data[axis]

    def smallest_axis(self, node: Any) -> int | None:
        data = self.shape_of(node.input[0])
        return min(data, default=None) if data is not None else None

    def constant_of(self, node: Any, position: int) -> float | None:
        """A scalar operand's value, where it is a constant."""
        from onnx import numpy_helper

        tensor = self._constants.get(node.input[position]) if position < len(node.input) else None
        if tensor is None or math.prod(tensor.dims) != 1 or tensor.data_location:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])

    def longest_axis(self, but: str) -> int:
        """Longest second axis of the other inputs: what a length may be at most."""
        return max((shape[1] for name, shape in self._inputs.items() if name != but and len(shape) > 1), default=1)


def _detach_weights(model: onnx.ModelProto) -> None:
    """Turn large constants into inputs, in place: shapes need no gigabytes."""
    import onnx

    initializers = model.graph.initializer
    kept = []
    for tensor in initializers:
        if math.prod(tensor.dims) <= _MAX_CONSTANT_ITEMS:
            kept.append(tensor)
        else:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            model.graph.input.append(info)
    del initializers[:]
    initializers.extend(kept)


def _with_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    """The model with the shapes of its values inferred from those of its inputs."""
    import onnx

    for info in model.graph.input:
        if info.name in shapes:
            del info.type.tensor_type.shape.dim[:]
            for size in shapes[info.name]:
                info.type.tensor_type.shape.dim.add().dim_value = size
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):
        return model  # a graph that ONNX cannot follow: sizes stay unknown, and indices small
