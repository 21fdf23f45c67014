"""Tensors without items: TVM does not split them off, gives their extremes as the largest numbers of their type, and
writes constants of them that it does not read again."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute

_FLOATS = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)


def split(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Split, some of whose parts are empty: those are slices, and the others parts of a split of their own."""
    shape, axis = graph.shape(node.input[0]), attribute(node, "axis", 0)
    sizes = [None if (part := graph.shape(name)) is None else part[axis] for name in node.output]
    if shape is None or None in sizes or 0 not in sizes:
        return None
    emit = Emitter(graph, node)
    for name, size in zip(node.output, sizes, strict=True):
        if not size:
            emit.bind(name, emit.slice(node.input[0], axis, 0, 0))
    filled = [name for name, size in zip(node.output, sizes, strict=True) if size]
    if len(filled) == 1:
        emit.bind(filled[0], node.input[0])
    elif filled:
        wanted = emit.constant(np.array([size for size in sizes if size], np.int64))
        emit.made.append(helper.make_node("Split", [node.input[0], wanted], filled, axis=axis))
    return emit.made


def concat(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Concat, some of whose parts are empty: of the others."""
    axis, shapes = attribute(node, "axis", 0), [graph.shape(name) for name in node.input]
    filled = [name for name, shape in zip(node.input, shapes, strict=True) if shape is None or shape[axis] != 0]
    if not filled or len(filled) == len(node.input):
        return None
    emit = Emitter(graph, node)
    emit.bind(node.output[0], emit.concat(filled, axis) if len(filled) > 1 else filled[0])
    return emit.made


def extreme(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ReduceMax and ReduceMin over no items: the infinity that any number is on the other side of."""
    given, shape, dtype = graph.shape(node.input[0]), graph.shape(node.output[0]), graph.dtype(node.input[0])
    if given is None or 0 not in given or shape is None or 0 in shape or dtype not in _FLOATS:
        return None
    infinity = -np.inf if node.op_type == "ReduceMax" else np.inf
    emit = Emitter(graph, node)
    emit.bind(node.output[0], emit.constant(np.full(shape, infinity, helper.tensor_dtype_to_np_dtype(dtype))))
    return emit.made
