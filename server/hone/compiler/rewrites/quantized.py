"""Integer convolutions and matrix products in floating point, where that gives the same integers.

The compiler has no schedules for 8-bit convolutions on CPUs. Products of 8-bit numbers are integers, and floating
point adds integers without rounding while the sums stay below 2^24 (float32) or 2^53 (float64): the weights, which
are constants, tell how large a sum can get.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.types import Array

#: Bits of the significand, the hidden one included: integers up to 2^bits are exact.
_EXACT = ((TensorProto.FLOAT, 2**24), (TensorProto.DOUBLE, 2**53))
#: The largest difference of two 8-bit numbers.
_MAX_DIFFERENCE = 255
#: Beyond this a 32-bit accumulator would wrap around, and floating point would not.
_MAX_INT32 = 2**31 - 1

_LIMITS: dict[int | None, tuple[int, int]] = {TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127)}


def conv_integer(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """ConvInteger: a convolution of the differences to the zero points, with 32-bit sums."""
    x, w, x_zero, w_zero = _padded(node.input, 4)
    emit = Emitter(graph, node)
    sums = _convolve(emit, x, x_zero, w, w_zero, bias="")
    if sums is None:
        return None
    emit.bind(node.output[0], emit.cast(sums, TensorProto.INT32))
    return emit.made


def qlinear_conv(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """QLinearConv: the same, scaled, rounded to even, moved to the output's zero point and saturated."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = _padded(node.input, 9)
    emit = Emitter(graph, node)
    sums = _convolve(emit, x, x_zero, w, w_zero, bias)
    weights = graph.shape(w)
    if sums is None or weights is None:
        return None
    scale = _multiplier(graph, x_scale, w_scale, y_scale)
    if scale is None:
        return None
    if scale.ndim == 1 and scale.size > 1:
        scale = scale.reshape(-1, *[1] * (len(weights) - 2))
    return _requantize(emit, sums, scale, y_zero)


def qlinear_matmul(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """QLinearMatMul with one scale a matrix, or one a column of the second."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _padded(node.input, 8)
    emit = Emitter(graph, node)
    shape = graph.shape(b)
    scale = _multiplier(graph, a_scale, b_scale, y_scale)
    if shape is None or len(shape) < 2 or scale is None or scale.size not in (1, shape[-1]):
        return None
    if any((value := graph.shape(name)) is None or np.prod(value) != 1 for name in (a_scale, a_zero)):
        return None
    dtype = _exact_type(shape[-2] * _MAX_DIFFERENCE**2)
    if dtype is None:
        return None
    left, right = _difference(emit, a, a_zero, dtype), _difference(emit, b, b_zero, dtype)
    return _requantize(emit, emit("MatMul", left, right), scale, y_zero)


def _convolve(emit: Emitter, x: str, x_zero: str, w: str, w_zero: str, bias: str) -> str | None:
    """The integer sums of a convolution, in floating point; None where they may not be exact."""
    graph, node = emit.graph, emit.node
    weights, zero = graph.constant(w), _zero_point(graph, w_zero)
    added = graph.constant(bias) if bias else np.zeros(1, np.int32)
    if weights is None or zero is None or added is None or weights.dtype.itemsize != 1 or weights.size == 0:
        return None
    differences = weights.astype(np.int64) - zero.reshape(-1, *[1] * (weights.ndim - 1))
    sums = np.abs(differences).reshape(len(weights), -1).sum(axis=1) * _MAX_DIFFERENCE
    dtype = _exact_type(int(sums.max()) + int(np.abs(added.astype(np.int64)).max()))
    if dtype is None:
        return None
    kind = np.float32 if dtype == TensorProto.FLOAT else np.float64
    inputs = [_difference(emit, x, x_zero, dtype), emit.constant(differences.astype(kind))]
    if bias:
        inputs.append(emit.constant(added.astype(kind)))
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {name: attribute(node, name) for name in names if attribute(node, name) is not None}
    return str(emit("Conv", *inputs, **attributes))


def _exact_type(bound: int) -> int | None:
    if bound > _MAX_INT32:
        return None
    return next(dtype for dtype, limit in _EXACT if bound < limit)


def _difference(emit: Emitter, value: str, zero: str, dtype: int) -> str:
    """A quantized tensor less its zero point, as floating point. A zero point a row (rank 1) is a column's here."""
    result = emit.cast(value, dtype)
    constant = emit.graph.constant(zero) if zero else None
    if not zero or (constant is not None and not constant.any()):
        return result
    return str(emit("Sub", result, emit.cast(zero, dtype)))


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


def _padded(names: Sequence[str], count: int) -> list[str]:
    return [*names, *[""] * (count - len(names))][:count]
