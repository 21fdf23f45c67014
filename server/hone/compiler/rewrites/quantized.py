"""Integer convolutions and matrix products in floating point, where that gives the same integers.

The compiler has no schedules for 8-bit convolutions on CPUs. Products of 8-bit numbers are integers, and float32 adds
integers without rounding while the sums stay below 2^24. The weights, mostly constants, tell how large a sum can get;
where it may get larger, the channels are cut into parts whose sums do not, and those are added as 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.types import Array

#: float32 holds every integer of a size below this.
_EXACT = 2**24
#: The largest difference of two 8-bit numbers.
_MAX_DIFFERENCE = 255
#: More parts than this cost more than they gain.
_MAX_PARTS = 16

_LIMITS: dict[int | None, tuple[int, int]] = {TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127)}


def dequantize_linear(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """DequantizeLinear without its zero points where they are all zero, which later phases cannot see in a weight."""
    x, scale, zero = _padded(node.input, 3)
    values = graph.constant(zero) if zero else None
    if values is None or np.any(values):
        return None
    without = NodeProto()
    without.CopyFrom(node)
    del without.input[:]
    without.input.extend([x, scale])
    return [without]


def conv_integer(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ConvInteger: a convolution of the differences to the zero points, with 32-bit sums."""
    x, w, x_zero, w_zero = _padded(node.input, 4)
    emit = Emitter(graph, node)
    sums = _convolve(emit, x, x_zero, w, w_zero)
    if sums is None:
        return None
    emit.bind(node.output[0], sums)
    return emit.made


def qlinear_conv(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """QLinearConv: the same, scaled, rounded to even, moved to the output's zero point and saturated."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = _padded(node.input, 9)
    emit = Emitter(graph, node)
    sums = _convolve(emit, x, x_zero, w, w_zero)
    weights, scale = graph.shape(w), _multiplier(graph, x_scale, w_scale, y_scale)
    if sums is None or weights is None or scale is None:
        return None
    spatial = [1] * (len(weights) - 2)
    if bias:
        sums = emit("Add", sums, emit.reshape(bias, (1, weights[0], *spatial)))
    if scale.size > 1:
        scale = scale.reshape(-1, *spatial)
    return _requantize(emit, sums, scale, y_zero)


def qlinear_matmul(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """QLinearMatMul with one scale a matrix, or one a column of the second."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _padded(node.input, 8)
    emit = Emitter(graph, node)
    left, right, scale = graph.shape(a), graph.shape(b), _multiplier(graph, a_scale, b_scale, y_scale)
    if left is None or right is None or len(left) < 2 or len(right) < 2 or scale is None:
        return None
    if scale.size not in (1, right[-1]) or any(not _is_scalar(graph, name) for name in (a_scale, a_zero)):
        return None
    parts = _parts(np.full(right[-2], _MAX_DIFFERENCE))
    if parts is None:
        return None
    x, y = _difference(emit, a, a_zero), _difference(emit, b, b_zero)
    sums = []
    for start, end in parts:
        if len(parts) > 1:
            product = emit(
                "MatMul", emit.slice(x, len(left) - 1, start, end), emit.slice(y, len(right) - 2, start, end)
            )
        else:
            product = emit("MatMul", x, y)
        sums.append(emit.cast(product, TensorProto.INT32))
    return _requantize(emit, _total(emit, sums), scale, y_zero)


def _convolve(emit: Emitter, x: str, x_zero: str, w: str, w_zero: str) -> str | None:
    """The 32-bit sums of a convolution with constant weights."""
    graph, node = emit.graph, emit.node
    weights, zero = graph.constant(w), _zero_point(graph, w_zero)
    if weights is None or zero is None or weights.dtype.itemsize != 1 or weights.size == 0:
        return None
    differences = weights.astype(np.int64) - zero.reshape(-1, *[1] * (weights.ndim - 1))
    # For each input channel, the largest sum of weights' sizes over the output channels bounds what it adds.
    per_channel = np.abs(differences).sum(axis=tuple(range(2, weights.ndim))).max(axis=0)
    parts = _parts(per_channel)
    group = attribute(node, "group", 1)
    if parts is None or (len(parts) > 1 and group != 1):
        return None
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {name: value for name in names if (value := attribute(node, name)) is not None}
    data, sums = _difference(emit, x, x_zero), []
    for start, end in parts:
        one = emit.slice(data, 1, start, end) if len(parts) > 1 else data
        kernel = emit.constant(differences[:, start:end].astype(np.float32))
        sums.append(emit.cast(emit("Conv", one, kernel, **attributes), TensorProto.INT32))
    return _total(emit, sums)


def _parts(sizes: Array) -> list[tuple[int, int]] | None:
    """Ranges of channels whose sums stay exact, given the most that the weights of each add up to."""
    parts, start, total = [], 0, 0
    for channel, size in enumerate(sizes):
        bound = int(size) * _MAX_DIFFERENCE
        if bound >= _EXACT:
            return None
        if total + bound >= _EXACT:
            parts.append((start, channel))
            start, total = channel, 0
        total += bound
    parts.append((start, len(sizes)))
    return parts if len(parts) <= _MAX_PARTS else None


def _total(emit: Emitter, sums: Sequence[str]) -> str:
    total = sums[0]
    for part in sums[1:]:
        total = emit("Add", total, part)
    return total


def _difference(emit: Emitter, value: str, zero: str) -> str:
    """A quantized tensor less its zero point, in float32."""
    result = emit.cast(value, TensorProto.FLOAT)
    constant = emit.graph.constant(zero) if zero else None
    if not zero or (constant is not None and not constant.any()):
        return result
    return str(emit("Sub", result, emit.cast(zero, TensorProto.FLOAT)))


def _requantize(emit: Emitter, sums: str, scale: Array, zero: str) -> list[NodeProto] | None:
    dtype = emit.graph.dtype(zero) if zero else TensorProto.UINT8
    if dtype is None or dtype not in _LIMITS:
        return None
    scaled = emit("Round", emit("Mul", emit.cast(sums, TensorProto.FLOAT), emit.constant(scale)))
    if zero:
        scaled = emit("Add", scaled, emit.cast(zero, TensorProto.FLOAT))
    low, high = (emit.constant(np.array(limit, np.float32)) for limit in _LIMITS[dtype])
    emit.bind(emit.node.output[0], emit.cast(emit("Clip", scaled, low, high), dtype))
    return emit.made


def _multiplier(graph: Graph, *names: str) -> Array | None:
    """first * second / third, in float32 as ONNX Runtime computes it; None where one is no constant of that type."""
    values = [value for name in names if (value := graph.constant(name)) is not None and value.dtype == np.float32]
    if len(values) != len(names):
        return None
    first, second, third = (value.reshape(-1) for value in values)
    result: Array = (first * second / third).astype(np.float32)
    return result.reshape(()) if result.size == 1 else result


def _zero_point(graph: Graph, name: str) -> Array | None:
    if not name:
        return np.zeros(1, np.int64)
    value = graph.constant(name)
    return None if value is None else value.astype(np.int64).reshape(-1)


def _is_scalar(graph: Graph, name: str) -> bool:
    shape = graph.shape(name)
    return shape is not None and int(np.prod(shape)) == 1


def _padded(names: Sequence[str], count: int) -> list[str]:
    return [*names, *[""] * (count - len(names))][:count]
