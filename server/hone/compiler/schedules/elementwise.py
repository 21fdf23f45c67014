"""Element-wise blocks, copies and gathers: one pass, parallel outside, contiguous vectors inside."""

from __future__ import annotations

from math import prod
from typing import Any

from tvm.s_tir import Schedule

from hone.compiler.schedules.access import Block, Loop
from hone.compiler.schedules.vectors import divisor, lanes_of
from hone.compiler.target import CpuTarget


def schedule_elementwise(schedule: Schedule, block: Block, target: CpuTarget, *, parallel: bool) -> None:
    """Only the loops that `block` tells of are touched."""
    loops = _outermost_first(block.loops)
    if not loops:
        return
    schedule.reorder(*(loop.rv for loop in loops))
    inner = _fusible_suffix(loops)
    outer = loops[: len(loops) - len(inner)]
    extent = prod(loop.extent for loop in inner)
    contiguous = inner[-1].contiguous
    fused = _fuse(schedule, inner)
    lanes = lanes_of(extent, target) if contiguous and block.has_vectors else 0
    outside: list[Any] = [loop.rv for loop in outer]
    if lanes:
        rest, vector = schedule.split(fused, [None, lanes])
        schedule.vectorize(vector)
        if not outer or prod(loop.extent for loop in outer) < 4 * target.num_threads:
            outside.append(rest)
    elif not outer and parallel:
        # No vector divides it: threads take long runs, in which LLVM makes vectors with a tail.
        chunks = divisor(extent, 8 * target.num_threads)
        rest, _ = schedule.split(fused, [chunks if chunks > 1 else 4 * target.num_threads, None])
        outside.append(rest)
    if parallel and outside:
        schedule.parallel(schedule.fuse(*outside))


def _outermost_first(loops: tuple[Loop, ...]) -> list[Loop]:
    """Loops in the order of what is written, its contiguous one innermost."""
    if any(loop.write is None for loop in loops):
        return list(loops)
    return sorted(loops, key=lambda loop: -(loop.write or 0) if loop.extent > 1 else -(1 << 62))


def _fusible_suffix(loops: list[Loop]) -> list[Loop]:
    """The inner loops that are one run of memory in everything they touch."""
    suffix = [loops[-1]]
    for loop in reversed(loops[:-1]):
        inside = suffix[0]
        if loop.extent != 1 and not _continues(loop, inside):
            break
        suffix.insert(0, loop)
        if loop.extent == 1:
            continue
    return suffix


def _continues(outer: Loop, inner: Loop) -> bool:
    pairs = [(outer.write, inner.write), *zip(outer.reads, inner.reads, strict=True)]
    return all(a is not None and b is not None and a == b * inner.extent for a, b in pairs)


def _fuse(schedule: Schedule, loops: list[Loop]) -> Any:
    return schedule.fuse(*(loop.rv for loop in loops)) if len(loops) > 1 else loops[0].rv
