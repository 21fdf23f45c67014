"""Inlining: a value that is cheap to compute where it is read needs no memory of its own.

Functions that would stand too deep in each other's arguments are kept apart: TVM would not get done with them.
"""

from __future__ import annotations

from tvm.s_tir import Schedule, ScheduleError

from hone.compiler.mathematics import MAX_NESTING
from hone.compiler.schedules.access import read_block, root_blocks

#: A producer is computed again at most this often; more, and a pass through memory is cheaper.
_MAX_REPEATS = 4
#: An expensive one (a transcendental function) is not repeated.
_CHEAP_OPERATIONS = 8


def inline_producers(schedule: Schedule) -> None:
    """Inline every element-wise producer that its consumers do not read too often."""
    for rv in root_blocks(schedule):
        block = read_block(schedule, rv)
        if block is None or block.reduction or not list(schedule.get_consumers(rv)):
            continue
        repeats = 0.0
        for consumer in schedule.get_consumers(rv):
            reader = read_block(schedule, consumer)
            if reader is None:
                break
            if block.nesting and reader.nesting and block.nesting + reader.nesting > MAX_NESTING:
                break
            # Each read of the producer's buffer happens at every point of the reader.
            repeats += reader.points / max(block.points, 1)
        else:
            if repeats <= (_MAX_REPEATS if block.operations <= _CHEAP_OPERATIONS else 1.0):
                try:
                    schedule.compute_inline(rv)
                except ScheduleError:
                    continue  # written in part, or read by what cannot take it: it stays a block
