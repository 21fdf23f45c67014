"""One second of serving, read off the counters: what every model is doing now. Belongs to the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hone.dashboard.latency import since, summary
from hone.metrics import ModelStatistics

#: Seconds of points kept for a chart.
MAX_POINTS = 600

Place = tuple[str, str]
"""Model and version."""


@dataclass(slots=True)
class _Before:
    """What the counters said at the last reading, and what came of it."""

    statistics: ModelStatistics
    num_successes: int
    num_failures: int
    requests: dict[str, list[int]]
    executions: dict[str, list[int]]
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    told: dict[str, Any] = field(default_factory=dict)


class Readings:
    """Takes the differences between one reading and the next. `now` is in seconds since the epoch, for the chart;
    `elapsed` is the time between two readings by a clock that does not jump."""

    def __init__(self) -> None:
        self._before: dict[Place, _Before] = {}

    def read(
        self, all_statistics: Iterable[ModelStatistics], now: float, elapsed: float
    ) -> dict[Place, dict[str, Any]]:
        """What is told of each version. Of one that rests, the same object as the time before."""
        told: dict[Place, dict[str, Any]] = {}
        for statistics in all_statistics:
            place = (statistics.name, statistics.version)
            before = self._before.get(place)
            if before is None or before.statistics is not statistics:
                before = self._before[place] = _first(statistics)
                before.told = _told(statistics, before, 0.0, 0.0, {})
            else:
                _next(statistics, before, now, max(elapsed, 1e-3))
            told[place] = before.told
        for gone in [place for place in self._before if place not in told]:
            del self._before[gone]
        return told

    def points(self, model: str) -> dict[str, list[dict[str, Any]]]:
        """What was read lately, by version; the newest last."""
        return {version: list(before.points) for (name, version), before in self._before.items() if name == model}


def _first(statistics: ModelStatistics) -> _Before:
    requests, executions = _histograms(statistics)
    return _Before(statistics, statistics.num_successes, sum(statistics.failures.values()), requests, executions)


def _histograms(statistics: ModelStatistics) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    engines = statistics.engines
    return (
        {name: list(engine.request_counts) for name, engine in engines.items()},
        {name: list(engine.execution_counts) for name, engine in engines.items()},
    )


def _next(statistics: ModelStatistics, before: _Before, now: float, elapsed: float) -> None:
    successes, failures = statistics.num_successes, sum(statistics.failures.values())
    num_new, num_failed = successes - before.num_successes, failures - before.num_failures
    if not num_new and not num_failed:
        was_active = before.told["requests_per_second"] or before.told["errors_per_second"]
        if was_active:
            before.points.append({"t": round(now, 1), "rps": 0.0, "eps": 0.0, "request": {}, "execution": {}})
        if was_active or before.told["num_pending"] != statistics.num_pending:
            before.told = _told(statistics, before, 0.0, 0.0, {})
        return
    requests, executions = _histograms(statistics)
    window = {
        "request": _windows(requests, before.requests),
        "execution": _windows(executions, before.executions),
    }
    before.num_successes, before.num_failures = successes, failures
    before.requests, before.executions = requests, executions
    per_second, errors = round(num_new / elapsed, 2), round(num_failed / elapsed, 2)
    before.points.append({"t": round(now, 1), "rps": per_second, "eps": errors, **window})
    before.told = _told(statistics, before, per_second, errors, window)


def _windows(now: dict[str, list[int]], before: dict[str, list[int]]) -> dict[str, list[float]]:
    """[hits, p50, p99] of each engine that ran something since."""
    found = {name: since(counts, before.get(name)) for name, counts in now.items()}
    return {name: summary(counts) for name, counts in found.items() if any(counts)}


def _told(
    statistics: ModelStatistics, before: _Before, per_second: float, errors: float, window: dict[str, Any]
) -> dict[str, Any]:
    return {
        "num_successes": before.num_successes,
        "num_failures": before.num_failures,
        "num_pending": statistics.num_pending,
        "requests_per_second": per_second,
        "errors_per_second": errors,
        "window": window,
        "total": {
            "request": {name: summary(counts) for name, counts in before.requests.items()},
            "execution": {name: summary(counts) for name, counts in before.executions.items()},
        },
    }
