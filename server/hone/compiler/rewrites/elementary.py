"""Small operators by others, where TVM's importer has none or gets a variant wrong (found by the coverage table)."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute

_FLOATS = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def dropout(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Outside of training Dropout passes on its input; its mask is all true."""
    training = node.input[2] if len(node.input) > 2 else ""
    if training and ((value := graph.constant(training)) is None or value.any()):
        return None
    shape = graph.shape(node.input[0])
    emit = Emitter(graph, node)
    emit.bind(node.output[0], node.input[0])
    if len(node.output) > 1 and node.output[1]:
        if shape is None:
            return None
        filled = helper.make_tensor("value", TensorProto.BOOL, [1], [True])
        emit.bind(node.output[1], emit("ConstantOfShape", emit.constant(np.array(shape, np.int64)), value=filled))
    return emit.made


def is_inf(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """IsInf of one sign only."""
    positive, negative = attribute(node, "detect_positive", 1), attribute(node, "detect_negative", 1)
    dtype = graph.dtype(node.input[0])
    if (positive and negative) or dtype not in _FLOATS:
        return None
    emit = Emitter(graph, node)
    infinity = np.array(np.inf if positive else -np.inf, helper.tensor_dtype_to_np_dtype(dtype))
    if not positive and not negative:
        infinity = np.array(np.nan, infinity.dtype)  # equal to nothing
    emit.bind(node.output[0], emit("Equal", node.input[0], emit.constant(infinity)))
    return emit.made


def eye_like(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """EyeLike looks at its input's shape only."""
    shape, dtype = graph.shape(node.input[0]), attribute(node, "dtype", graph.dtype(node.input[0]))
    if shape is None or len(shape) != 2 or dtype is None:
        return None
    emit = Emitter(graph, node)
    eye = np.eye(*shape, k=attribute(node, "k", 0), dtype=helper.tensor_dtype_to_np_dtype(dtype))
    emit.bind(node.output[0], emit.constant(eye))
    return emit.made


def lp_normalization(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """LpNormalization, which leaves vectors of length zero as they are."""
    order, axis = attribute(node, "p", 2), attribute(node, "axis", -1)
    dtype = graph.dtype(node.input[0])
    if order not in (1, 2) or dtype not in _FLOATS:
        return None
    emit = Emitter(graph, node)
    operator = "ReduceL1" if order == 1 else "ReduceL2"
    if graph.opset < 18:
        norm = emit(operator, node.input[0], axes=[axis], keepdims=1)
    else:
        norm = emit(operator, node.input[0], emit.constant(np.array([axis], np.int64)), keepdims=1)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    is_zero = emit("Equal", norm, emit.constant(np.array(0, kind)))
    divisor = emit("Where", is_zero, emit.constant(np.array(1, kind)), norm)
    emit.bind(node.output[0], emit("Div", node.input[0], divisor))
    return emit.made


def power(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Pow of two types, or of integers: computed in one floating-point type."""
    base, exponent = (graph.dtype(name) for name in node.input)
    if base is None or exponent is None or (base == exponent and base in _FLOATS):
        return None
    emit = Emitter(graph, node)
    if base in _FLOATS:
        emit.bind(node.output[0], emit("Pow", node.input[0], emit.cast(node.input[1], base)))
        return emit.made
    # Integers up to 2^53 are exact in float64; more are beyond what the power of a served model means to be.
    left, right = (emit.cast(name, TensorProto.DOUBLE) for name in node.input)
    emit.bind(node.output[0], emit.cast(emit("Pow", left, right), base))
    return emit.made


def conv_transpose(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ConvTranspose that names its output's shape: with the paddings which that means."""
    wanted = attribute(node, "output_shape")
    automatic = attribute(node, "auto_pad", "NOTSET")
    shape, weight = graph.shape(node.input[0]), graph.shape(node.input[1])
    if shape is None or weight is None or (not wanted and automatic not in ("SAME_UPPER", "SAME_LOWER")):
        return None
    rank = len(shape) - 2
    strides = attribute(node, "strides") or [1] * rank
    dilations = attribute(node, "dilations") or [1] * rank
    extra = list(attribute(node, "output_padding") or [0] * rank)
    wanted = list(wanted or [shape[2 + axis] * strides[axis] for axis in range(rank)])[-rank:]
    begins, ends = [], []
    for axis in range(rank):
        reach = (weight[2 + axis] - 1) * dilations[axis] + 1
        total = strides[axis] * (shape[2 + axis] - 1) + extra[axis] + reach - wanted[axis]
        if total < 0:  # more than any position reaches
            extra[axis] -= total
            total = 0
        less, more = total // 2, total - total // 2
        begins.append(less if automatic == "SAME_UPPER" else more)
        ends.append(more if automatic == "SAME_UPPER" else less)
    emit = Emitter(graph, node)
    result = emit(
        "ConvTranspose",
        *node.input,
        dilations=dilations,
        group=attribute(node, "group", 1),
        kernel_shape=list(weight[2:]),
        output_padding=extra,
        pads=[*begins, *ends],
        strides=strides,
    )
    emit.bind(node.output[0], result)
    return emit.made


def space_to_depth(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """SpaceToDepth with the channels before the block (CRD)."""
    shape = graph.shape(node.input[0])
    if attribute(node, "mode", "DCR") != "CRD" or shape is None or len(shape) != 4:
        return None
    block = attribute(node, "blocksize")
    batch, channels, height, width = shape
    emit = Emitter(graph, node)
    blocks = emit.reshape(node.input[0], (batch, channels, height // block, block, width // block, block))
    turned = emit("Transpose", blocks, perm=[0, 1, 3, 5, 2, 4])
    emit.bind(node.output[0], emit.reshape(turned, (batch, channels * block * block, height // block, width // block)))
    return emit.made
