"""An ONNX graph while it is being made importable: nodes as protobufs, large tensors held apart from them.

Weights are numpy arrays beside the model, which lists them as inputs: so a pass serializes kilobytes, and rewrites
that need a weight's values (to cut an LSTM's matrices into gates) have them at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from hone.types import Array, Shape

#: Tensors of at most so many items stay in the graph, and so in the code: scalars, axes, shapes. 64-bit integers may
#: be shapes, indices and paddings, which converters want to see. What is larger is a weight, and stays out.
MAX_INLINE_ITEMS = 8
MAX_INLINE_INT64_ITEMS = 1024

#: The standard operators' domain under both its names.
ONNX_DOMAINS = ("", "ai.onnx")


def is_weight(tensor: TensorProto) -> bool:
    """Whether a constant belongs beside the code and not into it."""
    limit = MAX_INLINE_INT64_ITEMS if tensor.data_type == TensorProto.INT64 else MAX_INLINE_ITEMS
    return math.prod(tensor.dims) > limit and tensor.data_type != TensorProto.STRING


def opset_of(model: ModelProto) -> int:
    """Version of the standard operators that the model is written in; 1 where it says none, as the format has it."""
    return next((entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS), 1)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute (texts as str, tensors and graphs as protos), or the default."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            if isinstance(value, bytes):
                return value.decode()
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], bytes):
                return [text.decode() for text in value]
            return value
    return default


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The graphs inside a node: branches of an If, the body of a Loop or Scan."""
    found = []
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            found.append(item.g)
        found.extend(item.graphs)
    return found


def outer_names(graph: GraphProto) -> set[str]:
    """Names that a subgraph uses and does not make: values of the graphs around it."""
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    used: set[str] = set()
    for node in graph.node:
        used |= {name for name in node.input if name not in made}
        for inner in subgraphs(node):
            used |= outer_names(inner) - made
        made.update(node.output)
    return (used | {value.name for value in graph.output if value.name not in made}) - {""}


