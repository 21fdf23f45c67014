"""What is known of the tuning of one model version, and how it is told. Belongs to the tuner's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hone.specialization import CPU, Signature
from hone.tuning.holding import PAUSED
from hone.tuning.ports import TunableVersion
from hone.tuning.settings import MODES, Mode, ModelTuning

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
    artifact: str = ""
    """What that generation runs."""
    plain: str = ""
    """Name of the artifact that serves until the one that is searched for is there; empty where none is wanted."""
    plain_verdict: dict[str, Any] = field(default_factory=dict)
    """Of the gate on it; empty while it has not passed."""
    before: int = 0
    """Generation of the plain artifact, where another has taken its place: what a roll-back returns to."""
    again: bool = False
    """It failed while the plain artifact serves, and is to be made again."""
    kind: str = CPU
    """What people and executors call the kind of device."""

    @property
    def serves_plain(self) -> bool:
        return bool(self.generation) and bool(self.plain) and self.artifact == self.plain

    @property
    def waits(self) -> bool:
        """Whether it passed, and does not serve yet."""
        return self.outcome == "passed" and (not self.generation or self.serves_plain)

    @property
    def plain_waits(self) -> bool:
        return bool(self.plain_verdict) and not self.generation and self.outcome != "passed"

    def as_plain(self) -> Bucket:
        """The plain artifact as a bucket of its own, to be promoted."""
        return replace(self, digest=self.plain, outcome="passed", reason="", verdict=self.plain_verdict)

    def promoted(self, generation: int, artifact: str) -> None:
        self.before = self.generation if self.serves_plain else 0
        self.generation, self.artifact = generation, artifact

    def returned(self) -> None:
        """To what served before."""
        self.generation, self.artifact = self.before, self.plain if self.before else ""
        self.before = 0

    @property
    def provisional(self) -> bool:
        return self.verdict.get("provisional") is True

    @property
    def inconclusive(self) -> bool:
        return self.verdict.get("inconclusive") is True

    def to_json(self) -> dict[str, Any]:
        verdict = self.plain_verdict if self.serves_plain else self.verdict
        return {
            "signature": self.signature.text,
            "device": self.kind,
            "artifact": self.artifact or self.digest,
            "engine": "tvm" if self.generation else "onnxruntime",
            "generation": self.generation,
            "baseline_ms": verdict.get("baseline_ms"),
            "tuned_ms": verdict.get("tuned_ms"),
            "speedup": verdict.get("speedup"),
            "max_error": verdict.get("max_error"),
            "tolerance": verdict.get("tolerance"),
            "plans": verdict.get("plans") or {},
            "provisional": self.provisional or self.inconclusive,
            "outcome": self.outcome,
            "reason": unbroken(self.reason),
        }


@dataclass(slots=True)
class AtWork:
    """What a child is at."""

    progress: float = 0.0
    stage: str = "starting"
    searched: dict[str, int] = field(default_factory=dict)
    """How many candidates it has built and the like."""
    seconds_left: int | None = None


@dataclass(slots=True, eq=False)
class Record:
    """One served version."""

    version: TunableVersion
    tunings: dict[str, ModelTuning] = field(default_factory=dict)
    """Settings by the kinds of device (digests of their keys) that it runs on."""
    state: State = "queued"
    reason: str = ""
    off: str = ""
    """Why nothing is tuned, where its mode is off on all kinds of device."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What its owner should know of its configuration, whatever came of it, by kind of device; empty for nothing."""
    progress: float = 0.0
    buckets: dict[tuple[str, Signature], Bucket] = field(default_factory=dict)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    spent_seconds: dict[str, float] = field(default_factory=dict)
    """Of its time for tuning, by kind of device, since it was started last."""
    num_starts: int = 0
    """How often it was given all its time anew."""
    held: str = ""
    """Why nothing is done about it until it is started again; empty while all goes on."""
    sampled: list[Signature] | None = None
    """Signatures of its real inputs; None until they were looked at."""
    remeasure_at: float = 0.0
    num_remeasured: int = 0
    at_work: dict[str, AtWork] = field(default_factory=dict)
    """What children are at for it, by kind of device."""

    def tuning_on(self, device: str) -> ModelTuning:
        return self.tunings.get(device, ModelTuning(mode="off"))

    @property
    def mode(self) -> Mode:
        """The most that is allowed on any kind of device."""
        return max((tuning.mode for tuning in self.tunings.values()), key=MODES.index, default="off")

    def follow_work(self) -> None:
        """Tell what children are at, where there are any."""
        at_work = self.at_work.values()
        if at_work:
            self.state = "tuning"
            self.progress = sum(one.progress for one in at_work) / len(at_work)
            self.reason = "; ".join(one.stage for one in at_work)

    def bucket(self, device: str, signature: Signature) -> Bucket | None:
        return self.buckets.get((device, signature))

    def on(self, device: str) -> list[Bucket]:
        """Buckets of a kind of device."""
        return [bucket for bucket in self.buckets.values() if bucket.device == device]

    def served_by(self, generation: int) -> list[Bucket]:
        return [bucket for bucket in self.buckets.values() if generation and bucket.generation == generation]

    def settle(self) -> None:
        """The state that follows from the buckets, when nothing is to be done."""
        if self.mode == "off":
            self.state, self.progress, self.reason = "off", 0.0, unbroken(self.off)
            return
        buckets = self.buckets.values()
        num_told = sum(bool(bucket.outcome) for bucket in buckets)
        self.progress = num_told / max(1, len(buckets)) if self.held else 1.0
        told = [f"{bucket.signature.text}: {unbroken(bucket.reason)}" for bucket in buckets if bucket.reason]
        remarks = [remark for remark in self.remarks.values() if remark]
        self.reason = "; ".join(dict.fromkeys([*remarks, *told]))[:1000]
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
            "job": self._job(),
            "buckets": [bucket.to_json() for bucket in self.buckets.values()],
            "history": list(self.history),
        }

    def _job(self) -> dict[str, Any]:
        """Of all children: what they have tried so far, and the time that the one has left that has most."""
        told: dict[str, Any] = {}
        for one in self.at_work.values():
            for name, number in one.searched.items():
                told[name] = told.get(name, 0) + number
            if one.seconds_left is not None:
                told["seconds_left"] = max(told.get("seconds_left", 0), one.seconds_left)
        return told

    def _is_tuned(self) -> bool:
        return any(bucket.generation for bucket in self.buckets.values())


def unbroken(text: str) -> str:
    """On one line: what libraries say may have several, and is told in tables and logs."""
    return " ".join(text.split())
