"""A small constant matrix times vectors in registers, with few operations."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tvm import tirx

from hone.compiler.templates.cpu.winograd_matrices import Matrix


def multiply(matrix: Matrix, values: Sequence[Any]) -> list[Any]:
    """`matrix` times `values`, as expressions.

    Rows that differ only in signs (those of points p and -p) share the sums of what agrees and of what does not.
    """
    results: list[Any] = [None] * len(matrix)
    for at, row in enumerate(matrix):
        if results[at] is not None:
            continue
        twin = next((j for j in range(at + 1, len(matrix)) if results[j] is None and _are_twins(row, matrix[j])), None)
        if twin is None:
            results[at] = _sum(row, values)
            continue
        other = matrix[twin]
        same = _sum([c if c == d else Fraction(0) for c, d in zip(row, other, strict=True)], values)
        opposite = _sum([c if c != d else Fraction(0) for c, d in zip(row, other, strict=True)], values)
        results[at], results[twin] = same + opposite, same - opposite
    return results


def _are_twins(row: Sequence[Fraction], other: Sequence[Fraction]) -> bool:
    signs = [c == d for c, d in zip(row, other, strict=True) if c]
    return all(abs(c) == abs(d) for c, d in zip(row, other, strict=True)) and any(signs) and not all(signs)


def _sum(row: Sequence[Fraction], values: Sequence[Any]) -> Any:
    total: Any = None
    # Terms of coefficient one first: the others are then fused multiply-adds.
    for coefficient, value in sorted(zip(row, values, strict=True), key=lambda term: abs(term[0]) != 1):
        if not coefficient:
            continue
        if total is None:
            total = value if coefficient == 1 else value * tirx.const(float(coefficient), "float32")
        elif coefficient == 1:
            total = total + value
        elif coefficient == -1:
            total = total - value
        else:
            total = total + value * tirx.const(float(coefficient), "float32")
    return total if total is not None else tirx.const(0.0, "float32")
