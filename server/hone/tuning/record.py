"""What is known of the tuning of one model version, and how it is told. Belongs to the tuner's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.tuning.ports import TunableVersion
from hone.tuning.settings import ModelTuning
from hone.tuning.signatures import Signature

State = Literal["off", "queued", "tuning", "paused", "tuned", "baseline", "unsupported", "failed"]
Outcome = Literal["", "passed", "refused", "unsupported", "failed", "quarantined"]

_MAX_HISTORY = 100


@dataclass(slots=True)
class Bucket:
    """One signature: what was found out about it, and what runs it."""

    signature: Signature
    digest: str
    """Name of its artifact, whether there is one or not."""
    outcome: Outcome = ""
    reason: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    """Of the tuned engine that runs it; 0 is the baseline."""
    previous: tuple[int, ...] = ()

    @property
    def provisional(self) -> bool:
        return self.verdict.get("provisional") is True

    def to_json(self) -> dict[str, Any]:
        return {
            "signature": self.signature.text,
            "engine": "tvm" if self.generation else "onnxruntime",
            "generation": self.generation,
            "baseline_ms": self.verdict.get("baseline_ms"),
            "tuned_ms": self.verdict.get("tuned_ms"),
            "speedup": self.verdict.get("speedup"),
            "max_error": self.verdict.get("max_error"),
            "provisional": self.provisional,
            "outcome": self.outcome,
            "reason": self.reason,
        }


@dataclass(slots=True, eq=False)
class Record:
    """One served version."""

    version: TunableVersion
    tuning: ModelTuning
    state: State = "queued"
    reason: str = ""
    progress: float = 0.0
    buckets: dict[Signature, Bucket] = field(default_factory=dict)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    spent_seconds: float = 0.0
    held: str = ""
    """Why nothing is tuned or promoted until somebody asks for it; empty while all goes on."""
    remeasure_at: float = 0.0
    num_remeasured: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """The child's latest: candidates, best so far."""

    def note(self, now: Callable[[], str], event: str, **fields: Any) -> None:
        self.history.append({"at": now(), "event": event, **fields})

    def settle(self) -> None:
        """The state that follows from the buckets, when nothing is to be done."""
        buckets = self.buckets.values()
        self.progress = 1.0
        refused = [f"{b.signature.text}: {b.reason}" for b in buckets if b.reason]
        self.reason = "; ".join(dict.fromkeys(refused))[:1000]
        if self.held:
            self.state = "paused" if self.held == "paused" else "baseline"
            self.reason = self.held
        elif any(b.generation for b in buckets):
            self.state = "tuned"
        elif buckets and all(b.outcome == "unsupported" for b in buckets):
            self.state = "unsupported"
        elif any(b.outcome == "failed" for b in buckets):
            self.state = "failed"
        else:
            self.state = "baseline"

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.version.ref.model,
            "version": str(self.version.ref.version),
            "state": self.state,
            "progress": round(self.progress, 4),
            "reason": self.reason,
            "buckets": [bucket.to_json() for bucket in self.buckets.values()],
            "history": list(self.history),
        }
