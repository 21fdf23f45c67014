"""What tuning processes did with the cache: each tells it over its pipe, and the server adds it up for its metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.kernels import KINDS, FailureReason, MissReason
from hone.kernels.statistics import CacheStatistics

#: The name of the event.
CACHE_EVENT = "cache"
_INTERVAL_SECONDS = 5.0
_MAX_COUNT = 1 << 40
_OUTCOMES = ("published", "present", *(reason.value for reason in FailureReason))
#: The labels that a count of each name may have.
_LABELS = {
    "hits": frozenset((kind,) for kind in KINDS),
    "misses": frozenset((kind, reason.value) for kind in KINDS for reason in MissReason),
    "publishes": frozenset((kind, outcome) for kind in KINDS for outcome in _OUTCOMES),
    "discarded": frozenset({()}),
}


@dataclass(slots=True)
class CacheTraffic:
    """In the server: sums over all tuning processes. Written by the tuner's thread, read by any."""

    hits: Counter[str] = field(default_factory=Counter)
    """By kind."""
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and reason."""
    publishes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and outcome."""
    num_discarded: int = 0

    def hear(self, event: Mapping[str, Any]) -> None:
        """Add what a process tells. What is no count of the cache says nothing: a child's words are not trusted."""
        for (kind,), count in _counts(event, "hits"):
            self.hits[kind] += count
        for (kind, reason), count in _counts(event, "misses"):
            self.misses[kind, reason] += count
        for (kind, outcome), count in _counts(event, "publishes"):
            self.publishes[kind, outcome] += count
        for _, count in _counts(event, "discarded"):
            self.num_discarded += count


class CacheTelling:
    """In the child: `emit` sends events on, and before them what was counted since the last time: with each but those
    of progress, and with those every few seconds. So a process that is killed takes little along."""

    def __init__(
        self,
        statistics: CacheStatistics,
        emit: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statistics, self._emit, self._clock = statistics, emit, clock
        self._told: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _LABELS}
        self._next = clock() + _INTERVAL_SECONDS

    def emit(self, event: str, **fields: Any) -> None:
        if event != "stage" or self._clock() >= self._next:
            self.tell()
        self._emit(event, **fields)

    def tell(self) -> None:
        """Send what was counted since the last time, if there is anything."""
        self._next = self._clock() + _INTERVAL_SECONDS
        counts = self._statistics.snapshot()
        now: dict[str, Counter[tuple[str, ...]]] = {
            "hits": Counter({(kind,): count for kind, count in counts.hits.items()}),
            "misses": Counter(counts.misses),
            "publishes": Counter(counts.publishes),
            "discarded": Counter({(): counts.num_discarded}),
        }
        news = {name: now[name] - self._told[name] for name in now}
        if any(news.values()):
            self._emit(
                CACHE_EVENT,
                **{name: [[*labels, count] for labels, count in some.items()] for name, some in news.items()},
            )
        self._told = now


def _counts(event: Mapping[str, Any], name: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Labels and numbers of those counts that are in order."""
    told = event.get(name)
    for one in told if isinstance(told, list) else ():
        if not isinstance(one, list) or not one or not all(isinstance(label, str) for label in one[:-1]):
            continue
        *labels, count = one
        if tuple(labels) in _LABELS[name] and type(count) is int and 0 <= count <= _MAX_COUNT:
            yield tuple(labels), count
