"""Workloads for tests of CUTLASS templates, and what they should give, in float64."""

from __future__ import annotations

import math

import numpy as np

from hone.compiler.workload import Operand, Step, TensorType, Workload
from hone.types import NUMPY_DTYPES

BFLOAT16 = NUMPY_DTYPES["BF16"]


def value(at):
    return Operand("value", at)


def operand(at):
    return Operand("input", at)


def constant(number):
    return Operand("constant", constant=number)


def chain(*steps):
    """Steps that each read the value before, and what else is given: ("add", operand(2)), "relu"."""
    named = [(step,) if isinstance(step, str) else step for step in steps]
    return tuple(Step(name, (value(at), *rest)) for at, (name, *rest) in enumerate(named))


def matmul(a, b, dtype="float16", output=None, epilogue=(), extra=(), *, out_dtype=None, weights=(1,), **attributes):
    """`a`, `b`: shapes; `extra`: (shape, dtype) of the epilogue's operands."""
    inputs = [TensorType(tuple(a), dtype), TensorType(tuple(b), dtype)]
    inputs += [TensorType(tuple(shape), kind) for shape, kind in extra]
    n = b[-2] if attributes.get("transpose_b") else b[-1]
    shape = output or (*(a[:-2] if math.prod(a[:-2]) >= math.prod(b[:-2]) else b[:-2]), a[-2], n)
    return Workload(
        "matmul",
        tuple(inputs),
        TensorType(tuple(shape), out_dtype or dtype),
        tuple(sorted({"weights": tuple(weights), **attributes}.items())),
        tuple(epilogue),
    )


def conv2d(
    data,
    weight,
    dtype="float16",
    *,
    strides=(1, 1),
    padding=(0, 0, 0, 0),
    dilation=(1, 1),
    groups=1,
    epilogue=(),
    extra=(),
    out_dtype=None,
    **attributes,
):
    """`data` NHWC, `weight` OHWI; `extra` as in `matmul`."""
    inputs = [TensorType(tuple(data), dtype), TensorType(tuple(weight), dtype)]
    inputs += [TensorType(tuple(shape), kind) for shape, kind in extra]
    top, left, bottom, right = padding
    rows = (data[1] + top + bottom - dilation[0] * (weight[1] - 1) - 1) // strides[0] + 1
    columns = (data[2] + left + right - dilation[1] * (weight[2] - 1) - 1) // strides[1] + 1
    given = {
        "strides": tuple(strides),
        "padding": tuple(padding),
        "dilation": tuple(dilation),
        "groups": groups,
        "data_layout": "NHWC",
        "kernel_layout": "OHWI",
        "out_layout": "NHWC",
        "weights": (1,),
        **attributes,
    }
    output = TensorType((data[0], rows, columns, weight[0]), out_dtype or dtype)
    return Workload("conv2d", tuple(inputs), output, tuple(sorted(given.items())), tuple(epilogue))


def numpy_dtype(dtype):
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def random_inputs(workload, seed=0):
    """Numbers of about one; integers over the whole range of their type."""
    rng = np.random.default_rng(seed)
    arrays = []
    for tensor in workload.inputs:
        if tensor.dtype in ("int8", "uint8"):
            limits = np.iinfo(tensor.dtype)
            arrays.append(rng.integers(limits.min, limits.max + 1, tensor.shape).astype(tensor.dtype))
        else:
            arrays.append(rng.standard_normal(tensor.shape).astype(numpy_dtype(tensor.dtype)))
    return arrays


def reference(workload, arrays):
    """The workload in float64, before its output is rounded."""
    wide = [array.astype(np.float64) for array in arrays]
    attributes = dict(workload.attributes)
    if workload.op == "matmul":
        b = np.swapaxes(wide[1], -1, -2) if attributes.get("transpose_b") else wide[1]
        values = [wide[0] @ b]
    else:
        values = [_convolution(wide[0], wide[1], attributes, convolution_shape(workload))]
    for step in workload.epilogue:
        if step.op == "column_sum":
            return _sums_of_rows(values[-1], workload.output.shape)
        arguments = []
        for one in step.operands:
            if one.kind == "value":
                arguments.append(values[one.at])
            else:
                arguments.append(one.constant if one.kind == "constant" else wide[one.at])
        values.append(_STEPS[step.op](*arguments))
    return values[-1]


def convolution_shape(workload):
    (n, *sizes, _), (outputs, *kernel, _) = workload.inputs[0].shape, workload.inputs[1].shape
    given = dict(workload.attributes)
    top, left, bottom, right = given["padding"]
    spans = [dilation * (side - 1) + 1 for dilation, side in zip(given["dilation"], kernel, strict=True)]
    padded = (sizes[0] + top + bottom, sizes[1] + left + right)
    return (n, *((p - k) // s + 1 for p, k, s in zip(padded, spans, given["strides"], strict=True)), outputs)


def _sums_of_rows(values, shape):
    columns = values.shape[-1]
    return values.reshape(math.prod(shape) // columns, -1, columns).sum(axis=1).reshape(shape)


def _convolution(data, weight, attributes, shape):
    top, left, bottom, right = attributes["padding"]
    padded = np.pad(data, ((0, 0), (top, bottom), (left, right), (0, 0)))
    (sh, sw), (dh, dw), groups = attributes["strides"], attributes["dilation"], attributes["groups"]
    outputs, kh, kw, channels = weight.shape
    result = np.zeros(shape)
    per_group = outputs // groups
    for r in range(kh):
        for s in range(kw):
            window = padded[
                :, r * dh : r * dh + (shape[1] - 1) * sh + 1 : sh, s * dw : s * dw + (shape[2] - 1) * sw + 1 : sw
            ]
            for g in range(groups):
                part = slice(g * per_group, (g + 1) * per_group)
                result[..., part] += window[..., g * channels : (g + 1) * channels] @ weight[part, r, s].T
    return result


_erf = np.vectorize(math.erf, otypes=[float])
_STEPS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "relu": lambda a: np.maximum(a, 0),
    "relu6": lambda a: np.clip(a, 0, 6),
    "leakyrelu": lambda a, slope: np.where(a > 0, a, a * slope),
    "clip": np.clip,
    "abs": np.abs,
    "round": np.rint,
    "negative": np.negative,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "erf": _erf,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "tanh": np.tanh,
    "silu": lambda a: a / (1 + np.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1 + _erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "hardsigmoid": lambda a: np.clip(a / 6 + 0.5, 0, 1),
    "hardswish": lambda a: a * np.clip(a / 6 + 0.5, 0, 1),
    "softplus": lambda a: np.log1p(np.exp(-np.abs(a))) + np.maximum(a, 0),
    "mish": lambda a: a * np.tanh(np.log1p(np.exp(-np.abs(a))) + np.maximum(a, 0)),
    "cast": lambda a: a,
}
STEPS = tuple(_STEPS)


def tolerance(dtype, depth, *, math_attribute=None):
    """Absolute, for sums of `depth` products of numbers of about one: what rounding the inputs and the output costs."""
    of_output = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-22, "int8": 0.5, "int32": 0.0}[dtype]
    of_inputs = 2**-10 if math_attribute == "tf32" else 2**-22
    return 4 * math.sqrt(depth) * max(of_output, of_inputs)
