"""Epilogues in C++: each step an expression over vectors of sixteen float32. NaN passes through."""

from __future__ import annotations

import math
from collections.abc import Callable

from hone.compiler.workload import Operand, Workload

_NUMBER = "_mm512_set1_ps("
# The second operand of x86's minimum and maximum is the result where one is NaN: so values stand second.
_EXPRESSIONS: dict[str, Callable[..., str]] = {
    "add": lambda a, b: f"_mm512_add_ps({a}, {b})",
    "subtract": lambda a, b: f"_mm512_sub_ps({a}, {b})",
    "multiply": lambda a, b: f"_mm512_mul_ps({a}, {b})",
    "divide": lambda a, b: f"_mm512_div_ps({a}, {b})",
    "maximum": lambda a, b: _extremum("max", a, b),
    "minimum": lambda a, b: _extremum("min", a, b),
    "relu": lambda a: f"_mm512_max_ps(_mm512_setzero_ps(), {a})",
    "relu6": lambda a: f"_mm512_min_ps(_mm512_set1_ps(6.0f), _mm512_max_ps(_mm512_setzero_ps(), {a}))",
    "leakyrelu": lambda a, slope: (
        f"select(_mm512_cmp_ps_mask({a}, _mm512_setzero_ps(), _CMP_GT_OQ), {a}, _mm512_mul_ps({a}, {slope}))"
    ),
    "silu": lambda a: f"_mm512_mul_ps({a}, sigmoid16({a}))",
    "gelu": lambda a: f"gelu16({a})",
    "sigmoid": lambda a: f"sigmoid16({a})",
    "tanh": lambda a: f"tanh16({a})",
    "erf": lambda a: f"erf16({a})",
    "exp": lambda a: f"exp16({a})",
    "sqrt": lambda a: f"_mm512_sqrt_ps({a})",
    "abs": lambda a: f"_mm512_abs_ps({a})",
    "round": lambda a: f"_mm512_roundscale_ps({a}, 0)",  # halves to even
    "negative": lambda a: f"_mm512_sub_ps(_mm512_setzero_ps(), {a})",
    "clip": lambda a, low, high: f"_mm512_min_ps({high}, _mm512_max_ps({low}, {a}))",
}


def _extremum(which: str, a: str, b: str) -> str:
    """A number is no NaN; of other second operands the NaN is put back."""
    found = f"_mm512_{which}_ps({b}, {a})"
    if b.startswith(_NUMBER):
        return found
    return f"select(is_nan({b}), {b}, {found})"


def is_expressible(workload: Workload) -> bool:
    return all(step.op in _EXPRESSIONS for step in workload.epilogue)


def expressions(workload: Workload) -> list[str]:
    """The steps in order: `value0` is the operator's result, step i makes `value{i+1}`."""
    return [_EXPRESSIONS[step.op](*(_operand(operand) for operand in step.operands)) for step in workload.epilogue]


def operand_positions(workload: Workload) -> list[int]:
    """Which of the kernel's arguments the steps read."""
    return sorted({o.at for step in workload.epilogue for o in step.operands if o.kind == "input"})


def _operand(operand: Operand) -> str:
    if operand.kind == "value":
        return f"value{operand.at}"
    if operand.kind == "constant":
        return f"{_NUMBER}{_literal(operand.constant)})"
    return f"operand{operand.at}(data, image, vector, row, column)"


def _literal(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    return f"float({value.hex()})"
