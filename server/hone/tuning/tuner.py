"""The tuner: one thread that makes models faster while they serve. `step` is its whole story."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from hone.errors import InvalidRequest, ModelNotFound
from hone.tuning.activity import Activity
from hone.tuning.budget import Budget, Pacer
from hone.tuning.child import WORKER_COMMAND, Child, Limits
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import Devices, Job, JobQueue, Mode, Task
from hone.tuning.making import Making
from hone.tuning.ports import EngineLoader, Promotion, ServedModels, Specialization, TunableVersion, VersionRef
from hone.tuning.probation import Probation
from hone.tuning.promote import Refused, prepare
from hone.tuning.record import Bucket, Record
from hone.tuning.settings import Mode as TuningMode
from hone.tuning.settings import ModelTuning, model_tuning
from hone.tuning.signatures import Signature, Traffic, wanted_signatures
from hone.tuning.verdicts import Recalled
from hone.tuning.watch import Incident, Watch, Watched

_log = logging.getLogger(__name__)

ACTIONS = ("start", "pause", "cancel", "roll_back", "pin_baseline")

_TICK_SECONDS = 1.0
_WATCH_TICK_SECONDS = 0.1
_IDLE_SECONDS = 10.0
_PAUSED, _CANCELLED, _PINNED, _ROLLED_BACK = "paused", "cancelled", "pinned to the baseline", "rolled back on request"


class Memory(Protocol):
    """What the cache knows of specializations on this kind of device; see `verdicts.Verdicts`."""

    def recall(self, digest: str) -> Recalled: ...


class Quarantine(Protocol):
    """The part of the kernels cache that keeps artifacts out."""

    def quarantine(self, digest: str, scope: str, reason: str, cause: str = ..., /) -> object: ...

    def strike(self, digest: str, scope: str, cause: str, reason: str, /) -> Any:
        """The record, whose `reason` is None while the artifact may still serve."""


@dataclass(frozen=True, slots=True)
class TunerOptions:
    """How the server is told to tune."""

    mode: TuningMode = "on"
    budget: Budget = field(default_factory=Budget)
    margin: float = 0.03
    run_threads: int = 1
    """Threads that serving's engines use, and so the measured ones."""
    kernels_cache: Path = Path("kernels_cache")
    cannot_build: str = ""
    """Why nothing can be compiled here (no C++ compiler); what is in the cache is used all the same."""
    frequent_interval_seconds: float = 30.0
    remeasure_seconds: float = 60.0
    """Quiet time before a provisional verdict is measured again; doubled each time."""
    cache_bytes: int = 32 << 20
    """Of the processor's last cache: measured inputs rotate through more."""
    command: Sequence[str] = WORKER_COMMAND


