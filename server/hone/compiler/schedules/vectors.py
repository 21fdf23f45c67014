"""Splits that make vectors."""

from __future__ import annotations

from hone.compiler.target import CpuTarget


def lanes_of(extent: int, target: CpuTarget) -> int:
    """How many items of a contiguous loop one vector operation takes, dividing it; 0 where LLVM had better decide.

    A full register if that divides; a loop that is itself short, whole; else a large divisor.
    """
    if extent % target.lanes == 0:
        return target.lanes
    if 2 <= extent <= target.lanes:
        return extent
    return next((d for d in range(2 * target.lanes, target.lanes // 2, -1) if extent % d == 0), 0)


def divisor(extent: int, limit: int) -> int:
    """The largest divisor up to a limit."""
    return next(d for d in range(min(extent, max(limit, 1)), 0, -1) if extent % d == 0)


def partial_width(extent: int, target: CpuTarget) -> int:
    """How many partial sums (lanes) a contiguous reduction is split into, dividing it; 0 where none is worth it.

    Several registers' worth, so that additions need not wait for each other; else parts of a register.
    """
    for width in (4 * target.lanes, 2 * target.lanes, target.lanes, target.lanes // 2, target.lanes // 4):
        if width >= 4 and extent % width == 0 and extent > width:
            return width
    return 0
