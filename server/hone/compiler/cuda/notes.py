"""What people should know of a GPU's kernel beside its workload: which operators were padded for it, and what stands
between the two operators of one persistent kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hone.compiler.cuda.padding import Padding
from hone.compiler.cuda.pairs import first_epilogue
from hone.compiler.workload import TensorType, Workload

_PAIRS = ("matmul_matmul", "conv2d_conv2d")


def note_of(workload: Workload, paddings: Sequence[Padding]) -> str:
    """In words; empty where there is nothing to tell. `paddings` are those of the model that calls the kernel."""
    told = []
    if workload.op in _PAIRS:
        between = "".join(f" +{step.op}" for step in first_epilogue(workload))
        second = "x".join(map(str, workload.inputs[2].shape))
        told.append(f"two operators in one kernel: the first{between}, then {second}")
    if padded := operators_padded(workload, paddings):
        told.append(f"padded from {' and '.join(map(str, padded))}")
    return "; ".join(told)


def operators_padded(workload: Workload, paddings: Sequence[Padding]) -> list[Workload]:
    """The operators that became this workload by padding, as they were; their epilogues are not told.

    Operators of the same sizes share a kernel, so some of its calls may be of one that is of those sizes by itself.
    """
    sizes = {_sizes(data, weight) for data, weight in _operands(workload)}
    return [one.operator for one in paddings if _sizes(*one.padded.inputs[:2]) in sizes]


def _operands(workload: Workload) -> Iterator[tuple[TensorType, TensorType]]:
    """Data and weight of the operator, or of both."""
    if len(workload.inputs) < 2:
        return
    data, weight = workload.inputs[:2]
    yield data, weight
    if workload.op in _PAIRS:
        outputs_first = workload.op == "conv2d_conv2d" or dict(workload.attributes).get("transpose_b")
        middle = weight.shape[0] if outputs_first else weight.shape[-1]
        yield TensorType((*workload.output.shape[:-1], middle), data.dtype), workload.inputs[2]


def _sizes(data: TensorType, weight: TensorType) -> tuple[int, int, tuple[int, ...]]:
    """Whatever the operator was made of on its way to a kernel: rows may be numbered otherwise, a matrix transposed, a
    pointwise convolution a product."""
    width = data.shape[-1] if data.shape else 1
    return math.prod(data.shape), width, tuple(sorted(dim for dim in weight.shape if dim != 1))
