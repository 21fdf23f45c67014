"""How a server is told to tune."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hone.specialization import CPU
from hone.tuning.budget import Budget
from hone.tuning.child import WORKER_COMMAND
from hone.tuning.settings import Mode


@dataclass(frozen=True, slots=True)
class TunerOptions:
    """Settings of the whole server; a model's own are in its configuration."""

    mode: Mode = "on"
    budget: Budget = field(default_factory=Budget)
    margin: float = 0.03
    """How much faster than the baseline is worth a promotion."""
    run_threads: int = 1
    """Threads that serving's engines use, and so the measured ones."""
    kernels_cache: Path = Path("kernels_cache")
    spare: Path | None = None
    """A temporary folder for what the cache cannot keep; see `kernels.spare`."""
    upkeep_seconds: float = 10.0
    """Between two tries to keep what could not be kept."""
    temporary_root: Path | None = None
    """Where tuning processes get temporary folders; None for the system's place."""
    cannot_build: str = ""
    """Why nothing can be compiled here (no C++ compiler); what is in the cache is used all the same."""
    cannot_build_on: Mapping[str, str] = field(default_factory=dict)
    """The same by the digest of a device key (no nvcc)."""
    unsupported_on: Mapping[str, str] = field(default_factory=dict)
    """Why nothing will ever be compiled for a kind of device, by its key's digest."""
    frequent_interval_seconds: float = 30.0
    """Seconds between two looks for signatures that have become frequent."""
    idle_seconds: float = 10.0
    """Serving rests when nothing ran for so long."""
    remeasure_seconds: float = 60.0
    """Until a provisional verdict is measured again, when serving rests; doubled each time."""
    cache_bytes: int = 32 << 20
    """Of the processor's last cache: measured inputs rotate through more."""
    command: Sequence[str] = WORKER_COMMAND

    def hindrance(self, device: str) -> tuple[Literal["", "unsupported", "failed"], str]:
        """The outcome of all that would have to be compiled for a kind of device, and why; empty where it can be."""
        if reason := self.unsupported_on.get(device, ""):
            return "unsupported", reason
        reason = self.cannot_build or self.cannot_build_on.get(device, "")
        return ("failed" if reason else ""), reason


@dataclass(frozen=True, slots=True)
class Device:
    """One device that models run on: its own name, its key's digest, the key's fields for the child, and the name that
    serving's executors have for its kind."""

    name: str
    key: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    kind: str = CPU
    ordinal: int = 0
    """CUDA's number of a GPU; the first of its kind is the one that children measure on."""
