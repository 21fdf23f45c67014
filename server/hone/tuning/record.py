"""What is known of the tuning of one model version, and how it is told. Belongs to the tuner's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.specialization import Signature
from hone.tuning.holding import PAUSED
from hone.tuning.ports import TunableVersion
from hone.tuning.settings import ModelTuning

State = Literal["off", "queued", "tuning", "paused", "tuned", "baseline", "unsupported", "failed"]
Outcome = Literal["", "passed", "refused", "unsupported", "failed", "quarantined"]

_MAX_HISTORY = 100


@dataclass(slots=True, eq=False)
class Bucket:
    """One signature on one kind of device: what was found out about it, and what runs it."""

    device: str
    """Digest of the device key."""
    signature: Signature
    digest: str
    """Name of its artifact, whether there is one or not."""
    outcome: Outcome = ""
    reason: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    """Of the tuned engine that runs it; 0 is the baseline."""

    @property
    def provisional(self) -> bool:
        return self.verdict.get("provisional") is True

    @property
    def inconclusive(self) -> bool:
        return self.verdict.get("inconclusive") is True

    def to_json(self) -> dict[str, Any]:
        return {
            "signature": self.signature.text,
            "artifact": self.digest,
            "engine": "tvm" if self.generation else "onnxruntime",
            "generation": self.generation,
            "baseline_ms": self.verdict.get("baseline_ms"),
            "tuned_ms": self.verdict.get("tuned_ms"),
            "speedup": self.verdict.get("speedup"),
            "max_error": self.verdict.get("max_error"),
            "tolerance": self.verdict.get("tolerance"),
            "plans": self.verdict.get("plans") or {},
            "provisional": self.provisional or self.inconclusive,
            "outcome": self.outcome,
            "reason": self.reason,
        }


@dataclass(slots=True, eq=False)
class Record:
    """One served version."""

    version: TunableVersion
    tuning: ModelTuning = field(default_factory=ModelTuning)
    state: State = "queued"
    reason: str = ""
    progress: float = 0.0
    buckets: dict[tuple[str, Signature], Bucket] = field(default_factory=dict)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    spent_seconds: float = 0.0
    """Of its time for tuning."""
    held: str = ""
    """Why nothing is done about it until it is started again; empty while all goes on."""
    sampled: list[Signature] | None = None
    """Signatures of its real inputs; None until they were looked at."""
    remeasure_at: float = 0.0
    num_remeasured: int = 0
    job: dict[str, Any] = field(default_factory=dict)
    """While a child works on it: what its search has tried so far, and the time that it has left."""

    def bucket(self, device: str, signature: Signature) -> Bucket | None:
        return self.buckets.get((device, signature))

    def served_by(self, generation: int) -> list[Bucket]:
        return [bucket for bucket in self.buckets.values() if generation and bucket.generation == generation]

    def settle(self) -> None:
        """The state that follows from the buckets, when nothing is to be done."""
        if self.tuning.mode == "off":
            self.state = "off"
            return
        buckets = self.buckets.values()
        if not self.held:
            self.progress = 1.0
        told = [f"{bucket.signature.text}: {bucket.reason}" for bucket in buckets if bucket.reason]
        self.reason = "; ".join(dict.fromkeys(told))[:1000]
        if self.held:
            self.state = "paused" if self.held == PAUSED else "tuned" if self._is_tuned() else "baseline"
            self.reason = self.held
        elif self._is_tuned():
            self.state = "tuned"
        elif buckets and all(bucket.outcome == "unsupported" for bucket in buckets):
            self.state = "unsupported"
        elif any(bucket.outcome == "failed" for bucket in buckets):
            self.state = "failed"
        else:
            self.state = "baseline"

    def to_json(self) -> dict[str, Any]:
        ref = self.version.ref
        return {
            "model": ref.model,
            "version": str(ref.version),
            "state": self.state,
            "progress": round(self.progress, 4),
            "reason": self.reason,
            "job": dict(self.job),
            "buckets": [bucket.to_json() for bucket in self.buckets.values()],
            "history": list(self.history),
        }

    def _is_tuned(self) -> bool:
        return any(bucket.generation for bucket in self.buckets.values())
