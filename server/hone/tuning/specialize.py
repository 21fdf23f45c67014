"""The child's job: make specializations of a model version one by one, and put each through the gate.

import, compile → outputs → speed → publish. Each outcome is told as soon as it is known, so that what follows may hang
or crash without taking it along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from hone.engines.cuda_runtime import CudaError
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.onnxruntime_cuda import load_baseline
from hone.errors import DeviceLost, HoneError
from hone.specialization import Signature
from hone.tuning.activity import Activity, ActivityView
from hone.tuning.budget import GPU_RESERVE_BYTES
from hone.tuning.cache_counts import CacheTelling
from hone.tuning.domains import derive_domains
from hone.tuning.gate import Verdict, judge
from hone.tuning.inputs import InputSet
from hone.tuning.measure import Clock, Comparison, NotMeasured, Patience, Plan
from hone.tuning.plans import InstancesOf, better, measure_plans
from hone.tuning.running_time import RunningTimeView
from hone.tuning.samples import unpack
from hone.tuning.trial import NoTrial, Trial, gather
from hone.tuning.wire import Message
from hone.types import Engine

_log = logging.getLogger(__name__)

Emit = Callable[..., None]
Outcome = Literal["passed", "refused", "unsupported", "failed"]

#: Shares of one specialization's progress.
_COMPILE_SHARE, _CHECK_SHARE, _PADDED_SHARE, _PLANS_SHARE = 0.7, 0.75, 0.9, 0.95
_PLAN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A tuned engine that nobody else knows of yet. `publish` puts it into the cache with what its manifest is to say
    besides; it returns why it could not, or nothing."""

    engine: Engine
    publish: Callable[[Mapping[str, Any]], str]
    report: Mapping[str, Any] = field(default_factory=dict)
    """What making it took: candidates built, measured and failed, seconds of compiling and measuring."""
    note: str = ""
    """What its users should know: which layers do not have the precision asked for, say."""
    clock: Clock = time.perf_counter_ns
    """What its runs are measured by."""
    instances_of: InstancesOf | None = None
    """Instances that so many threads run; None where threads are no choice (a GPU)."""
    is_open: bool = False
    """More time, or another day, may have made it better: a refusal of it is asked again."""


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """Why there is no engine. `unsupported` is for ever (with these versions), `failed` may be tried again."""

    outcome: Literal["unsupported", "failed"]
    reason: str
    operator: str = ""


class Told(Protocol):
    """Hears how far a compilation is: a share from 0 to 1, what it is at, and best so far and the like."""

    def __call__(self, share: float, stage: str, /, **details: Any) -> None: ...


class Compile(Protocol):
    """The compile step: a signature in, an engine out. Failures are values; what it raises fails the whole job."""

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        """Compile for a signature, within so many seconds. `digest` names the artifact to publish."""

    def load(self, digest: str) -> Compiled | NotCompiled:
        """The artifact of that name, which is in the cache already; its `publish` marks it as proven here."""


@runtime_checkable
class PlainCompile(Protocol):
    """What the compile step of GPUs does besides."""

    def build_plain(self, signature: Signature, digest: str, tell: Told) -> Compiled | NotCompiled:
        """Compile without a search and without kernels, as quickly as can be. `digest` names the artifact."""


