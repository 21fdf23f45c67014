"""Runs the jobs of one kind of device in children, one child at a time, until every task has an outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from hone.kernels.memory import free_bytes
from hone.specialization import VersionRef
from hone.tuning.activity import Activity
from hone.tuning.book import Book
from hone.tuning.budget import Pacer, Starvation
from hone.tuning.cache_counts import CACHE_EVENT
from hone.tuning.child import Child
from hone.tuning.child_process import JobCause, JobResult, Limits
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import PLAIN, PROFILING_STAGE, SCHEDULING_STAGE, Job, Task
from hone.tuning.making import Making
from hone.tuning.options import TunerOptions
from hone.tuning.ports import Promotion, TunableVersion
from hone.tuning.promoter import Promoter
from hone.tuning.record import AtWork, Bucket, Record
from hone.tuning.room import ChildLog, lacks_room
from hone.tuning.shares import MemoryShares

_log = logging.getLogger(__name__)

#: How often an open question is asked again while serving rests, with pauses that double.
MAX_REMEASURED = 8
_MAX_REASON = 400
#: Children of one job that kernels may take along; each such kernel is blocked, so this ends.
_MAX_BROKEN = 12

#: What a child tells of its search, for people.
_SEARCHED = ("num_built", "num_measured", "num_failed")
_TOLD_NUMBERS = ("baseline_ms", "tuned_ms", "speedup", "max_error")


class Maker:
    """Belongs to the tuner's thread, but for `stop`; makers of several kinds of device take turns there."""

    def __init__(
        self,
        book: Book,
        promotion: Promotion,
        promoter: Promoter,
        *,
        options: TunerOptions,
        device_fields: Mapping[str, Mapping[str, Any]],
        ordinals: Mapping[str, int] | None = None,
        num_cores: int,
        samples: Callable[[TunableVersion], Sequence[InputSet]],
        activity: Callable[[], Activity],
        activity_descriptor: int | None,
        clock: Callable[[], float] = time.monotonic,
        num_sharing: Callable[[], int] = lambda: 1,
        shares: MemoryShares | None = None,
    ) -> None:
        """`num_sharing`: kinds of device that there is work for now, which share cores, and memory by `shares`; without
        those, each child has its own."""
        self._num_sharing, self._shares = num_sharing, shares
        self._book = book
        self._promotion = promotion
        self._promoter = promoter
        self._options = options
        self._device_fields = device_fields
        self._ordinals = dict(ordinals or {})
        self._num_cores = num_cores
        self._samples = samples
        self._activity = activity
        self._activity_descriptor = activity_descriptor
        self._clock = clock
        self._job: Job | None = None
        self._making: Making | None = None
        """What the present job's last child was asked for and told."""
        self._child: Child | None = None
        self._ends_at = 0.0
        """When the present child has used its time up, at the earliest."""
        self._stopping = False
        self._careful = False
        self._insistent = False
        self._num_broken = 0
        self._waves: list[str] = []
        self._child_log = ChildLog()

    def at_work(self, ref: VersionRef) -> frozenset[str]:
        """Artifacts that the present job makes for a version: they are promoted by the job's own waves."""
        if self._job is None or self._job.ref != ref:
            return frozenset()
        return frozenset(task.digest for task in self._job.tasks)

    @property
    def is_idle(self) -> bool:
        return self._job is None

    @property
    def child(self) -> Child | None:
        """The present one."""
        return self._child

    def is_working_on(self, ref: VersionRef) -> bool:
        return self._job is not None and self._job.ref == ref

    def cancel(self, ref: VersionRef, reason: str, cause: JobCause) -> None:
        if self._child is not None and self.is_working_on(ref):
            self._child.cancel(reason, cause)

    def stop(self) -> None:
        """End the child soon, and start no other; from any thread."""
        self._stopping = True
        child = self._child
        if child is not None:
            child.cancel("the server stops", "stopped")

    def make(self, job: Job) -> Generator[None, None, None]:
        """Every task gets an outcome, unless the job is cancelled. A task that takes its child along is the only one
        that suffers: another child goes on with the rest. Each step waits a moment for the child."""
        self._job = job
        self._careful = self._insistent = False
        self._num_broken = 0
        tasks = list(job.tasks)
        try:
            while tasks and not self._stopping:
                record = self._book.records.get(job.ref)
                if record is None or record.held:
                    return
                tasks = yield from self._make_some(record, job, tasks)
            record = self._book.records.get(job.ref)
            if record is not None:
                self._ask_again_for_room(record)
        except Exception:  # a mistake in here: the lane tells of it
            self._fail_untold(job, tasks)
            raise
        finally:
            self._job = self._making = None

    def _fail_untold(self, job: Job, tasks: Sequence[Task]) -> None:
        record = self._book.records.get(job.ref)
        if record is None:
            return
        if self._making is not None:
            blamed, rest = self._making.left()
            tasks = [task for task in tasks if task in blamed or task in rest]
        self._book.fail(record, job.device, tasks, "a fault in hone, see the server's log")

    def seconds_left(self, record: Record, device: str) -> float:
        """Of a version's time for tuning on a kind of device."""
        setting = record.tuning_on(device).budget_seconds
        given = self._options.budget.seconds if setting is None else setting
        return given - record.spent_seconds.get(device, 0.0)

    def _make_some(self, record: Record, job: Job, tasks: Sequence[Task]) -> Generator[None, None, list[Task]]:
        """One child. Returns the tasks that another may still do."""
        left = self.seconds_left(record, job.device)
        if left <= 0:
            seconds = left + record.spent_seconds.get(job.device, 0.0)
            self._book.fail(record, job.device, tasks, f"its time of {seconds:g} s for tuning is used up")
            return []
        record.at_work[job.device] = AtWork()
        record.follow_work()
        self._ends_at = self._clock() + left
        self._book.tell(record)
        num_starts = record.num_starts
        making = self._making = Making(
            tasks,
            lambda event: self._heard(record, job.device, event),
            lambda task, event: self._specialized(record, job.device, task, event),
        )
        try:
            result = yield from self._run(record, job, tasks, left, making)
        finally:
            making.close()
            if self._shares is not None:
                self._shares.release(job.device)
            del record.at_work[job.device]
            record.follow_work()
        self._promote_first()
        self._count(record, job.device, result, of_now=record.num_starts == num_starts)
        if result.outcome == "cancelled":
            self._book.note(record, "cancelled", reason=result.reason)
            return []
        if result.outcome == "failed":
            told = one_line(result.reason)
            _log.warning("tuning of %s: %s", job.ref.model, told, extra={"model": job.ref.model})
            _log.debug("it said: %s\n%s", result.reason, result.detail, extra={"model": job.ref.model})
            self._book.note(record, "child_failed", reason=told, detail=f"{result.reason}\n{result.detail}"[-2000:])
        blamed, rest = making.left()
        if result.outcome == "starved":
            self._insistent = True  # nobody is to blame: the next child takes its share in slices
            return [*blamed, *rest]
        if blamed and not self._careful and result.stage.startswith(SCHEDULING_STAGE):
            self._careful = True  # without what may have taken the child along
            return [*blamed, *rest]
        if blamed and result.stage.startswith(PROFILING_STAGE) and self._num_broken < _MAX_BROKEN:
            self._num_broken += 1
            return [*blamed, *rest]
        if blamed:
            reason = one_line(result.reason) or "the tuning process told no outcome"
            self._book.fail(record, job.device, blamed, reason)
        return rest

    def _promote_first(self) -> None:
        """The first wave: what passed first, alone, where nothing tuned serves yet; before it, plain modules as they
        pass. The rest is promoted when the job ends. See docs/decisions/0007-waves.md."""
        digests, self._waves = self._waves, []
        record = self._book.records.get(self._job.ref) if self._job is not None else None
        if digests and record is not None:
            self._promoter.promote(record.version.ref, only=digests)
            self._book.tell(record)

    def _run(
        self, record: Record, job: Job, tasks: Sequence[Task], seconds: float, making: Making
    ) -> Generator[None, None, JobResult]:
        budget, limits = self._options.budget, self._limits(job, seconds)
        spec = self._spec(record, job, tasks, limits)
        spec["samples"] = making.samples_descriptor(self._samples_of(record.version))
        self._child = Child(
            spec,
            limits,
            on_event=making.on_event,
            on_tick=self._promote_first,
            pacer=Pacer(self._activity) if budget.pause else None,
            starvation=Starvation() if budget.pause and not self._insistent else None,
            descriptors=[d for d in (spec["activity"], spec["samples"]) if d is not None],
            command=self._options.command,
            temporary_root=self._options.temporary_root,
            clock=self._clock,
        )
        if self._stopping:
            self._child.cancel("the server stops", "stopped")
        try:
            return (yield from self._child.steps())
        finally:
            self._child = None

    def _limits(self, job: Job, seconds: float) -> Limits:
        """Of a child that begins now."""
        budget = self._options.budget
        if self._shares is None:
            architecture = str(self._device_fields[job.device].get("architecture", ""))
            return Limits(seconds, budget.memory_of_job(architecture, free_bytes()), budget.silence_seconds)
        promised = self._shares.promise(job.device, self._num_sharing())
        others_bytes = partial(self._shares.others_bytes, job.device)
        return Limits(seconds, budget.memory_bytes, budget.silence_seconds, promised, others_bytes)

    def _spec(self, record: Record, job: Job, tasks: Sequence[Task], limits: Limits) -> dict[str, Any]:
        version, tuning, budget = record.version, record.tuning_on(job.device), self._options.budget
        return {
            "model": job.ref.model,
            "version": job.ref.version,
            "path": str(version.path),
            "graph": job.ref.graph,
            "graph_level": version.graph_level,
            "baseline_threads": version.baseline_threads,
            "baseline_gpu": version.baseline_gpu if self._device_fields[job.device].get("kind") == "gpu" else None,
            "ordinal": self._ordinals.get(job.device, 0),
            "memory_bytes": limits.certain_bytes,
            "max_batch_size": version.max_batch_size,
            "kernels_cache": str(self._options.kernels_cache),
            "spare": str(self._options.spare) if self._options.spare is not None else None,
            "device": job.device,
            "device_fields": dict(self._device_fields[job.device]),
            "precision": tuning.precision,
            "objective": tuning.objective,
            "tolerance": tuning.tolerance,
            "margin": self._options.margin,
            "seconds": limits.seconds,
            "nice": budget.nice,
            "build_threads": max(1, budget.build_threads(self._num_cores) // self._num_sharing()),
            "run_threads": version.threads_of(self._options.run_threads),
            "cache_bytes": self._options.cache_bytes,
            "activity": self._activity_descriptor,
            "careful": self._careful,
            "passed_rows": [
                bucket.signature.rows
                for bucket in record.buckets.values()
                if bucket.outcome == "passed" and bucket.device == job.device
            ],
            "tasks": [
                {
                    "signature": task.signature.to_json(),
                    "digest": task.digest,
                    "mode": task.mode,
                    "is_plain": self._is_plain(record, job.device, task),
                    "plain_speedup": self._plain_speedup(record, job.device, task),
                }
                for task in tasks
            ],
        }

    @staticmethod
    def _is_plain(record: Record, device: str, task: Task) -> bool:
        bucket = record.bucket(device, task.signature)
        return bucket is not None and task.digest == bucket.plain

    @staticmethod
    def _plain_speedup(record: Record, device: str, task: Task) -> float | None:
        """Of the plain module that passed already, which a searched one has to beat; None where there is none."""
        bucket = record.bucket(device, task.signature)
        told = bucket.plain_verdict.get("speedup") if bucket is not None and task.digest == bucket.digest else None
        return float(told) if isinstance(told, int | float) else None

    def _samples_of(self, version: TunableVersion) -> Sequence[InputSet]:
        with self._promotion.lease(version.ref) as held:
            return self._samples(version) if held else []

    def _heard(self, record: Record, device: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "log":
            self._child_log.hear(event, record.version.ref.model)
            return
        if event["event"] == CACHE_EVENT:
            self._book.counters.cache.hear(event)
            return
        if event["event"] == "stage":
            at_work, progress = record.at_work[device], event.get("progress")
            if isinstance(progress, (int, float)):
                at_work.progress = min(1.0, max(0.0, float(progress)))
            at_work.stage = str(event.get("stage", ""))[:200]
            at_work.searched |= {name: event[name] for name in _SEARCHED if type(event.get(name)) is int}
            # Of the clock on the wall, so it may be more: time in which the child is paused does not count.
            at_work.seconds_left = round(max(0.0, self._ends_at - self._clock()))
            record.follow_work()
            self._book.tell(record)
        self._book.hear({**event, "model": record.version.ref.model})

    def _specialized(self, record: Record, device: str, task: Task, event: Mapping[str, Any]) -> None:
        counters = self._book.counters
        counters.specializations[str(event["outcome"])] += 1
        counters.add_report(event.get("report"))
        bucket = record.bucket(device, task.signature)
        if bucket is not None and task.digest == bucket.plain:
            self._plain_told(record, bucket, event)
            return
        if bucket is None or bucket.digest != task.digest:
            return  # the settings changed meanwhile: this is for others than are wanted now
        verdict = event.get("verdict")
        bucket.outcome = event["outcome"]
        bucket.reason = one_line(str(event.get("reason", "")))
        bucket.verdict = dict(verdict) if isinstance(verdict, Mapping) else {}
        numbers = {name: bucket.verdict[name] for name in _TOLD_NUMBERS if bucket.verdict.get(name) is not None}
        self._book.note(record, bucket.outcome, signature=task.signature.text, reason=bucket.reason, **numbers)
        tuned = any(b.generation and not b.serves_plain for b in record.buckets.values() if b.device == device)
        if bucket.outcome == "passed" and not tuned and not self._waves:
            self._waves.append(bucket.digest)
        if record.num_remeasured < MAX_REMEASURED and (bucket.provisional or bucket.inconclusive):
            again_in = self._options.remeasure_seconds * 2**record.num_remeasured
            record.remeasure_at = self._clock() + again_in
        if bucket.outcome != "passed" and bucket.generation and not bucket.serves_plain:
            self._promoter.roll_back(record, bucket, f"measured again: {bucket.reason}", "measured again")
        self._book.tell(record)

    def _plain_told(self, record: Record, bucket: Bucket, event: Mapping[str, Any]) -> None:
        """One that passed is promoted at once, whatever others do: it is there for the time until they are made."""
        verdict, passed = event.get("verdict"), event["outcome"] == "passed"
        bucket.plain_verdict = dict(verdict) if passed and isinstance(verdict, Mapping) else {}
        told = verdict if isinstance(verdict, Mapping) else {}
        numbers = {name: told[name] for name in _TOLD_NUMBERS if told.get(name) is not None}
        reason = PLAIN if passed else f"{PLAIN}: {one_line(str(event.get('reason', '')))}"
        self._book.note(record, str(event["outcome"]), signature=bucket.signature.text, reason=reason, **numbers)
        if passed:
            self._waves.append(bucket.plain)
        self._book.tell(record)

    def _count(self, record: Record, device: str, result: JobResult, *, of_now: bool) -> None:
        """`of_now`: the child was started in the time that the version has now, and was given no other since."""
        if of_now:
            record.spent_seconds[device] = record.spent_seconds.get(device, 0.0) + result.running_seconds
        counters = self._book.counters
        counters.child_seconds += result.running_seconds
        counters.peak_bytes = max(counters.peak_bytes, result.peak_bytes)
        counters.jobs[result.outcome, result.cause] += 1

    def _ask_again_for_room(self, record: Record) -> None:
        """A full disk says nothing of the model: try again when the server rests, with pauses that double."""
        starved = any(b.outcome == "failed" and lacks_room(b.reason) for b in record.buckets.values())
        if starved and record.num_remeasured < MAX_REMEASURED and record.remeasure_at <= self._clock():
            record.remeasure_at = self._clock() + self._options.remeasure_seconds * 2**record.num_remeasured


def one_line(text: str) -> str:
    """What a person needs of an error that may be a compiler's: of a traceback its last line, else the first."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 3]}..."


def jobs_to_ask_again(record: Record) -> list[Job]:
    """Jobs for what a busy machine or a full disk left open: what serves on a provisional verdict goes through the
    gate again, what was refused without certainty is made again (of decisions that are known by now)."""
    tasks: dict[str, list[Task]] = {}
    for bucket in record.buckets.values():
        if bucket.provisional and bucket.generation and not bucket.serves_plain:
            tasks.setdefault(bucket.device, []).append(Task(bucket.signature, bucket.digest, "gate"))
        elif (bucket.inconclusive and bucket.outcome == "refused") or (
            bucket.outcome == "failed" and lacks_room(bucket.reason)
        ):
            tasks.setdefault(bucket.device, []).append(Task(bucket.signature, bucket.digest, "build"))
    return [Job(record.version.ref, device, tuple(found)) for device, found in tasks.items()]
