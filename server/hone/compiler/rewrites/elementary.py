"""Small operators by others, where TVM's importer has none or gets a variant wrong (found by the coverage table)."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.empty import extreme
from hone.compiler.rewrites.guards import require_within

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


def tile(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Tile of constant repeats as a broadcast between two reshapes. TVM's own takes remainders of indices, of which
    LLVM 22 makes wrong code for CPUs with AVX-512 where sizes are small powers of two."""
    shape = graph.shape(node.input[0])
    repeats = graph.constant(node.input[1]) if len(node.input) > 1 else None
    if not shape or repeats is None or repeats.shape != (len(shape),) or not all(shape) or not repeats.all():
        return None
    times = repeats.tolist()
    narrow = [n for size, count in zip(shape, times, strict=True) for n in ([1, size] if count > 1 else [size])]
    wide = [n for size, count in zip(shape, times, strict=True) for n in ([count, size] if count > 1 else [size])]
    emit = Emitter(graph, node)
    repeated = emit("Expand", emit.reshape(node.input[0], narrow), emit.constant(np.array(wide, np.int64)))
    emit.bind(node.output[0], emit.reshape(repeated, [size * count for size, count in zip(shape, times, strict=True)]))
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


def one_hot(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """OneHot of a known depth as a comparison: the importer is right for few of its types and axes only."""
    depth, shape = graph.constant(node.input[1]), graph.shape(node.input[0])
    if depth is None or shape is None:
        return None
    size, rank = int(depth.reshape(-1)[0]), len(shape) + 1
    axis = attribute(node, "axis", -1) % rank
    emit = Emitter(graph, node)
    indices = emit.cast(node.input[0], TensorProto.INT64)
    negative = emit("Less", indices, emit.constant(np.array(0, np.int64)))
    indices = emit("Where", negative, emit("Add", indices, emit.constant(np.array(size, np.int64))), indices)
    places = np.arange(size, dtype=np.int64).reshape([size if other == axis else 1 for other in range(rank)])
    hot = emit("Equal", emit.unsqueeze(indices, axis), emit.constant(places))
    off, on = (emit.squeeze(emit.slice(node.input[2], 0, place, place + 1), 0) for place in (0, 1))
    emit.bind(node.output[0], emit("Where", hot, on, off))
    return emit.made


def modulo(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Mod of floating-point numbers with the divisor's sign: the remainder of a division, by the importer, is not a
    number for an infinite divisor."""
    dtype = graph.dtype(node.input[0])
    if attribute(node, "fmod", 0) or dtype not in _FLOATS:
        return None
    emit = Emitter(graph, node)
    zero = emit.constant(np.array(0, helper.tensor_dtype_to_np_dtype(dtype)))
    divisor = node.input[1]
    rest = emit("Mod", node.input[0], divisor, fmod=1)
    differs = emit("Xor", emit("Less", rest, zero), emit("Less", divisor, zero))
    is_some = emit("Not", emit("Equal", rest, zero))
    emit.bind(node.output[0], emit("Where", emit("And", is_some, differs), emit("Add", rest, divisor), rest))
    return emit.made


def reduce_extreme(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ReduceMax and ReduceMin of truth values, or of nothing."""
    if graph.dtype(node.input[0]) != TensorProto.BOOL:
        return extreme(graph, node)
    emit = Emitter(graph, node)
    numbers = emit.cast(node.input[0], TensorProto.INT32)
    attributes = {item.name: attribute(node, item.name) for item in node.attribute}
    reduced = emit(node.op_type, numbers, *node.input[1:], **attributes)
    emit.bind(node.output[0], emit.cast(reduced, TensorProto.BOOL))
    return emit.made


def reverse_sequence(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ReverseSequence: item t of a sequence of length n is its item n - 1 - t, and beyond n the item itself."""
    shape = graph.shape(node.input[0])
    batch_axis, time_axis = attribute(node, "batch_axis", 1), attribute(node, "time_axis", 0)
    if shape is None or {batch_axis, time_axis} != {0, 1}:
        return None
    steps = shape[time_axis]
    emit = Emitter(graph, node)
    if graph.constant(node.input[1]) is None:
        require_within(emit, node.input[1], 0, steps)
    lengths = emit.unsqueeze(node.input[1], 1)
    times = emit.constant(np.arange(steps, dtype=np.int64)[None, :])
    last = emit("Sub", lengths, emit.constant(np.array(1, np.int64)))
    at = emit("Where", emit("Less", times, lengths), emit("Sub", last, times), times)
    turn = [1, 0, *range(2, len(shape))]
    data = emit("Transpose", node.input[0], perm=turn) if batch_axis == 1 else node.input[0]
    reversed_ = emit("GatherND", data, emit.unsqueeze(at, 2), batch_dims=1)
    emit.bind(node.output[0], emit("Transpose", reversed_, perm=turn) if batch_axis == 1 else reversed_)
    return emit.made