def ancestors(nodes: Sequence[NodeProto], names: Iterable[str]) -> list[NodeProto]:
    """Nodes that are needed to make these values, each after those that make its inputs, the first value's first.

    The order depends on what is computed alone, not on the order that the nodes are listed in.
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    ordered: list[NodeProto] = []
    done: set[int] = set()
    pending = [(makers[name], False) for name in reversed(list(names)) if name in makers]
    while pending:
        index, inputs_done = pending.pop()
        if index in done:
            continue
        if inputs_done:
            done.add(index)
            ordered.append(nodes[index])
            continue
        node = nodes[index]
        used = [*node.input, *(name for inner in subgraphs(node) for name in sorted(outer_names(inner)))]
        pending.append((index, True))
        pending.extend((makers[name], False) for name in reversed(used) if name in makers)
    return ordered


class Graph:
    """A model whose weights are held apart. Names are unique over the whole graph, its subgraphs included."""

    def __init__(self, model: ModelProto, inputs: Sequence[str], weights: Mapping[str, Array] | None = None) -> None:
        """Takes the model over and detaches its weights; `inputs` are the names that the caller will give."""
        self.input_names = tuple(inputs)
        self.weights: dict[str, Array] = dict(weights or {})
        self.guards: list[str] = []
        """Outputs that are not the model's, but conditions for those to count; see `rewrites/guards.py`."""
        self.replace_model(model)

    def copy(self) -> Graph:
        """Another graph of the same content, which shares the weights."""
        model = ModelProto()
        model.CopyFrom(self.model)
        graph = Graph(model, self.input_names, self.weights)
        graph.guards = list(self.guards)
        return graph

    def replace_model(self, model: ModelProto) -> None:
        """Go on with another form of the model, which may list the weights as inputs or have (more of) them inside."""
        self.model = model
        self._detach()
        self._drop_unused()
        self._names = _all_names(model.graph)
        self._infer()

    @property
    def nodes(self) -> Sequence[NodeProto]:
        return self.model.graph.node

    @property
    def opset(self) -> int:
        return opset_of(self.model)

    def dtype(self, name: str) -> int | None:
        """Type of the items as `TensorProto.DataType`, None while unknown."""
        found = self._types.get(name)
        return found[0] if found else None

    def shape(self, name: str) -> Shape | None:
        """Shape of a value, None while any of it is unknown."""
        found = self._types.get(name)
        return found[1] if found else None

    def constant(self, name: str) -> Array | None:
        """Value of a weight or of a constant in the graph, None for what only a run can tell."""
        found = self.weights.get(name)
        return found if found is not None else self._constants.get(name)

    def fresh(self, hint: str) -> str:
        """A name not used yet."""
        name, number = hint, 0
        while name in self._names:
            number += 1
            name = f"{hint}_{number}"
        self._names.add(name)
        return name

    def add_constant(self, value: Array, hint: str) -> str:
        """Name of a new constant, kept in the graph or beside it by its size."""
        name = self.fresh(hint)
        value = np.asarray(value, order="C")  # np.ascontiguousarray would make a scalar an array of one item
        tensor = numpy_helper.from_array(value, name)
        self._types[name] = (tensor.data_type, tuple(value.shape))
        self._constants[name] = value
        self.model.graph.initializer.append(tensor)
        return name

    def replace_nodes(self, nodes: Iterable[NodeProto]) -> None:
        """Put other nodes in place of all, given in an order in which they can run."""
        model = ModelProto()
        model.CopyFrom(self.model)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        self.replace_model(model)

    def attached(self) -> ModelProto:
        """A copy of the model with its weights inside, as others read it."""
        model = ModelProto()
        model.CopyFrom(self.model)
        _keep(model.graph.input, lambda value: value.name not in self.weights)
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in self.weights.items())
        return model

    def _detach(self) -> None:
        graph = self.model.graph
        listed = {value.name for value in graph.input}
        detached = set()
        for tensor in graph.initializer:
            if is_weight(tensor):
                detached.add(tensor.name)
                array = self.weights[tensor.name] = numpy_helper.to_array(tensor)
                if tensor.name not in listed:
                    graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, array.shape))
        _keep(graph.initializer, lambda tensor: tensor.name not in detached)

    def _drop_unused(self) -> None:
        """Order the nodes by need; forget those that no output needs, and constants that no node does."""
        graph = self.model.graph
        needed = ancestors(graph.node, [value.name for value in graph.output])
        copies = [NodeProto.FromString(node.SerializeToString()) for node in needed]
        del graph.node[:]
        graph.node.extend(copies)
        used = outer_names(GraphProto(node=graph.node, output=graph.output))
        self.weights = {name: array for name, array in self.weights.items() if name in used}
        _keep(graph.input, lambda value: value.name in self.input_names or value.name in self.weights)
        _keep(graph.initializer, lambda tensor: tensor.name in used)

    def _infer(self) -> None:
        """Work out types and shapes. What the shape inference cannot tell stays unknown."""
        graph = self.model.graph
        del graph.value_info[:]
        try:
            inferred = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            inferred = graph  # a graph that it cannot follow: rewrites then find no shapes and leave the nodes alone
        self._types: dict[str, tuple[int, Shape | None]] = {
            value.name: _type_of(value)
            for value in (*inferred.input, *inferred.value_info, *inferred.output)
            if value.type.HasField("tensor_type")
        }
        self._constants: dict[str, Array] = {}
        for tensor in graph.initializer:
            self._types[tensor.name] = (tensor.data_type, tuple(tensor.dims))
            self._constants[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ONNX_DOMAINS:
                value = attribute(node, "value")
                if value is not None:
                    self._constants[node.output[0]] = numpy_helper.to_array(value)


class Emitter:
    """Makes the nodes that take one node's place. Operators whose form changed with the opset have methods here."""

    def __init__(self, graph: Graph, node: NodeProto) -> None:
        self.graph = graph
        self.node = node
        self.made: list[NodeProto] = []
        self._prefix = node.name or node.output[0] or node.op_type

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node; gives the name of its output, a list of names where `outputs` is more than one."""
        names = [self.graph.fresh(f"{self._prefix}/{operator}") for _ in range(outputs)]
        self.made.append(helper.make_node(operator, list(inputs), names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Array) -> str:
        return self.graph.add_constant(np.asarray(value), f"{self._prefix}/constant")

    def bind(self, output: str, value: str) -> None:
        """Let the replaced node's output be this value."""
        if output:
            self.made.append(helper.make_node("Identity", [value], [output]))

    def cast(self, value: str, dtype: int) -> str:
        return str(self("Cast", value, to=dtype))

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        return str(self("Reshape", value, self.constant(np.array(shape, np.int64))))

    def squeeze(self, value: str, axis: int) -> str:
        if self.graph.opset < 13:
            return str(self("Squeeze", value, axes=[axis]))
        return str(self("Squeeze", value, self.constant(np.array([axis], np.int64))))

    def unsqueeze(self, value: str, axis: int) -> str:
        if self.graph.opset < 13:
            return str(self("Unsqueeze", value, axes=[axis]))
        return str(self("Unsqueeze", value, self.constant(np.array([axis], np.int64))))

    def slice(self, value: str, axis: int, start: int, end: int) -> str:
        """Items start to end, of one axis."""
        if self.graph.opset < 10:
            return str(self("Slice", value, axes=[axis], starts=[start], ends=[end]))
        numbers = (self.constant(np.array([number], np.int64)) for number in (start, end, axis))
        return str(self("Slice", value, *numbers))

    def concat(self, values: Sequence[str], axis: int) -> str:
        return values[0] if len(values) == 1 else str(self("Concat", *values, axis=axis))


def _keep(items: Any, wanted: Any) -> None:
    """Keep those of a protobuf list that are wanted."""
    for index in range(len(items) - 1, -1, -1):
        if not wanted(items[index]):
            del items[index]


def _type_of(value: ValueInfoProto) -> tuple[int, Shape | None]:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(dim.dim_value for dim in tensor.shape.dim)


def _all_names(graph: GraphProto) -> set[str]:
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        names.update(node.output)
        for inner in subgraphs(node):
            names |= _all_names(inner)
    return names
