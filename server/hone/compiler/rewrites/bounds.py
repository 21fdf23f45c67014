"""Indices that only a run can tell are held to the tensor they point into.

ONNX Runtime checks each index and fails the request; compiled code would read or write somewhere else in the server's
memory. Valid indices pass unchanged. An invalid one fetches something from the tensor, and fails the guard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require

#: Operator -> place of the indices among its inputs.
_INDICES = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "MaxUnpool": 1,
    "RoiAlign": 2,
    "Scatter": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
}


#: Operators with indices that cannot be held: they come as one tensor with other numbers.
_UNBOUNDED = frozenset({"MaxRoiPool"})

#: Operators whose indices do not count from the end when negative.
_NOT_FROM_END = frozenset({"MaxUnpool", "RoiAlign"})


class UnboundedIndex(Exception):
    """Indices from a request that cannot be held to their tensor."""

    def __init__(self, operator: str) -> None:
        super().__init__(f"{operator}: its indices cannot be held to the tensor they point into")
        self.operator = operator


def bound_indices(graph: Graph) -> None:
    """Clip every index that is no constant, and require that this changed none. To be done once, at the end.

    Raises UnboundedIndex.
    """
    nodes: list[NodeProto] = []
    for node in list(graph.nodes):
        place = _INDICES.get(node.op_type)
        if node.op_type in _UNBOUNDED:
            raise UnboundedIndex(node.op_type)
        if place is None or graph.constant(node.input[place]) is not None:
            nodes.append(node)
            continue
        emit = Emitter(graph, node)
        sizes = _sizes(graph, node)
        dtype = graph.dtype(node.input[place])
        if sizes is None or dtype is None:
            raise UnboundedIndex(node.op_type)
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        highest = np.array([max(size - 1, 0) for size in sizes], kind)
        lowest = np.zeros_like(highest) if node.op_type in _NOT_FROM_END else np.array([-size for size in sizes], kind)
        if len(sizes) == 1:
            highest, lowest = highest.reshape(()), lowest.reshape(())
        bounded = emit("Max", emit("Min", node.input[place], emit.constant(highest)), emit.constant(lowest))
        require(emit, emit("Equal", bounded, node.input[place]))
        inputs = list(node.input)
        inputs[place] = bounded
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = inputs
        nodes += [*emit.made, copy]
    if len(nodes) != len(graph.nodes):
        graph.replace_nodes(nodes)


def _sizes(graph: Graph, node: NodeProto) -> Sequence[int] | None:
    """Sizes of the axes that an index tuple points into; None while unknown."""
    shape = graph.shape(node.input[0])
    if node.op_type == "MaxUnpool":
        made = graph.shape(node.output[0])
        return None if made is None else [int(np.prod(made))]
    if shape is None:
        return None
    if node.op_type == "RoiAlign":
        return shape[:1]
    if node.op_type in ("GatherND", "ScatterND"):
        indices = graph.shape(node.input[1])
        first = attribute(node, "batch_dims", 0)
        return None if indices is None else shape[first : first + indices[-1]]
    return [shape[attribute(node, "axis", 0)]]