@dataclass(slots=True)
class TunerCounters:
    """For metrics; written by the tuner's thread, read by any."""

    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By outcome and reason (a short one)."""
    specializations: Counter[str] = field(default_factory=Counter)
    report: Counter[str] = field(default_factory=Counter)
    """Sums of what children tell: candidates_built, candidates_measured, candidates_failed, compile_seconds, ..."""
    num_promotions: int = 0
    num_rollbacks: Counter[str] = field(default_factory=Counter)
    num_quarantines: int = 0
    promote_seconds: float = 0.0
    swap_seconds: float = 0.0
    child_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """One device that models run on: its own name, its key's digest, and the key's fields for the child."""

    name: str
    key: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Tuner:
    """Owns the queue, the choices and at most one child. `start` and `stop` it; `wake` it when models changed.

    `key_of` names the artifact of a version, its settings and a signature on a kind of device. All state belongs to
    the tuner's thread; `status` reads finished snapshots, `act` leaves a note, so that neither waits for work.
    """

    def __init__(
        self,
        models: ServedModels,
        promotion: Promotion,
        *,
        devices: Sequence[Device],
        memories: Mapping[str, Memory],
        quarantine: Quarantine,
        key_of: Callable[[TunableVersion, ModelTuning, Signature, str], str],
        load: EngineLoader,
        watch: Watch,
        probation: Probation,
        traffic: Traffic,
        options: TunerOptions,
        activity: Callable[[], Activity] = lambda: Activity(0, 0),
        activity_descriptor: int | None = None,
        listener: Callable[[dict[str, Any]], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], str] = lambda: datetime.now(UTC).isoformat(timespec="seconds"),
        num_cores: int | None = None,
    ) -> None:
        self._models = models
        self._promotion = promotion
        self._devices = Devices([(device.name, device.key) for device in devices])
        self._fields = {device.key: device.fields for device in devices}
        self._memories = memories
        self._quarantine = quarantine
        self._key_of = key_of
        self._load = load
        self._watch = watch
        self._probation = probation
        self._traffic = traffic
        self._options = options
        self._activity = activity
        self._activity_descriptor = activity_descriptor
        self._listener = listener
        self._clock = clock
        self._utc = utc
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._queue = JobQueue(self._gain)
        self._records: dict[VersionRef, Record] = {}
        self._snapshots: dict[tuple[str, int], dict[str, Any]] = {}
        self._commands: deque[tuple[VersionRef | tuple[str, int], str]] = deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._job: Job | None = None
        self._next_frequent = 0.0
        self._quiet_since = clock()
        self._last_activity = activity()
        self.counters = TunerCounters()

    # --- called by any thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tuner", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 60.0) -> bool:
        """End the child and the thread. What was on probation has neither passed nor failed. False at the timeout."""
        self._stopping.set()
        child = self._child
        if child is not None:
            child.cancel("the server stops")
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return False
        self._probation.close()
        return True

    def wake(self) -> None:
        """Models were loaded or unloaded: look now."""
        self._wake.set()

    def status(self, model: str, version: str = "") -> dict[str, Any]:
        """Raises NotFound."""
        return self._snapshots[self._place_of(model, version)]

    def statuses(self) -> list[dict[str, Any]]:
        return list(self._snapshots.values())

    def act(self, model: str, version: str, action: str) -> None:
        """Raises NotFound, and InvalidRequest for an unknown action. Takes effect soon."""
        if action not in ACTIONS:
            raise InvalidRequest(f"unknown tuning action '{action}', expected one of {', '.join(ACTIONS)}")
        self._commands.append((self._place_of(model, version), action))
        self._wake.set()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def _place_of(self, model: str, version: str) -> tuple[str, int]:
        places = list(self._snapshots)
        if version:
            found = [place for place in places if place == (model, int(version) if version.isdecimal() else -1)]
        else:
            found = sorted(place for place in places if place[0] == model)
        if not found:
            raise ModelNotFound(model, int(version) if version.isdecimal() else None)
        return found[-1]

    # --- the thread

    def _run(self) -> None:
        for death in self._probation.open():
            self._blame(death.artifacts, death.fault)
        while not self._stopping.is_set():
            try:
                busy = self.step()
            except Exception:
                # A mistake in here must not take tuning down for good, nor spin.
                _log.exception("tuning went wrong; serving is not affected")
                busy = False
            if not busy and not self._stopping.is_set():
                self._wake.wait(_WATCH_TICK_SECONDS if self._watch.watched() else _TICK_SECONDS)
            self._wake.clear()

    def step(self) -> bool:
        """Take the most valuable job: make its specializations in a child, put them through the gate, publish them,
        promote those that passed. (What the cache knows was promoted before, on arrival.) False when there is none."""
        self.attend()
        taken = self._take()
        if taken is None:
            return False
        device, job = taken
        self._devices.acquire(device)
        try:
            self._make(job)
        finally:
            self._devices.release(device)
        self._promote(job.ref)
        return True

    def attend(self) -> None:
        """What does not wait for the child: commands, models that came and went, what is in the cache, the watch."""
        self._follow_commands()
        self._follow_models()
        self._follow_watch()
        now = self._clock()
        if now >= self._next_frequent:
            self._next_frequent = now + self._options.frequent_interval_seconds
            for record in self._records.values():
                self._want(record)
        self._follow_quiet(now)

    # --- models

    def _follow_models(self) -> None:
        served = {version.ref: version for version in self._models.tunable()}
        for ref in [ref for ref in self._records if ref not in served]:
            self._leave(ref)
        for ref, version in served.items():
            record = self._records.get(ref)
            if record is None:
                self._arrive(version)
            elif record.version is not version:
                self._renew(record, version)
        self._queue.keep_only(list(served))

    def _arrive(self, version: TunableVersion) -> None:
        ref = version.ref
        old = [r for r in self._records if (r.model, r.version) == (ref.model, ref.version)]
        for stale in old:
            self._leave(stale)
        record = self._records[ref] = Record(version, ModelTuning())
        self._configure(record)
        self._want(record)

    def _renew(self, record: Record, version: TunableVersion) -> None:
        """The configuration changed, and the graph did not: specializations stay where the settings allow it."""
        before = record.tuning
        record.version = version
        self._configure(record)
        changed = replace(before, budget_seconds=None, capture=False, signatures=()) != replace(
            record.tuning, budget_seconds=None, capture=False, signatures=()
        )
        if changed:  # other precision, tolerance, objective or mode: other artifacts
            self._drop(record, "its tuning settings changed")
            record.buckets.clear()
        self._want(record)

    def _configure(self, record: Record) -> None:
        version = record.version
        try:
            record.tuning = model_tuning(version.parameters, version.inputs, self._options.mode)
        except ValueError as problem:
            record.tuning = ModelTuning(mode="off")
            record.reason = str(problem)
            record.note(self._utc, "refused", reason=record.reason)
        if record.tuning.mode == "off":
            record.state = "off"
        self._tell(record)

    def _leave(self, ref: VersionRef) -> None:
        self._cancel_child(ref, "the model was unloaded or replaced")
        self._queue.cancel(ref)
        for watched in self._watch.end(ref):
            self._probation.end(watched.artifact, self._scope)
        self._records.pop(ref, None)
        place = (ref.model, ref.version)
        self._snapshots.pop(place, None)
        if not any((other.model, other.version) == place for other in self._records):
            self._traffic.forget(ref.model, ref.version)

    @property
    def _scope(self) -> str:
        """The kind of device that generations here are made for: serving runs on the first device."""
        return self._devices.kinds[0]

    # --- what to make

    def _want(self, record: Record) -> None:
        """Find the signatures worth a specialization that have none: from the cache at once, else as a job."""
        if record.tuning.mode == "off" or record.held:
            return
        version = record.version
        ref = version.ref
        wanted = wanted_signatures(
            version.inputs,
            version.max_batch_size,
            named=[*record.tuning.signatures, *self._sample_signatures(version)],
            frequent=self._traffic.frequent(ref.model, ref.version),
        )
        fresh = [signature for signature in wanted if signature not in record.buckets]
        if not fresh:
            if record.state == "queued" and not self._queue.of(ref) and not self._is_working_on(ref):
                record.settle()
                if not wanted:
                    record.reason = "its input shapes vary and are not known yet: name signatures, or send requests"
                self._tell(record)
            return
        tasks: list[Task] = []
        for signature in fresh:
            digest = self._key_of(version, record.tuning, signature, self._scope)
            bucket = record.buckets[signature] = Bucket(signature, digest)
            mode = self._recall(record, bucket)
            if mode is not None:
                tasks.append(Task(signature, digest, mode))
        self._promote(ref)
        if tasks:
            self._enqueue(record, tasks)
        self._tell(record)

    def _recall(self, record: Record, bucket: Bucket) -> Mode | None:
        """What the cache knows of it; how it is to be made where that is not enough."""
        known = self._memories[self._scope].recall(bucket.digest)
        bucket.verdict = dict(known.verdict)
        if known.state == "passed":
            bucket.outcome = "passed"
            return None
        if known.state in ("refused", "unsupported", "quarantined"):
            bucket.outcome, bucket.reason = known.state, known.reason  # type: ignore[assignment]
            record.note(self._utc, known.state, signature=bucket.signature.text, reason=known.reason, cached=True)
            return None
        if record.tuning.mode == "cache":
            bucket.outcome, bucket.reason = "refused", "it is not in the cache, and tuning is 'cache'"
            return None
        if self._options.cannot_build:
            bucket.outcome, bucket.reason = "failed", self._options.cannot_build
            return None
        return "gate" if known.state == "unproven" else "build"

    def _enqueue(self, record: Record, tasks: Sequence[Task]) -> None:
        ordered = sorted(tasks, key=lambda task: task.signature.rows)
        self._queue.put(Job(record.version.ref, self._scope, tuple(ordered)))
        if not self._is_working_on(record.version.ref):
            record.state, record.progress, record.reason = "queued", 0.0, ""

    def _sample_signatures(self, version: TunableVersion) -> list[Signature]:
        datatypes = {spec.name: spec.datatype for spec in version.inputs}
        found = []
        for sample in version.samples():
            if sample.arrays.keys() == datatypes.keys():
                found.append(Signature.of((n, datatypes[n], a.shape) for n, a in sample.arrays.items()))
        return list(dict.fromkeys(found))

    def _gain(self, job: Job) -> float:
        """Traffic share times time: the share of all engine time that the job may shorten."""
        return self._traffic.time_share(job.ref.model, job.ref.version)

    def _take(self) -> tuple[str, Job] | None:
        for device, kind in self._devices.free():
            job = self._queue.take(kind)
            if job is not None:
                return device, job
        return None

    # --- making

    def _make(self, job: Job) -> None:
        """Run children until every task of the job has an outcome."""
        self._job = job
        tasks = list(job.tasks)
        try:
            while tasks and not self._stopping.is_set():
                record = self._records.get(job.ref)
                if record is None or record.held:
                    return
                tasks = self._make_some(record, job, tasks)
        finally:
            self._job = None
        record = self._records.get(job.ref)
        if record is not None:
            record.settle()
            self._tell(record)

    def _make_some(self, record: Record, job: Job, tasks: list[Task]) -> list[Task]:
        """One child. Returns the tasks that it left and another may still do."""
        budget = self._options.budget
        seconds = budget.seconds if record.tuning.budget_seconds is None else record.tuning.budget_seconds
        left = seconds - record.spent_seconds
        if left <= 0:
            self._fail(record, tasks, f"its time of {seconds:g} s for tuning is used up")
            return []
        record.state, record.reason = "tuning", "starting"
        self._tell(record)
        making = Making(tasks, lambda event: self._heard(record, event), lambda i, e: self._specialized(record, i, e))
        samples = self._samples_of(record.version)
        spec = self._spec(record, job, tasks, left, making.samples_descriptor(samples))
        descriptors = [d for d in (spec["activity"], spec["samples"]) if d is not None]
        self._child = Child(
            spec,
            Limits(left, budget.memory_bytes, budget.silence_seconds),
            on_event=making.on_event,
            on_tick=self.attend,
            pacer=Pacer(self._activity) if budget.pause else None,
            descriptors=descriptors,
            command=self._options.command,
            clock=self._clock,
        )
        if self._stopping.is_set():
            self._child.cancel("the server stops")
        try:
            result = self._child.run()
        finally:
            self._child = None
            making.close()
        record.spent_seconds += result.running_seconds
        self.counters.child_seconds += result.running_seconds
        self.counters.peak_bytes = max(self.counters.peak_bytes, result.peak_bytes)
        self.counters.jobs[result.outcome, _short(result.reason)] += 1
        self._listener({"event": "job", "model": job.ref.model, "outcome": result.outcome, "reason": result.reason})
        if result.outcome == "cancelled":
            record.note(self._utc, "cancelled", reason=result.reason)
            return []
        if result.outcome == "failed":
            _log.warning("tuning %s: %s", job.ref.model, result.reason, extra={"model": job.ref.model})
            if result.detail:
                _log.info("the tuning process said: %s", result.detail[-2000:])
        blamed, rest = making.left()
        if blamed:
            self._fail(record, blamed, result.reason or "the tuning process told no outcome")
        return rest

    def _spec(
        self, record: Record, job: Job, tasks: Sequence[Task], seconds: float, samples: int | None
    ) -> dict[str, Any]:
        version, tuning, budget = record.version, record.tuning, self._options.budget
        return {
            "model": job.ref.model,
            "version": job.ref.version,
            "path": str(version.path),
            "graph": job.ref.graph,
            "graph_level": version.graph_level,
            "max_batch_size": version.max_batch_size,
            "kernels_cache": str(self._options.kernels_cache),
            "device": job.device,
            "device_fields": dict(self._fields[job.device]),
            "precision": tuning.precision,
            "objective": tuning.objective,
            "tolerance": tuning.tolerance,
            "margin": self._options.margin,
            "seconds": seconds,
            "nice": budget.nice,
            "build_threads": budget.build_threads(self._num_cores),
            "run_threads": self._options.run_threads,
            "cache_bytes": self._options.cache_bytes,
            "activity": self._activity_descriptor,
            "samples": samples,
            "passed_rows": [b.signature.rows for b in record.buckets.values() if b.outcome == "passed"],
            "tasks": [
                {"signature": task.signature.to_json(), "digest": task.digest, "mode": task.mode} for task in tasks
            ],
        }

    def _samples_of(self, version: TunableVersion) -> Sequence[InputSet]:
        with self._promotion.lease(version.ref) as held:
            return list(version.samples()) if held else []

    def _heard(self, record: Record, event: Mapping[str, Any]) -> None:
        if event["event"] == "stage":
            progress = event.get("progress")
            if isinstance(progress, (int, float)):
                record.progress = min(1.0, max(record.progress, float(progress)))
            record.reason = str(event.get("stage", ""))[:200]
            self._tell(record)
        self._listener({**event, "model": record.version.ref.model})

    def _specialized(self, record: Record, task: Task, event: Mapping[str, Any]) -> None:
        bucket = record.buckets.get(task.signature)
        self.counters.specializations[str(event.get("outcome"))] += 1
        report = event.get("report")
        for name, value in report.items() if isinstance(report, Mapping) else ():
            if isinstance(value, (int, float)):
                self.counters.report[str(name)] += value  # type: ignore[assignment]
        if bucket is None or bucket.digest != task.digest:
            return
        outcome = event.get("outcome")
        bucket.outcome = outcome if outcome in ("passed", "refused", "unsupported") else "failed"
        bucket.reason = str(event.get("reason", ""))[:1000]
        verdict = event.get("verdict")
        bucket.verdict = dict(verdict) if isinstance(verdict, Mapping) else {}
        numbers = {name: bucket.verdict.get(name) for name in ("baseline_ms", "tuned_ms", "speedup", "max_error")}
        record.note(
            self._utc,
            str(bucket.outcome),
            signature=task.signature.text,
            reason=bucket.reason,
            **{name: value for name, value in numbers.items() if value is not None},
        )
        if bucket.outcome != "passed" and bucket.generation:  # measured again, and no longer found faster
            self._roll_back(record, bucket, f"measured again: {bucket.reason}", cause="measured again")
        self._tell(record)

    def _fail(self, record: Record, tasks: Sequence[Task], reason: str) -> None:
        for task in tasks:
            bucket = record.buckets.get(task.signature)
            if bucket is not None and not bucket.generation:
                bucket.outcome, bucket.reason = "failed", reason
                record.note(self._utc, "failed", signature=task.signature.text, reason=reason)
        self._tell(record)

    # --- promoting

    def _promote(self, ref: VersionRef) -> None:
        """Load and warm all that passed and does not serve yet; then make them current in one step."""
        record = self._records.get(ref)
        if record is None or record.held:
            return
        waiting = [b for b in record.buckets.values() if b.outcome == "passed" and not b.generation]
        if not waiting:
            return
        began = self._clock()
        with self._promotion.lease(ref) as held:
            if not held:
                return
            ready = self._prepared(record, waiting)
        if ready:
            for one in ready:
                self._probation.begin(one.artifact, self._scope)
            swapping = self._clock()
            generations = self._promotion.promote(ref, ready)
            self.counters.swap_seconds += self._clock() - swapping
            self._promoted(record, ready, generations)
        self.counters.promote_seconds += self._clock() - began
        if not self._is_working_on(ref) and not self._queue.of(ref):
            record.settle()
        self._tell(record)

    def _prepared(self, record: Record, waiting: Sequence[Bucket]) -> list[Specialization]:
        ready = []
        samples = list(record.version.samples())
        for bucket in waiting:
            known = self._memories[self._scope].recall(bucket.digest)
            told = known.entry.manifest.get("inputs") if known.entry is not None else None
            made = prepare(bucket, told, record.version, record.tuning, samples, self._load)
            if isinstance(made, Refused):
                bucket.outcome, bucket.reason = "failed", made.reason
                if made.wrong:
                    self._quarantine.quarantine(bucket.digest, self._scope, made.reason, "outputs")
                    self.counters.num_quarantines += 1
                    bucket.outcome = "quarantined"
                record.note(self._utc, bucket.outcome, signature=bucket.signature.text, reason=made.reason)
            else:
                ready.append(made)
        return ready

    def _promoted(
        self, record: Record, ready: Sequence[Specialization], generations: Mapping[Signature, int] | None
    ) -> None:
        ref = record.version.ref
        if generations is None:  # unloaded or reloaded meanwhile: nobody took the engines
            for one in ready:
                self._probation.end(one.artifact, self._scope)
                one.engine.close()
            return
        for one in ready:
            bucket = record.buckets[one.signature]
            bucket.generation = generations[one.signature]
            self.counters.num_promotions += 1
            record.note(
                self._utc,
                "promoted",
                signature=one.signature.text,
                generation=bucket.generation,
                speedup=bucket.verdict.get("speedup"),
            )
            self._watch.begin(
                Watched(
                    ref,
                    bucket.generation,
                    one.signature,
                    one.artifact,
                    record.version.baseline,
                    one.engine,
                    record.tuning.precision,
                    record.tuning.tolerance,
                    record.version.max_batch_size > 0,
                )
            )
            if bucket.provisional:
                record.remeasure_at = self._clock() + self._options.remeasure_seconds
            self._listener({"event": "promoted", "model": ref.model, "signature": one.signature.text})

    # --- watching

    def _follow_watch(self) -> None:
        incidents, passed = self._watch.step(idle=self._child is None)
        for incident in incidents:
            self._handle(incident)
        for watched in passed:
            self._probation.end(watched.artifact, self._scope)

    def _handle(self, incident: Incident) -> None:
        """It no longer serves; now see to it that it does not come back."""
        record = self._records.get(incident.ref)
        self.counters.num_rollbacks[incident.cause] += 1
        buckets = [b for b in record.buckets.values() if b.generation == incident.generation] if record else []
        for bucket in buckets:
            assert record is not None
            bucket.generation = 0
            bucket.reason = incident.reason
            bucket.outcome = "refused"
            self._probation.end(bucket.digest, self._scope)
            record.note(
                self._utc,
                "rolled_back",
                signature=bucket.signature.text,
                generation=incident.generation,
                reason=incident.reason,
            )
            if self._keep_out(bucket.digest, incident.cause, incident.reason):
                bucket.outcome = "quarantined"
                record.note(self._utc, "quarantined", signature=bucket.signature.text, reason=incident.reason)
            _log.warning(
                "%s %s: rolled back to what served before: %s",
                incident.ref.model,
                bucket.signature.text,
                incident.reason,
                extra={"model": incident.ref.model},
            )
            record.settle()
            self._tell(record)

    def _keep_out(self, digest: str, cause: str, reason: str) -> bool:
        """Errors and wrong outputs at once, slowness and unexplained deaths the second time. Whether it is out now."""
        if cause in ("error", "outputs", "fault"):
            self._quarantine.quarantine(digest, self._scope, reason, cause)
            out = True
        else:
            out = self._quarantine.strike(digest, self._scope, cause, reason).reason is not None
        self.counters.num_quarantines += out
        return out

    def _blame(self, artifacts: Sequence[tuple[str, str]], fault: str) -> None:
        for digest, scope in artifacts:
            if scope != self._scope:
                continue
            if fault:
                self._keep_out(digest, "fault", f"the server died of a fault while it was on probation: {fault}")
            else:
                self._keep_out(digest, "death", "the server died twice, unexplained, while it was on probation")

    def _roll_back(self, record: Record, bucket: Bucket, reason: str, *, cause: str) -> None:
        generation = bucket.generation
        self._promotion.roll_back(record.version.ref, generation)
        for watched in self._watch.end(record.version.ref, generation):
            self._probation.end(watched.artifact, self._scope)
        bucket.generation = 0
        self.counters.num_rollbacks[cause] += 1
        record.note(self._utc, "rolled_back", signature=bucket.signature.text, generation=generation, reason=reason)

    def _drop(self, record: Record, reason: str, cause: str = "request") -> None:
        """Return every signature of a version to the baseline, and stop working on it."""
        self._cancel_child(record.version.ref, reason)
        self._queue.cancel(record.version.ref)
        for bucket in record.buckets.values():
            if bucket.generation:
                self._roll_back(record, bucket, reason, cause=cause)

    # --- commands

    def _follow_commands(self) -> None:
        while self._commands:
            place, action = self._commands.popleft()
            record = next((r for ref, r in self._records.items() if (ref.model, ref.version) == place), None)
            if record is not None:
                getattr(self, f"_do_{action}")(record)
                self._tell(record)

    def _do_start(self, record: Record) -> None:
        """Tune it (again): what is held goes on, what failed is tried again, refusals stand."""
        record.held = ""
        record.spent_seconds = 0.0
        for signature in [s for s, b in record.buckets.items() if not b.generation]:
            if record.buckets[signature].outcome not in ("refused", "unsupported", "quarantined"):
                del record.buckets[signature]
        record.note(self._utc, "started")
        record.state = "queued"
        self._want(record)

    def _do_pause(self, record: Record) -> None:
        self._hold(record, _PAUSED)

    def _do_cancel(self, record: Record) -> None:
        self._hold(record, _CANCELLED)

    def _do_roll_back(self, record: Record) -> None:
        record.held = _ROLLED_BACK
        self._drop(record, _ROLLED_BACK)
        record.settle()

    def _do_pin_baseline(self, record: Record) -> None:
        record.held = _PINNED
        self._drop(record, _PINNED)
        record.note(self._utc, "pinned", reason=_PINNED)
        record.settle()

    def _hold(self, record: Record, why: str) -> None:
        """Work on it no more until it is started; what serves goes on serving."""
        record.held = why
        self._queue.cancel(record.version.ref)
        self._cancel_child(record.version.ref, why)
        record.note(self._utc, why)
        record.settle()

    def _cancel_child(self, ref: VersionRef, reason: str) -> None:
        if self._child is not None and self._is_working_on(ref):
            self._child.cancel(reason)

    def _is_working_on(self, ref: VersionRef) -> bool:
        return self._job is not None and self._job.ref == ref

    # --- quiet times

    def _follow_quiet(self, now: float) -> None:
        """Once serving has rested for a while and nothing is queued, measure again what is provisional."""
        activity = self._activity()
        if activity != self._last_activity or activity.num_in_flight:
            self._last_activity, self._quiet_since = activity, now
        if now - self._quiet_since < _IDLE_SECONDS or len(self._queue) or self._job is not None:
            return
        for record in self._records.values():
            again = [b for b in record.buckets.values() if b.provisional and b.generation]
            if not again or record.held or record.tuning.mode != "on" or not 0 < record.remeasure_at <= now:
                continue
            record.num_remeasured += 1
            record.remeasure_at = now + self._options.remeasure_seconds * 2**record.num_remeasured
            self._queue.put(
                Job(record.version.ref, self._scope, tuple(Task(b.signature, b.digest, "gate") for b in again))
            )

    def _tell(self, record: Record) -> None:
        ref = record.version.ref
        if self._records.get(ref) is record:
            self._snapshots[ref.model, ref.version] = record.to_json()


def _short(reason: str) -> str:
    """A reason as a label: without its numbers and places."""
    for text, label in (
        ("wrote garbage", "garbage"),
        ("its limit is", "memory"),
        ("hung", "hang"),
        ("its time was", "deadline"),
        ("SIGKILL", "killed"),
        ("died by", "crash"),
        ("exit code", "exit"),
        ("cannot start", "start"),
    ):
        if text in reason:
            return label
    return "error" if reason else ""
