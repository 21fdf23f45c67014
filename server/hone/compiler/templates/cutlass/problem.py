"""What a GPU workload computes, as numbers: rows, columns, depth, batches of a product; the sizes of a convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hone.compiler.workload import Workload


@dataclass(frozen=True, slots=True)
class Matmul:
    """C[batch, M, N] = A[batch, M, K] B[batch, K, N]; `shared_b`: one B for all batches, which are then rows of one."""

    m: int
    n: int
    k: int
    batch: int
    shared_b: bool
    transpose_b: bool
    """B is stored as (..., N, K)."""

    @property
    def multiply_adds(self) -> int:
        return self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Convolution:
    """NHWC data, OHWI weights, NHWC output."""

    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    all_padding: tuple[int, int, int, int]
    """Top, left, bottom, right."""
    dilation: tuple[int, int]
    groups: int
    rows: int
    columns: int

    @property
    def padding(self) -> tuple[int, int]:
        """Top and left; the output's size tells the others."""
        return self.all_padding[:2]

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_outputs(self) -> int:
        return self.outputs // self.groups

    @property
    def gemm(self) -> tuple[int, int, int]:
        """M, N and K of the implicit product of one group."""
        depth = self.kernel[0] * self.kernel[1] * self.group_channels
        return self.batch * self.rows * self.columns, self.group_outputs, depth

    @property
    def multiply_adds(self) -> int:
        return math.prod(self.gemm) * self.groups


def matmul_of(workload: Workload) -> Matmul | None:
    """None where it is no product of a shape that kernels take."""
    if workload.op != "matmul" or len(workload.inputs) < 2:
        return None
    a, b = workload.inputs[0].shape, workload.inputs[1].shape
    if len(a) < 2 or len(b) < 2:
        return None
    transpose_b = bool(dict(workload.attributes).get("transpose_b", False))
    k, n = (b[-1], b[-2]) if transpose_b else (b[-2], b[-1])
    if a[-1] != k or 0 in (*a, *b):
        return None
    batch_a, batch_b = math.prod(a[:-2]), math.prod(b[:-2])
    if batch_b == 1:
        return Matmul(batch_a * a[-2], n, k, 1, True, transpose_b)
    if batch_a != batch_b or tuple(d for d in a[:-2] if d != 1) != tuple(d for d in b[:-2] if d != 1):
        return None
    return Matmul(a[-2], n, k, batch_a, False, transpose_b)


def convolution_of(workload: Workload) -> Convolution | None:
    """None where it is no two-dimensional convolution in the layouts that kernels take."""
    if workload.op != "conv2d" or len(workload.inputs) < 2:
        return None
    attributes = dict(workload.attributes)
    if (attributes.get("data_layout"), attributes.get("kernel_layout")) != ("NHWC", "OHWI"):
        return None
    if attributes.get("out_layout") not in ("NHWC", "", None):
        return None
    data, weight = workload.inputs[0].shape, workload.inputs[1].shape
    if len(data) != 4 or len(weight) != 4 or 0 in (*data, *weight):
        return None
    groups = int(attributes.get("groups", 1))
    n, h, w, c = data
    o, r, s, i = weight
    if i * groups != c or o % groups:
        return None
    strides, dilation = _pair(attributes["strides"]), _pair(attributes.get("dilation", (1, 1)))
    padding = tuple(int(p) for p in attributes["padding"])
    top, left, bottom, right = padding if len(padding) == 4 else (*_pair(padding), *_pair(padding))
    rows = (h + top + bottom - dilation[0] * (r - 1) - 1) // strides[0] + 1
    columns = (w + left + right - dilation[1] * (s - 1) - 1) // strides[1] + 1
    if rows < 1 or columns < 1:
        return None
    return Convolution(n, h, w, c, o, (r, s), strides, (top, left, bottom, right), dilation, groups, rows, columns)


def result_shape(workload: Workload) -> tuple[int, ...]:
    """The shape of the operator's own result, which the epilogue's steps work on."""
    if workload.op == "matmul" and (matmul_of(workload)) is not None:
        a, b = workload.inputs[0].shape, workload.inputs[1].shape
        n = b[-2] if dict(workload.attributes).get("transpose_b", False) else b[-1]
        lead = a[:-2] if math.prod(a[:-2]) >= math.prod(b[:-2]) else b[:-2]
        return (*lead, a[-2], n)
    if workload.op == "conv2d" and (conv := convolution_of(workload)) is not None:
        return (conv.batch, conv.rows, conv.columns, conv.outputs)
    return workload.output.shape


def _pair(value: object) -> tuple[int, int]:
    numbers = tuple(int(number) for number in value) if isinstance(value, (tuple, list)) else (int(str(value)),) * 2
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