class Ledger(Protocol):
    """What is remembered of specializations, by the digest of their artifact."""

    def lock(self, digest: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """While held, no other process makes the same. `waiting` is called now and then while another does."""

    def known(self, digest: str) -> tuple[Outcome, str, Mapping[str, Any]] | None:
        """Outcome, reason and verdict, where there is one already."""

    def keep_refusal(self, digest: str, outcome: str, reason: str, verdict: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """The parts of a job's specification that all its specializations share."""

    path: Path
    max_batch_size: int
    precision: str
    tolerance: float | None
    margin: float
    seconds: float
    graph_level: int
    run_threads: int
    cache_bytes: int
    samples: Sequence[InputSet]
    activity: Callable[[], Activity]
    running_seconds: Callable[[], float]
    """Since the process began, without those in which it was paused or waited for a processor."""
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def from_spec(cls, spec: Message) -> Work:
        board = spec.get("activity")
        samples = spec.get("samples")
        running = spec.get("running_time")
        return cls(
            path=Path(spec["path"]),
            max_batch_size=int(spec["max_batch_size"]),
            precision=str(spec["precision"]),
            tolerance=spec.get("tolerance"),
            margin=float(spec["margin"]),
            seconds=float(spec["seconds"]),
            graph_level=int(spec.get("graph_level", 0)),
            run_threads=int(spec["run_threads"]),
            cache_bytes=int(spec.get("cache_bytes", 32 << 20)),
            samples=unpack(samples) if samples is not None else (),
            activity=ActivityView(board).read if board is not None else lambda: Activity(0, 0),
            running_seconds=RunningTimeView(running).read if running is not None else _since_now(),
        )


def run(spec: Message, emit: Emit) -> None:
    """The whole job, with the real compiler and the real cache."""
    from hone.tuning.compile import open_cache, open_compiler

    cache = open_cache(spec)
    compile_step, ledger = open_compiler(spec, cache)
    telling = CacheTelling(cache.statistics, emit)
    try:
        specialize_all(spec, telling.emit, compile_step, ledger)
    finally:
        telling.tell()


def baseline_settings(spec: Message) -> SessionSettings:
    """As the server made its own."""
    threads = int(spec.get("baseline_threads", 1))
    gpu = spec.get("baseline_gpu")
    return SessionSettings(int(spec.get("graph_level", 0)), threads, fit_threads=False, gpu=gpu)


def specialize_all(spec: Message, emit: Emit, compile_step: Compile, ledger: Ledger) -> None:
    """Every task of the job in order. Raises what only a broken model file or job can raise."""
    work = Work.from_spec(spec)
    emit("stage", stage="loading the baseline", progress=0.0)
    settings = baseline_settings(spec)
    transfers = CudaTransfers.load() if settings.gpu is not None else None
    baseline = load_baseline(work.path, settings, transfers, falls_back=False, reserve_bytes=GPU_RESERVE_BYTES)
    tasks = spec["tasks"]
    passed_rows: list[int] = [int(rows) for rows in spec.get("passed_rows", ())]
    plain_speedups: dict[Signature, float] = {}
    for i, task in enumerate(tasks):
        signature = Signature.from_json(task["signature"])
        remaining = max(1.0, work.seconds - work.running_seconds()) / (len(tasks) - i)
        told = _Progress(emit, i, len(tasks), signature)
        below = max((rows for rows in passed_rows if rows < signature.rows), default=0)
        mode, to_beat = task["mode"], plain_speedups.get(signature, task.get("plain_speedup"))
        one = _Specializing(work, baseline, compile_step, ledger, told, signature, below, to_beat)
        outcome = one.run(task["digest"], mode, remaining)
        if outcome["outcome"] == "passed":
            passed_rows.append(signature.rows)
            if mode == "plain" or task.get("is_plain"):
                plain_speedups[signature] = float(outcome["verdict"]["speedup"])
        emit("specialized", index=i, **outcome)


def _since_now() -> Callable[[], float]:
    """For a process that nobody pauses."""
    began = time.monotonic()
    return lambda: time.monotonic() - began


class _Progress:
    """Tells how far the job is, with one specialization being an equal part of it."""

    def __init__(self, emit: Emit, index: int, num: int, signature: Signature) -> None:
        self._emit, self._index, self._num = emit, index, num
        self._name = signature.text
        self._told = -1.0
        self._stage = ""

    def __call__(self, share: float, stage: str, *, paced: bool = False, **details: Any) -> None:
        progress = max(self._told, (self._index + min(max(share, 0.0), 1.0)) / self._num)
        if stage == self._stage and progress - self._told < 0.001 and not details:
            return
        self._told, self._stage = progress, stage
        self._emit(
            "stage", stage=f"{stage} for {self._name}", progress=progress, paced=paced, index=self._index, **details
        )


@dataclass(slots=True)
class _Specializing:
    """One task."""

    work: Work
    baseline: OnnxRuntimeEngine
    compile_step: Compile
    ledger: Ledger
    told: _Progress
    signature: Signature
    below: int
    """Batch size of the next smaller bucket that passed."""
    to_beat: float | None = None
    """Speed-up of the plain module that serves meanwhile: what is not faster does not take its place."""

    def run(self, digest: str, mode: str, seconds: float) -> dict[str, Any]:
        """The outcome as an event's fields."""
        self.told(0.0, "starting")
        num_waits = 0

        def waiting() -> None:
            nonlocal num_waits
            num_waits += 1
            self.told(0.0, "waiting for another process that makes the same", num_waits=num_waits)

        with self.ledger.lock(digest, waiting):
            known = self.ledger.known(digest) if mode != "gate" else None
            if known is not None:  # another server made it while this one waited
                outcome, reason, verdict = known
                return {"outcome": outcome, "reason": reason, "verdict": dict(verdict), "report": {}}
            return self._make(digest, mode, seconds)

    def _make(self, digest: str, mode: str, seconds: float) -> dict[str, Any]:
        compiled: Compiled | NotCompiled
        if mode == "gate":
            compiled = self.compile_step.load(digest)
        elif mode == "plain":
            if not isinstance(self.compile_step, PlainCompile):
                raise TypeError("a plain module was asked for on a device that has none")
            compiled = self.compile_step.build_plain(self.signature, digest, self._tell_compiling)
        else:
            compiled = self.compile_step.build(self.signature, digest, seconds, self._tell_compiling)
        if isinstance(compiled, NotCompiled):
            if compiled.outcome == "unsupported":
                self.ledger.keep_refusal(digest, "unsupported", compiled.reason, {})
            return _outcome(compiled.outcome, compiled.reason, operator=compiled.operator)
        try:
            return self._judge(compiled, digest)
        finally:
            compiled.engine.close()

    def _judge(self, compiled: Compiled, digest: str) -> dict[str, Any]:
        self.told(_COMPILE_SHARE, "comparing outputs")
        domains: Any = derive_domains(self.work.path, self.signature.specs)
        batching = self.work.max_batch_size > 0
        baseline = self.baseline.instantiate()
        evidence = gather(
            baseline, self.baseline.outputs, self.signature, domains, self.work.samples, batching=batching
        )
        if isinstance(evidence, NoTrial):
            return _outcome("refused", f"its outputs cannot be checked: {evidence.reason}", report=compiled.report)
        trial = Trial(
            baseline,
            compiled.engine.instantiate(),
            self.baseline.outputs,
            self.signature,
            evidence,
            self.work.precision,
            self.work.tolerance,
            run_threads=self.work.run_threads,
            cache_bytes=self.work.cache_bytes,
            activity=self.work.activity,
            tell=self._tell_measuring,
            plan=Plan(seconds=_PLAN_SECONDS, margin=self.work.margin),
            patience=self.work.patience,
            clock=compiled.clock,
        )
        verdict = self._verdict(trial)
        told = verdict.to_json()
        if compiled.note:
            told["note"] = compiled.note
        if not verdict.passed:
            return self._refused(compiled, digest, verdict.reason, told, is_certain=verdict.is_certain)
        measured = verdict.comparison
        if self.to_beat is not None and measured is not None and measured.speedup <= self.to_beat:
            told["passed"] = False
            reason = (
                f"no faster than the module with plain schedules: {measured.speedup:.3g} times the baseline's speed,"
                f" that one has {self.to_beat:.3g} times"
            )
            is_certain = not measured.provisional and measured.ratio.low * self.to_beat >= 1.0
            return self._refused(compiled, digest, reason, told, is_certain=is_certain)
        min_rows = self.signature.rows
        if batching and self.signature.rows - self.below > 1:
            self.told(_PADDED_SHARE, "measuring padded batches", paced=True)
            min_rows = trial.smallest_padded(self.below)
        told["min_rows"] = min_rows if batching else 0
        told["plans"] = self._plans(compiled, trial)
        manifest = {
            "verdict": told,
            "signature": self.signature.to_json(),
            "domains": None
            if evidence.domains is None
            else {name: domain.to_json() for name, domain in evidence.domains.items()},
        }
        problem = compiled.publish(manifest)
        if problem:
            return _outcome("failed", f"it passed, and could not be kept: {problem}", verdict=told)
        return _outcome("passed", compiled.note, verdict=told, report=compiled.report)

    def _refused(
        self, compiled: Compiled, digest: str, reason: str, told: dict[str, Any], *, is_certain: bool
    ) -> dict[str, Any]:
        """What the machine's noise, or the time that there was, decided is asked again when the machine rests; what the
        numbers say is remembered."""
        is_certain = is_certain and not compiled.is_open
        told["inconclusive"] = not is_certain
        if is_certain:
            self.ledger.keep_refusal(digest, "refused", reason, told)
        return _outcome("refused", reason, verdict=told, report=compiled.report)

    def _verdict(self, trial: Trial) -> Verdict:
        checks = trial.check()
        measured: Comparison | NotMeasured | None = None
        if all(check.passed for check in checks):
            try:
                measured = trial.measure()
            except HoneError as problem:
                if isinstance(problem, DeviceLost) or (isinstance(problem, CudaError) and problem.is_poisoning):
                    raise  # this process can measure nothing more on the GPU: another one goes on
                measured = NotMeasured(f"it failed while it was measured: {problem}")
        return judge(checks, measured, self.work.margin)

    def _plans(self, compiled: Compiled, trial: Trial) -> dict[str, Any]:
        """What instances and threads give, and which plan is better for which objective."""
        if compiled.instances_of is None:
            return {}
        self.told(_PLANS_SHARE, "measuring instances against threads", paced=True)
        names = [spec.name for spec in self.baseline.outputs]
        rows = self.signature.rows if self.work.max_batch_size > 0 else 0
        try:
            plans = measure_plans(compiled.instances_of, trial.inputs(), names, rows, self.work.run_threads)
        except HoneError as problem:
            return {"problem": str(problem)}
        objectives = {objective: better(plans, objective) for objective in ("latency", "throughput")}
        return {objective: plan.to_json() for objective, plan in objectives.items() if plan is not None}

    def _tell_compiling(self, share: float, stage: str, /, **details: Any) -> None:
        self.told(share * _COMPILE_SHARE, stage, **details)

    def _tell_measuring(self, share: float) -> None:
        self.told(_CHECK_SHARE + share * (_PADDED_SHARE - _CHECK_SHARE), "measuring", paced=True)


def _outcome(
    outcome: Outcome,
    reason: str,
    *,
    verdict: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    operator: str = "",
) -> dict[str, Any]:
    told = {"outcome": outcome, "reason": reason, "verdict": dict(verdict or {}), "report": dict(report or {})}
    return {**told, "operator": operator} if operator else told
