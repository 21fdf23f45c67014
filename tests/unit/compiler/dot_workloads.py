"""Workloads for the dot-product kernels, and what they compute in float64."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import tvm

from hone.compiler.target import CpuTarget
from hone.compiler.templates.packing import Packer
from hone.compiler.workload import Operand, Step, TensorType, Workload

BF16 = ml_dtypes.bfloat16
VALUE = Operand("value", 0)
ADD = Step("add", (VALUE, Operand("input", 2)))


def matmul(rows, depth, columns, epilogue=(), extra=(), x="float32", out="float32") -> Workload:
    inputs = [TensorType((*rows, depth), x), TensorType((depth, columns), "float32")]
    inputs += [tensor if isinstance(tensor, TensorType) else TensorType(tensor, "float32") for tensor in extra]
    attributes = (("precision", "bf16"), ("weights", (1,)))
    return Workload("matmul", tuple(inputs), TensorType((*rows, columns), out), attributes, tuple(epilogue))


def convolution(
    batch=1, channels_in=32, size=(9, 7), channels_out=48, kernel=(3, 3), strides=(1, 1), padding=(1, 1, 1, 1),
    dilation=(1, 1), width_in=16, width=16, epilogue=(), extra=(), x="float32", out="float32",
) -> Workload:  # fmt: skip
    """`width_in` is 0 for plain data; `extra` are types of operands, or "channel" and "residual"."""
    top, left, bottom, right = padding
    out_h = (size[0] + top + bottom - (kernel[0] - 1) * dilation[0] - 1) // strides[0] + 1
    out_w = (size[1] + left + right - (kernel[1] - 1) * dilation[1] - 1) // strides[1] + 1
    data = (batch, -(-channels_in // width_in), *size, width_in) if width_in else (batch, channels_in, *size)
    output = (batch, -(-channels_out // width), out_h, out_w, width)
    known = {
        "channel": TensorType((1, output[1], 1, 1, width), "float32"),
        "image_channel": TensorType((batch, output[1], 1, 1, width), "float32"),
        "residual": TensorType(output, "float32"),
        "bf16_residual": TensorType(output, "bfloat16"),
        "one": TensorType((), "float32"),
    }
    inputs = (TensorType(data, x), TensorType((channels_out, channels_in, *kernel), "float32"))
    attributes = {
        "dilation": dilation,
        "groups": 1,
        "padding": padding,
        "precision": "bf16",
        "strides": strides,
        "weights": (1,),
    }
    return Workload(
        "conv2d",
        (*inputs, *(known[kind] for kind in extra)),
        TensorType(output, out),
        tuple(sorted(attributes.items())),
        tuple(epilogue),
    )


def arrays_of(workload: Workload, seed=0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.standard_normal(tensor.shape), BF16 if tensor.dtype == "bfloat16" else np.float32)
        for tensor in workload.inputs
    ]


def rounded(array) -> np.ndarray:
    return array.astype(BF16).astype(np.float64)


def products(workload: Workload, inputs) -> np.ndarray:
    """The operator's result in float64, of operands as bfloat16 has them, in the output's layout."""
    x, weight = rounded(inputs[0]), rounded(inputs[1])
    if workload.op == "matmul":
        return x @ weight
    batch, blocks_out, out_h, out_w, width = workload.output.shape
    if x.ndim == 5:
        x = x.transpose(0, 1, 4, 2, 3).reshape(batch, -1, *x.shape[2:4])
    top, left, bottom, right = workload.attribute("padding")
    (stride_y, stride_x), dilation = workload.attribute("strides"), workload.attribute("dilation")
    x = np.pad(x[:, : weight.shape[1]], ((0, 0), (0, 0), (top, bottom), (left, right)))
    sums = np.zeros((batch, blocks_out * width, out_h, out_w))
    for ky in range(weight.shape[2]):
        for kx in range(weight.shape[3]):
            y, z = ky * dilation[0], kx * dilation[1]
            window = x[
                :, :, y : y + (out_h - 1) * stride_y + 1 : stride_y, z : z + (out_w - 1) * stride_x + 1 : stride_x
            ]
            sums[:, : weight.shape[0]] += np.einsum("nihw,oi->nohw", window, weight[:, :, ky, kx])
    return sums.reshape(batch, blocks_out, width, out_h, out_w).transpose(0, 1, 3, 4, 2)


def run(template, workload: Workload, inputs, candidate=None, target: CpuTarget | None = None) -> np.ndarray:
    """What a kernel makes of it, written over NaN."""
    target = target or CpuTarget.detect(num_threads=1)
    candidate = candidate or template.candidates(workload, target)[0]
    kernel = template.build(workload, candidate, target)
    arguments = [tensor_of(array) for array in Packer(workload, inputs).pack(template, candidate, target)]
    dtype = BF16 if workload.output.dtype == "bfloat16" else np.float32
    out = tensor_of(np.full(workload.output.shape, math.nan, dtype))
    kernel(*arguments, out)
    return np.asarray(out.numpy()).astype(np.float64)


def tensor_of(array):
    return tvm.runtime.tensor(array)
