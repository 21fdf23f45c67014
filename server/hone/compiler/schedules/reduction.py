"""Reductions: accumulators in vector registers, whichever way memory runs."""

from __future__ import annotations

from math import prod
from typing import Any

from tvm.s_tir import Schedule

from hone.compiler.schedules.access import Block, Loop, loops_of_axes
from hone.compiler.schedules.elementwise import schedule_elementwise
from hone.compiler.schedules.vectors import divisor, lanes_of, partial_width
from hone.compiler.target import CpuTarget

#: Independent accumulators: enough to hide the latency of an addition.
_ACCUMULATORS = 8
#: Outputs that are reduced together where they make no whole vectors; they stay in the nearest cache.
_MAX_RUN = 256
#: Reduction loops up to this many points in all are unrolled (small windows).
_MAX_UNROLLED = 16


def schedule_reduction(
    schedule: Schedule, block: Block, epilogue: Block | None, target: CpuTarget, *, parallel: bool
) -> None:
    """A reduction, and the block that follows it item by item if there is one."""
    if epilogue is not None and [loop.extent for loop in epilogue.loops] != [loop.extent for loop in block.spatial]:
        schedule_reduction(schedule, block, None, target, parallel=parallel)
        schedule_elementwise(schedule, epilogue, target, parallel=parallel)
        return
    lane_loop = next((loop for loop in reversed(block.spatial) if loop.contiguous and loop.extent > 1), None)
    if lane_loop is not None:
        _over_outputs(schedule, block, lane_loop, epilogue, target, parallel=parallel)
        return
    contiguous = next((loop for loop in reversed(block.reduction) if loop.contiguous_reduction), None)
    partial = split_into_lanes(schedule, block, contiguous, target) if contiguous is not None else None
    _over_inputs(schedule, block, partial, epilogue, parallel=parallel)


def split_into_lanes(schedule: Schedule, block: Block, loop: Loop, target: CpuTarget) -> Any | None:
    """Split a reduction along contiguous memory into lanes: a block of vector accumulators, and the old one sums lanes.

    None where no vector divides the loop (LLVM then makes vectors of sums, not of maxima).
    """
    width = partial_width(loop.extent, target)
    if not width:
        return None
    _, lanes = schedule.split(loop.rv, [None, width])
    return schedule.rfactor(lanes, factor_axis=len(block.spatial))


def _over_outputs(
    schedule: Schedule, block: Block, lane_loop: Loop, epilogue: Block | None, target: CpuTarget, *, parallel: bool
) -> None:
    """Lanes are neighbouring outputs: a tile of outputs stays in registers while everything is reduced into it."""
    at = block.spatial.index(lane_loop)
    lanes = lanes_of(lane_loop.extent, target)
    explicit = bool(lanes)
    # Where no vector fits, a run of outputs is reduced together and LLVM makes vectors, with a tail.
    lanes = lanes or divisor(lane_loop.extent, _MAX_RUN)
    vectors = divisor(lane_loop.extent // lanes, 4) if explicit else 1
    rows_at = _rows_to_tile(block, at)
    rows = divisor(block.spatial[rows_at].extent, _ACCUMULATORS // vectors) if rows_at is not None and explicit else 1
    out = epilogue.rv if epilogue is not None else schedule.cache_write(block.rv, 0, "local")
    loops = list(schedule.get_loops(out))
    tile_v, vector_loop, lane = schedule.split(loops[at], [None, vectors, lanes])
    tile: list[Any] = [vector_loop, lane]
    outer = [loop for i, loop in enumerate(loops) if i not in (at, rows_at)]
    if rows_at is not None and rows > 1:
        row_outer, row = schedule.split(loops[rows_at], [None, rows])
        outer.append(row_outer)
        tile.insert(0, row)
    elif rows_at is not None:
        outer.append(loops[rows_at])
    schedule.reorder(*outer, tile_v, *tile)
    if parallel:
        tile_v = schedule.fuse(*outer, tile_v)
        schedule.parallel(tile_v)
    _finish_tile(schedule, tile, explicit)

    schedule.compute_at(block.rv, tile_v, preserve_unit_loops=True)
    num_reduction = len(block.reduction)
    inside = schedule.get_loops(block.rv)[-len(block.loops) :]
    spatial, reduction = list(inside[: len(block.spatial)]), list(inside[len(block.spatial) :])
    assert len(reduction) == num_reduction
    # At the tile, each axis of the block has the tile's extent; the lanes' axis is split again.
    vector_loop, lane = schedule.split(spatial[at], [None, lanes])
    tile = [vector_loop, lane]
    if rows_at is not None and rows > 1:
        tile.insert(0, spatial[rows_at])
    rest = [loop for i, loop in enumerate(spatial) if i != at and not (i == rows_at and rows > 1)]
    schedule.reorder(*rest, *reduction, *tile)
    _finish_tile(schedule, tile, explicit)
    if prod(loop.extent for loop in block.reduction) <= _MAX_UNROLLED:
        for loop in reduction:
            schedule.unroll(loop)
    init = schedule.decompose_reduction(block.rv, reduction[0])
    _finish_tile(schedule, list(schedule.get_loops(init))[-len(tile) :], explicit)
    if epilogue is not None:
        schedule.set_scope(block.rv, 0, "local")


def _rows_to_tile(block: Block, lanes_at: int) -> int | None:
    """A second axis for the register tile: one along which some input is used again, else any."""
    others = [(i, loop) for i, loop in enumerate(block.spatial) if i != lanes_at and loop.extent > 1]
    reusing = [i for i, loop in others if 0 in loop.reads]
    if reusing:
        return reusing[-1]
    return others[-1][0] if others else None


def _finish_tile(schedule: Schedule, tile: list[Any], explicit: bool) -> None:
    for loop in tile[:-1]:
        schedule.unroll(loop)
    if explicit:
        schedule.vectorize(tile[-1])


def _over_inputs(
    schedule: Schedule, block: Block, partial: Any | None, epilogue: Block | None, *, parallel: bool
) -> None:
    """Outputs one by one: what each sums lies together (then `partial` has its lanes), or lies apart."""
    out = epilogue.rv if epilogue is not None else block.rv
    # Spatial loops come first; a block that was split into lanes still has all of them.
    spatial = list(schedule.get_loops(out))[: len(block.spatial)]
    if spatial:
        row = schedule.fuse(*spatial)
        if parallel:
            schedule.parallel(row)
        if epilogue is not None:
            schedule.compute_at(block.rv, row, preserve_unit_loops=True)
        if partial is not None:
            schedule.compute_at(partial, row, preserve_unit_loops=True)
    if partial is not None:
        vectorize_partial(schedule, partial)


def vectorize_partial(schedule: Schedule, partial: Any) -> None:
    """The lanes of a block made by `split_into_lanes` become the innermost loop, and a vector."""
    axes = loops_of_axes(schedule, partial)
    kinds = [int(variable.iter_type) for variable in schedule.get(partial).iter_vars]
    # The first axis is the one that was split off.
    lanes = axes[0][-1]
    reduction = [loops[-1] for loops, kind in zip(axes, kinds, strict=True) if kind != 0 and loops]
    schedule.reorder(*reduction, lanes)
    schedule.vectorize(lanes)
    init = schedule.decompose_reduction(partial, reduction[0])
    schedule.vectorize(schedule.get_loops(init)[-1])
