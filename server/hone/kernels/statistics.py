"""What is counted of the cache: plain numbers that the metrics layer reads whenever it likes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from hone.kernels.entry import Failure, Kind, Miss


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts since the cache was opened, by this process; they only grow, but for the last two."""

    hits: dict[str, int]
    """By kind."""
    misses: dict[tuple[str, str], int]
    """By kind and reason."""
    publishes: dict[tuple[str, str], int]
    """By kind and outcome: published, present (there already, or another was faster), or the reason of the failure."""
    evictions: dict[str, int]
    """By kind."""
    num_discarded: int
    """Corrupt and incomplete entries that were taken away."""
    num_swept: int
    """Staging folders of writers that died."""
    size_bytes: int
    """Of all entries, when last looked at, and what was published since."""
    num_entries: int


@dataclass(slots=True)
class CacheStatistics:
    """Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hits: Counter[str] = field(default_factory=Counter)
    _misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    _publishes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _evictions: Counter[str] = field(default_factory=Counter)
    _num_discarded: int = 0
    _num_swept: int = 0
    _size_bytes: int = 0
    _num_entries: int = 0

    def hit(self, kind: Kind) -> None:
        with self._lock:
            self._hits[kind] += 1

    def miss(self, kind: Kind, miss: Miss) -> None:
        with self._lock:
            self._misses[kind, miss.reason.value] += 1

    def published(self, kind: Kind, size_bytes: int) -> None:
        with self._lock:
            self._publishes[kind, "published"] += 1
            self._size_bytes += size_bytes
            self._num_entries += 1

    def present(self, kind: Kind) -> None:
        with self._lock:
            self._publishes[kind, "present"] += 1

    def failed(self, kind: Kind, failure: Failure) -> None:
        with self._lock:
            self._publishes[kind, failure.reason.value] += 1

    def evicted(self, kind: Kind) -> None:
        with self._lock:
            self._evictions[kind] += 1

    def discarded(self) -> None:
        with self._lock:
            self._num_discarded += 1

    def swept(self, count: int) -> None:
        with self._lock:
            self._num_swept += count

    def looked(self, size_bytes: int, num_entries: int) -> None:
        with self._lock:
            self._size_bytes, self._num_entries = size_bytes, num_entries

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def snapshot(self) -> CacheCounts:
        with self._lock:
            return CacheCounts(
                dict(self._hits),
                dict(self._misses),
                dict(self._publishes),
                dict(self._evictions),
                self._num_discarded,
                self._num_swept,
                self._size_bytes,
                self._num_entries,
            )
