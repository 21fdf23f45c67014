"""Functions that go over the same rows several times (softmax, norms): a row is done before the next one starts."""

from __future__ import annotations

from tvm.s_tir import Schedule, ScheduleError

from hone.compiler.schedules.access import Block, read_block, root_blocks
from hone.compiler.schedules.elementwise import schedule_elementwise
from hone.compiler.schedules.reduction import split_into_lanes, vectorize_partial
from hone.compiler.target import CpuTarget


def schedule_rows(schedule: Schedule, blocks: list[Block], target: CpuTarget, *, parallel: bool) -> None:
    """Every block moves under one loop over rows, in which rows stay in the nearest cache.

    Raises ScheduleError where blocks do not share rows, or rows are too few for the threads that are wanted.
    """
    if not any(block.reduction for block in blocks):
        raise ScheduleError("nothing is reduced")
    shared = _shared_loops(blocks)
    rows = 1
    for loop in blocks[-1].loops[:shared]:
        rows *= loop.extent
    if shared == 0 or (parallel and rows < target.num_threads):
        raise ScheduleError("too few rows are shared")
    partials = []
    for block in blocks:
        contiguous = next((loop for loop in reversed(block.reduction) if loop.contiguous_reduction), None)
        if contiguous is not None:
            partial = split_into_lanes(schedule, block, contiguous, target)
            if partial is not None:
                partials.append(partial)
    out = blocks[-1].rv
    row = schedule.fuse(*(loop.rv for loop in blocks[-1].loops[:shared]))
    if parallel:
        schedule.parallel(row)
    for rv in reversed(root_blocks(schedule)[:-1]):
        schedule.compute_at(rv, row, preserve_unit_loops=True)
    lanes = {id(partial) for partial in partials}
    for partial in partials:
        vectorize_partial(schedule, partial)
    for rv in [block.rv for block in blocks if not block.reduction and block.rv is not out] + [out]:
        assert id(rv) not in lanes
        _vectorize_inside(schedule, rv, 1 if rv is out else 1, target)


def _shared_loops(blocks: list[Block]) -> int:
    """Leading loops that all blocks have alike."""
    count = 0
    for loops in zip(*(block.spatial for block in blocks), strict=False):
        if len({loop.extent for loop in loops}) != 1:
            break
        count += 1
    return count


def _vectorize_inside(schedule: Schedule, rv: object, keep: int, target: CpuTarget) -> None:
    block = read_block(schedule, rv)
    if block is not None:
        schedule_elementwise(schedule, block, target, parallel=False, keep_outer=keep)
