"""Epilogues of CUTLASS kernels: a workload's steps as one function of float32 numbers, and what its operands are.

The function is the same text on the GPU and in host twins. It is applied to each item of a tile while the tile is in
registers, so what rides there costs no traffic of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hone.compiler.templates.cutlass.problem import result_shape
from hone.compiler.workload import Operand, TensorType, Workload

#: How an operand spreads over the output, seen as a matrix: rows are all dimensions but the last, columns the last.
#: "tensor" varies over both, "row" is a vector over columns (a bias), "column" one over rows, "image" varies over
#: images (the first of four dimensions) and columns, "scalar" over nothing.
OperandKind: TypeAlias = Literal["tensor", "row", "column", "image", "scalar"]

COLUMN_SUM = "column_sum"

#: Bytes of one access to memory at most.
MAX_ACCESS_BYTES = 16

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4}

#: Step -> expression over float32. Functions are those of sources/functions.cuh.jinja. NaN passes through.
_EXPRESSIONS: dict[str, Callable[..., str]] = {
    "add": lambda a, b: f"({a} + {b})",
    "subtract": lambda a, b: f"({a} - {b})",
    "multiply": lambda a, b: f"({a} * {b})",
    "divide": lambda a, b: f"({a} / {b})",
    "maximum": lambda a, b: f"maximum({a}, {b})",
    "minimum": lambda a, b: f"minimum({a}, {b})",
    "relu": lambda a: f"maximum({a}, 0.0f)",
    "relu6": lambda a: f"minimum(maximum({a}, 0.0f), 6.0f)",
    "leakyrelu": lambda a, slope: f"({a} > 0.0f ? {a} : {a} * {slope})",
    "clip": lambda a, low, high: f"minimum(maximum({a}, {low}), {high})",
    "abs": lambda a: f"fabsf({a})",
    "round": lambda a: f"nearbyintf({a})",  # halves to even
    "negative": lambda a: f"(-{a})",
    "sqrt": lambda a: f"sqrtf({a})",
    "exp": lambda a: f"exponential({a})",
    "erf": lambda a: f"erff({a})",
    "sigmoid": lambda a: f"sigmoid({a})",
    "tanh": lambda a: f"hyperbolic_tangent({a})",
    "silu": lambda a: f"({a} * sigmoid({a}))",
    "gelu": lambda a: f"(0.5f * {a} * (1.0f + erff({a} * 0.70710678f)))",
    "gelu_tanh": lambda a: f"gelu_tanh({a})",
    "hardsigmoid": lambda a: f"minimum(maximum({a} * 0.16666667f + 0.5f, 0.0f), 1.0f)",
    "hardswish": lambda a: f"({a} * minimum(maximum({a} * 0.16666667f + 0.5f, 0.0f), 1.0f))",
    "softplus": lambda a: f"softplus({a})",
    "mish": lambda a: f"({a} * hyperbolic_tangent(softplus({a})))",
    "cast": lambda a: a,  # values are float32 until the output is written in its own dtype
}

#: Steps of so many instructions that an unrolled epilogue would not fit the instruction cache.
_HEAVY = frozenset({"exp", "erf", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "mish"})


@dataclass(frozen=True, slots=True)
class EpilogueOperand:
    """One tensor that the steps read; `at` is its position among the workload's inputs."""

    at: int
    kind: OperandKind
    dtype: str

    def fields(self) -> dict[str, Any]:
        return {"at": self.at, "kind": self.kind, "dtype": self.dtype}


