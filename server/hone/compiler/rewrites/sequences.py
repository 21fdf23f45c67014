"""Operators along one axis whose items depend on their place, written as selections and products of whole tensors."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require_within

#: The number of products grows with the factorial; matrices of a model's geometry have three or four rows.
_MAX_DETERMINANT = 4


def cumulative_product(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """CumProd in as many steps as its length has binary digits: each multiplies with what lies 1, 2, 4, ... before."""
    shape, dtype, axis = graph.shape(node.input[0]), graph.dtype(node.input[0]), graph.constant(node.input[1])
    if shape is None or dtype is None or axis is None:
        return None
    along = int(axis.reshape(-1)[0]) % len(shape)
    size = shape[along]
    backwards = bool(attribute(node, "reverse", 0))
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    emit = Emitter(graph, node)

    def shifted(value: str, distance: int) -> str:
        """Ones where nothing lies so far before. They are padding: as tensors they would be weights of the size of the
        input, and an Expand of a scalar becomes one when the graph is simplified."""
        if distance >= size:
            return str(emit("Expand", one, emit.constant(np.array(shape, np.int64))))
        kept = emit.slice(value, along, distance, size) if backwards else emit.slice(value, along, 0, size - distance)
        pads = np.zeros((2, len(shape)), np.int64)
        pads[1 if backwards else 0, along] = distance
        return str(emit("Pad", kept, emit.constant(pads.reshape(-1)), one))

    one = emit.constant(np.array(1, kind))
    total = node.input[0]
    if size and attribute(node, "exclusive", 0):
        total = shifted(total, 1)
    distance = 1
    while distance < size:
        total = emit("Mul", total, shifted(total, distance))
        distance *= 2
    emit.bind(node.output[0], total)
    return emit.made


def tensor_scatter(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """TensorScatter, which writes new steps into a cache: each step of the result is one of the cache or of the update,
    as its distance from the place of writing says."""
    cache, update = (graph.shape(name) for name in node.input[:2])
    if cache is None or update is None:
        return None
    axis = attribute(node, "axis", -2) % len(cache)
    steps, num_new = cache[axis], update[axis]
    if axis == 0 or num_new > steps or not num_new:
        return None
    circular = attribute(node, "mode", "linear") == "circular"
    emit = Emitter(graph, node)
    begin = node.input[2] if len(node.input) > 2 and node.input[2] else emit.constant(np.zeros(cache[0], np.int64))
    if graph.constant(begin) is None:
        require_within(emit, begin, 0, steps - 1 if circular else steps - num_new)
    places = emit.constant(np.arange(steps, dtype=np.int64)[None, :])
    distance = emit("Sub", places, emit.unsqueeze(begin, 1))  # (batch, steps)
    if circular:
        wrapped = emit("Add", distance, emit.constant(np.array(steps, np.int64)))
        distance = emit("Where", emit("Less", distance, emit.constant(np.array(0, np.int64))), wrapped, distance)
    highest = emit.constant(np.array(num_new - 1, np.int64))
    held = emit("Max", emit("Min", distance, highest), emit.constant(np.array(0, np.int64)))
    is_new = emit("Equal", distance, held)
    form = [cache[0] if i == 0 else steps if i == axis else 1 for i in range(len(cache))]
    full = emit.constant(np.array([length if i != axis else steps for i, length in enumerate(cache)], np.int64))
    chosen = emit("GatherElements", node.input[1], emit("Expand", emit.reshape(held, form), full), axis=axis)
    emit.bind(node.output[0], emit("Where", emit.reshape(is_new, form), chosen, node.input[0]))
    return emit.made


def determinant(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Det of small matrices, by the minors of their first row."""
    shape = graph.shape(node.input[0])
    if shape is None or not 1 <= shape[-1] <= _MAX_DETERMINANT:
        return None
    size, rank = shape[-1], len(shape)
    emit = Emitter(graph, node)
    rows = [emit.squeeze(emit.slice(node.input[0], rank - 2, i, i + 1), rank - 2) for i in range(size)]
    items = [[emit.squeeze(emit.slice(row, rank - 2, j, j + 1), rank - 2) for j in range(size)] for row in rows]

    def minor(row: int, columns: tuple[int, ...]) -> str:
        if len(columns) == 1:
            return items[row][columns[0]]
        total = ""
        for place, column in enumerate(columns):
            rest = minor(row + 1, (*columns[:place], *columns[place + 1 :]))
            term = str(emit("Mul", items[row][column], rest))
            total = str(emit("Sub" if place % 2 else "Add", total, term)) if total else term
        return total

    emit.bind(node.output[0], minor(0, tuple(range(size))))
    return emit.made
