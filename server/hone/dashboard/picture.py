"""Puts together what the page shows: the repository's index, the counters of serving, and the tuner's snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from hone import __version__
from hone.config import Settings
from hone.dashboard.monitor import Parts, Picture
from hone.dashboard.readings import Readings
from hone.dashboard.sources import Service, Tuning
from hone.serving.registry import ModelRegistry

_REPORTED = ("candidates_built", "candidates_measured", "candidates_failed", "search_seconds", "compile_seconds")


class Painter:
    """Belongs to the event loop; only the folder of the repository is looked at on another thread."""

    def __init__(
        self,
        settings: Settings,
        service: Service,
        registry: ModelRegistry,
        tuning: Tuning | None,
        readings: Readings,
        known_names: Callable[[], list[str]],
    ) -> None:
        self._settings = settings
        self._service = service
        self._registry = registry
        self._tuning = tuning
        self._readings = readings
        self._known_names = known_names
        self._started_at = time.time()
        self._split: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}

    async def look(self, now: float, elapsed: float) -> Picture:
        known = await asyncio.to_thread(self._known_names)
        models: dict[str, Parts] = {}
        for entry in self._registry.index(known, ready_only=False):
            line = {"version": entry.version, "state": entry.state, "reason": entry.reason}
            models.setdefault(entry.name, {"index": []})["index"].append(line)
        read = self._readings.read((model.statistics for model in self._registry.served()), now, elapsed)
        for (name, version), told in read.items():
            models.setdefault(name, {}).setdefault("stats", {})[version] = told
        self._add_tuning(models)
        return Picture(self._server(), models)

    def _add_tuning(self, models: dict[str, Parts]) -> None:
        if self._tuning is None:
            return
        split = {}
        for status in self._tuning.statuses():
            name, version = status["model"], status["version"]
            if name not in models:
                continue
            found = self._split.get((name, version))
            if found is None or found[0] is not status:
                found = (status, {field: value for field, value in status.items() if field != "history"})
            split[name, version] = found
            models[name].setdefault("tuning", {})[version] = found[1]
            models[name].setdefault("history", {})[version] = status["history"]
        self._split = split

    def _server(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "version": __version__,
            "ready": self._service.ready(),
            "started": round(self._started_at),
            "control_mode": self._settings.model_control_mode,
            "tuning": self._settings.tuning,
        }
        if self._tuning is not None:
            counters = self._tuning.counters
            told["tuner"] = {
                "num_queued": self._tuning.num_queued,
                "num_promotions": counters.num_promotions,
                "num_rollbacks": sum(dict(counters.num_rollbacks).values()),
                "num_quarantines": counters.num_quarantines,
                "child_seconds": round(counters.child_seconds, 1),
                **{name: round(counters.report.get(name, 0.0), 1) for name in _REPORTED},
            }
            cache = self._tuning.cache_statistics.snapshot()
            told["cache"] = {
                "num_entries": cache.num_entries,
                "size_bytes": cache.size_bytes,
                "hits": cache.hits,
                "misses": _sums(cache.misses),
                "evictions": cache.evictions,
                "num_discarded": cache.num_discarded,
                "limit_bytes": self._settings.kernels_cache_mib << 20,
            }
        return told


def _sums(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    """By kind, whatever the reason."""
    sums: dict[str, int] = {}
    for (kind, _), count in counts.items():
        sums[kind] = sums.get(kind, 0) + count
    return sums
