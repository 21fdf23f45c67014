"""What searches leave in the cache of a workload or a function, as it is read again: by other jobs, and for maps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hone.kernels import DecisionKey, Entry, KernelsCache

#: Files of decisions on workloads and on functions that no template takes.
RANKING_FILE, SCHEDULE_FILE = "ranking.json", "schedule.json"


def read_decision(cache: KernelsCache, key: DecisionKey, file: str) -> dict[str, Any] | None:
    """What is decided, as the search told it; None where nothing is, or nothing that can be read (it may be evicted
    meanwhile)."""
    entry = cache.get("decisions", key.digest, key.device)
    if not isinstance(entry, Entry):
        return None
    try:
        told = json.loads(entry.files[file].read_bytes())
    except (OSError, ValueError, KeyError):
        return None
    return told if isinstance(told, dict) else None


def nanoseconds_of(told: Mapping[str, Any], *, searched: bool) -> float | None:
    """What one call of a function takes under its plain schedule, or under the one that was found; None where the
    decision does not say."""
    us = told.get("best_us" if searched else "plain_us")
    return us * 1e3 if isinstance(us, int | float) and math.isfinite(us) else None
