"""A schedule for every function that no template took: parallel outside, vectors inside, chosen by what loops touch.

Rules go from the most to the least specific; the first that applies to the whole function wins. The last one schedules
each block by itself and always applies where loops are plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import Schedule, ScheduleError

from hone.compiler.schedules.access import Block, NotApplicable, read_block, root_blocks
from hone.compiler.schedules.elementwise import schedule_elementwise
from hone.compiler.schedules.inline import inline_producers
from hone.compiler.schedules.reduction import schedule_reduction
from hone.compiler.schedules.rows import schedule_rows
from hone.compiler.target import CpuTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduled function and how it was done; `microseconds` is the rough estimate that decided on threads."""

    func: Any
    rule: str
    microseconds: float
    parallel: bool


def plain_schedule(func: Any, target: CpuTarget) -> Scheduled:
    """Never raises for what TVM accepts: a function with loops that are not plain stays as it is."""
    base = Schedule(func)
    inline_producers(base)
    blocks = [read_block(base, rv) for rv in root_blocks(base)]
    known = [block for block in blocks if block is not None]
    operations = sum(block.points * block.operations for block in known)
    num_bytes = sum(block.num_bytes for block in known)
    parallel = target.is_worth_threads(operations, num_bytes)
    microseconds = round(target.microseconds(operations, num_bytes), 2)
    for rule, apply in _RULES.items():
        schedule = base.copy()
        try:
            apply(schedule, target, parallel)
        except (NotApplicable, ScheduleError) as problem:
            logger.debug("rule '%s' does not apply: %s", rule, str(problem).splitlines()[0] if str(problem) else "")
            continue
        return Scheduled(schedule.mod["main"].with_attrs(dict(func.attrs or {})), rule, microseconds, parallel)
    return Scheduled(func, "as it is", microseconds, False)


def _elementwise(schedule: Schedule, target: CpuTarget, parallel: bool) -> None:
    (block,) = _plain_blocks(schedule, 1)
    if block.reduction:
        raise NotApplicable("it reduces")
    schedule_elementwise(schedule, block, target, parallel=parallel)


def _reduction(schedule: Schedule, target: CpuTarget, parallel: bool) -> None:
    """One reduction, and at most what follows it item by item."""
    blocks = _with_vectors(_plain_blocks(schedule, 1, 2))
    if not blocks[0].reduction or any(block.reduction for block in blocks[1:]):
        raise NotApplicable("not one reduction")
    schedule_reduction(schedule, blocks[0], blocks[1] if blocks[1:] else None, target, parallel=parallel)


def _rows(schedule: Schedule, target: CpuTarget, parallel: bool) -> None:
    """Reductions and what is between them, row by row: softmax, norms."""
    schedule_rows(schedule, _with_vectors(_plain_blocks(schedule, *range(2, 16))), target, parallel=parallel)


def _each_block(schedule: Schedule, target: CpuTarget, parallel: bool) -> None:
    for rv in root_blocks(schedule):
        block = read_block(schedule, rv)
        if block is None:
            continue
        worth = parallel and target.is_worth_threads(block.points * block.operations, block.num_bytes)
        if block.reduction and block.has_vectors:
            schedule_reduction(schedule, block, None, target, parallel=worth)
        elif not block.reduction:
            schedule_elementwise(schedule, block, target, parallel=worth)


_RULES: dict[str, Callable[[Schedule, CpuTarget, bool], None]] = {
    "element-wise": _elementwise,
    "reduction": _reduction,
    "rows": _rows,
    "each block": _each_block,
}


def _with_vectors(blocks: list[Block]) -> list[Block]:
    if not all(block.has_vectors for block in blocks):
        raise NotApplicable("LLVM makes no right vectors of it")
    return blocks


def _plain_blocks(schedule: Schedule, *counts: int) -> list[Block]:
    blocks = [read_block(schedule, rv) for rv in root_blocks(schedule)]
    if len(blocks) not in counts or None in blocks:
        raise NotApplicable(f"{len(blocks)} blocks, or not plain ones")
    return [block for block in blocks if block is not None]
