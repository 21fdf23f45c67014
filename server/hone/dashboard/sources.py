"""What the dashboard reads. It changes nothing: actions go through the endpoints that everybody uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hone.kernels.statistics import CacheStatistics


class Counters(Protocol):
    """The tuner's counters that the page shows."""

    report: dict[str, float]
    num_promotions: int
    num_quarantines: int
    child_seconds: float

    @property
    def num_rollbacks(self) -> Mapping[str, int]: ...


class Tuning(Protocol):
    """See `assembly.BackgroundTuning`. Any thread may ask; nothing waits."""

    def statuses(self) -> list[dict[str, Any]]:
        """Finished snapshots, one a served version; a new object whenever something changed."""

    @property
    def counters(self) -> Counters: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def cache_statistics(self) -> CacheStatistics: ...


class Service(Protocol):
    """The part of the inference service that the page shows."""

    def ready(self) -> bool: ...


class Keys(Protocol):
    """Keys of the restricted groups of endpoints."""

    def wanted(self, group: str, fields: Mapping[bytes, bytes]) -> str:
        """Name of the header that a request of these headers lacks for the group; empty where it may pass."""
