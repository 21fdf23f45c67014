"""Which executions are so brief that handing them to a thread costs more than running them.

A request that an executor thread runs waits for two wake-ups and for the interpreter lock, 60 µs on an idle machine and
200 µs on a busy one, and takes 25 µs more of the processors. Executions that take about that or less are run on the
loop itself (docs/decisions/0010-brief-executions.md). What is brief is measured, for each shape by itself: on
threads, where waiting for the lock makes all look longer than they are, it is seen what is worth a trial; on the loop,
what stays.
"""

from __future__ import annotations

from hone.serving.slot import RouteKey

#: Nanoseconds. Executions that take less on threads, on average, are tried on the loop; those that take less than the
#: other there stay.
_TRY_NS, _STAY_NS = 200_000.0, 80_000.0
#: Share of the newest execution in an average. One that something else held up counts as twice the limit, and what
#: begins on the loop is taken for something near it.
_NEWEST_SHARE, _LONGEST_NS, _FIRST_NS = 1 / 16, 2 * _STAY_NS, 0.75 * _STAY_NS
#: Executions that run on threads before the next trial, after the first that failed; twice as many after each further.
_PATIENCE, _MAX_PATIENCE = 64, 1 << 16
_MAX_SHAPES = 256


class _Shape:
    __slots__ = ("away_ns", "here_ns", "is_brief", "num_to_wait", "patience")

    def __init__(self) -> None:
        self.is_brief = False
        self.away_ns = 2 * _TRY_NS
        self.here_ns = _FIRST_NS
        self.num_to_wait = 0
        self.patience = _PATIENCE


class BriefExecutions:
    """Averages of one model version, by shapes and rows, in fixed memory. Belongs to the event loop."""

    __slots__ = ("_shapes",)

    def __init__(self) -> None:
        self._shapes: dict[tuple[RouteKey, int], _Shape] = {}

    def __contains__(self, shape: tuple[RouteKey, int]) -> bool:
        """Whether executions of this key, with so many rows, are brief; not before some were seen."""
        known = self._shapes.get(shape)
        return known is not None and known.is_brief

    def learn(self, shape: tuple[RouteKey, int], duration_ns: int, *, on_loop: bool) -> None:
        """One more execution took so long in its engine, on the loop or on a thread."""
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _MAX_SHAPES:
                return
            known = self._shapes[shape] = _Shape()
        if on_loop:
            known.here_ns += _NEWEST_SHARE * (min(duration_ns, _LONGEST_NS) - known.here_ns)
            if known.here_ns > _STAY_NS:
                known.is_brief = False
                known.num_to_wait = known.patience
                known.patience = min(2 * known.patience, _MAX_PATIENCE)
            return
        known.away_ns += _NEWEST_SHARE * (min(duration_ns, 2 * _TRY_NS) - known.away_ns)
        if known.num_to_wait:
            known.num_to_wait -= 1
        elif not known.is_brief and known.away_ns <= _TRY_NS:
            known.is_brief = True
            known.here_ns = _FIRST_NS