@dataclass(frozen=True, slots=True)
class EpilogueProgram:
    """All that a rendered epilogue is made of; no sizes are in it."""

    operands: tuple[EpilogueOperand, ...]
    steps: tuple[str, ...]
    """Expressions: `value0` is the operator's result, step i makes `value{i+1}`, `operand{i}` is the operand's item."""
    output: str
    """Dtype of the output."""
    column_sum: bool = False
    """The output is the last value summed over rows: all of them, or those of each of the first dimensions' items."""
    heavy: bool = False

    @classmethod
    def of(cls, workload: Workload, num_operands: int = 2) -> EpilogueProgram | None:
        """The workload's epilogue; None where it cannot be expressed.

        The first `num_operands` inputs are the operator's own, and no step may read them.
        """
        steps = workload.epilogue
        column_sum = bool(steps) and steps[-1].op == COLUMN_SUM
        body = steps[:-1] if column_sum else steps
        if any(step.op not in _EXPRESSIONS for step in body):
            return None
        if column_sum and [operand.kind for operand in steps[-1].operands] != ["value"]:
            return None
        if column_sum and steps[-1].operands[0].at != len(body):
            return None
        positions = sorted({o.at for step in body for o in step.operands if o.kind == "input"})
        if any(at < num_operands for at in positions):
            return None
        result = result_shape(workload)
        if column_sum and not _sums_rows(workload.output, result):
            return None
        kinds = [operand_kind(workload.inputs[at], result) for at in positions]
        operands = []
        for at, kind in zip(positions, kinds, strict=True):
            if kind is None or workload.inputs[at].dtype not in DTYPE_BYTES:
                return None
            if kind == "image" and not workload.op.startswith("conv2d"):
                return None
            operands.append(EpilogueOperand(at, kind, workload.inputs[at].dtype))
        index = {at: number for number, at in enumerate(positions)}
        return cls(
            operands=tuple(operands),
            steps=tuple(_EXPRESSIONS[step.op](*(_operand(o, index) for o in step.operands)) for step in body),
            output=workload.output.dtype,
            column_sum=column_sum,
            heavy=any(step.op in _HEAVY for step in body),
        )

    @property
    def fast_math(self) -> bool:
        """Whether approximations of 2^-11 are below what the output's dtype keeps."""
        return self.output not in ("float32", "int32")

    def alignment(self, num_columns: int) -> int:
        """Items of a row that may be read and written at once: a power of two that divides the number of columns."""
        widest = max(1, MAX_ACCESS_BYTES // DTYPE_BYTES[self.output])
        return largest_power(num_columns, widest)

    def fields(self) -> dict[str, Any]:
        """For templates, as JSON."""
        return {
            "operands": [operand.fields() for operand in self.operands],
            "steps": list(self.steps),
            "output": self.output,
            "column_sum": self.column_sum,
            "heavy": self.heavy,
            "fast_math": self.fast_math,
        }


def _sums_rows(output: TensorType, result: Sequence[int]) -> bool:
    """Whether the output has a sum of rows for each item of the result's first dimensions (or one for all)."""
    num_groups, left = divmod(output.num_elements, result[-1])
    groups = {math.prod(result[:count]) for count in range(len(result) - 1)}
    return output.dtype == "float32" and left == 0 and num_groups in groups


def operand_kind(operand: TensorType, output: Sequence[int]) -> OperandKind | None:
    """How the operand spreads over an output of this shape by numpy's rule; None for a way that kernels do not know."""
    if len(operand.shape) > len(output):
        return None
    shape = (1,) * (len(output) - len(operand.shape)) + tuple(operand.shape)
    if any(dim not in (1, out) for dim, out in zip(shape, output, strict=True)):
        return None
    if math.prod(shape) == 1:
        return "scalar"
    over_columns = shape[-1] == output[-1]
    rows = [(dim, out) for dim, out in zip(shape[:-1], output[:-1], strict=True) if out != 1]
    if all(dim == 1 for dim, _ in rows):
        return "row"
    if all(dim == out for dim, out in rows):
        return "tensor" if over_columns else "column"
    if len(output) == 4 and over_columns and shape[0] == output[0] and shape[1:3] == (1, 1):
        return "image"
    return None


def largest_power(number: int, limit: int) -> int:
    """The largest power of two, at most `limit`, that divides the number."""
    power = 1
    while power * 2 <= limit and number % (power * 2) == 0:
        power *= 2
    return power


def _operand(operand: Operand, index: dict[int, int]) -> str:
    if operand.kind == "value":
        return f"value{operand.at}"
    if operand.kind == "constant":
        return literal(operand.constant)
    return f"operand{index[operand.at]}"


def literal(value: float) -> str:
    """A float32 constant in C++."""
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return "__builtin_inff()" if value > 0 else "(-__builtin_inff())"
    return f"float({float(value).hex()})"
