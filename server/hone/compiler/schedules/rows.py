"""Functions that go over the same rows several times (softmax, norms): a row is done before the next one starts."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tvm.s_tir import Schedule

from hone.compiler.schedules.access import Block, NotApplicable, root_blocks
from hone.compiler.schedules.elementwise import schedule_elementwise
from hone.compiler.schedules.reduction import split_into_lanes, vectorize_partial
from hone.compiler.schedules.vectors import lanes_of
from hone.compiler.target import CpuTarget


def schedule_rows(schedule: Schedule, blocks: list[Block], target: CpuTarget, *, parallel: bool) -> None:
    """Every block moves under one loop over rows, whose data stays in the nearest cache.

    Raises NotApplicable where blocks do not share rows, or rows are too few for the threads that are wanted.
    """
    out = blocks[-1]
    shared = _shared_loops(blocks)
    rows = prod(loop.extent for loop in out.loops[:shared])
    if out.reduction or not any(block.reduction for block in blocks):
        raise NotApplicable("no reduction before an element-wise end")
    if shared == 0 or (parallel and rows < target.num_threads):
        raise NotApplicable("too few rows are shared")
    partials = [partial for block in blocks if (partial := _lanes(schedule, block, target)) is not None]
    with_lanes = {block.name for block, _ in partials}

    row = schedule.fuse(*(loop.rv for loop in out.loops[:shared]))
    if parallel:
        schedule.parallel(row)
    for rv in reversed(root_blocks(schedule)[:-1]):
        schedule.compute_at(rv, row, preserve_unit_loops=True)

    for _, partial in partials:
        vectorize_partial(schedule, partial)
    for block in blocks[:-1]:
        if block.name in with_lanes:
            continue  # what is left of it sums a few lanes
        moved = block.moved(schedule, shared)
        if block.reduction:
            _vectorize_outputs(schedule, moved, target)
        else:
            schedule_elementwise(schedule, moved, target, parallel=False)
    rest = tuple(
        replace(loop, rv=rv) for loop, rv in zip(out.loops[shared:], list(schedule.get_loops(out.rv))[1:], strict=True)
    )
    schedule_elementwise(schedule, replace(out, loops=rest), target, parallel=False)


def _lanes(schedule: Schedule, block: Block, target: CpuTarget) -> tuple[Block, Any] | None:
    contiguous = next((loop for loop in reversed(block.reduction) if loop.contiguous_reduction), None)
    partial = split_into_lanes(schedule, block, contiguous, target) if contiguous is not None else None
    return (block, partial) if partial is not None else None


def _vectorize_outputs(schedule: Schedule, block: Block, target: CpuTarget) -> None:
    """A reduction inside a row whose outputs are neighbours: they are the lanes."""
    lane_loop = next((loop for loop in reversed(block.spatial) if loop.contiguous and loop.extent > 1), None)
    lanes = lanes_of(lane_loop.extent, target) if lane_loop is not None else 0
    if lane_loop is None or not lanes:
        return
    others = [loop.rv for loop in block.spatial if loop is not lane_loop]
    vector_loop, lane = schedule.split(lane_loop.rv, [None, lanes])
    reduction = [loop.rv for loop in block.reduction]
    schedule.reorder(*others, vector_loop, *reduction, lane)
    schedule.vectorize(lane)
    init = schedule.decompose_reduction(block.rv, reduction[0])
    schedule.vectorize(schedule.get_loops(init)[-1])


def _shared_loops(blocks: list[Block]) -> int:
    """Leading loops that all blocks have alike."""
    count = 0
    for loops in zip(*(block.spatial for block in blocks), strict=False):
        if len({loop.extent for loop in loops}) != 1:
            break
        count += 1
    return count
