"""Runs jobs in children, one child at a time, until every task has an outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.specialization import VersionRef
from hone.tuning.activity import Activity
from hone.tuning.book import Book
from hone.tuning.budget import Pacer
from hone.tuning.child import Child, JobResult, Limits
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import SCHEDULING_STAGE, Job, Task
from hone.tuning.making import Making
from hone.tuning.options import TunerOptions
from hone.tuning.ports import Promotion, TunableVersion
from hone.tuning.promoter import Promoter
from hone.tuning.record import Record

_log = logging.getLogger(__name__)

_TOLD_NUMBERS = ("baseline_ms", "tuned_ms", "speedup", "max_error")
#: What a reason says -> the word for it in metrics.
_WORDS = (
    ("wrote garbage", "garbage"),
    ("its limit is", "memory"),
    ("hung", "hang"),
    ("its time was", "deadline"),
    ("SIGKILL", "killed"),
    ("died by", "crash"),
    ("exit code", "exit"),
    ("cannot start", "start"),
)


class Maker:
    """Belongs to the tuner's thread, but for `stop`. `attend` is called all the while a child runs."""

    def __init__(
        self,
        book: Book,
        promotion: Promotion,
        promoter: Promoter,
        *,
        options: TunerOptions,
        device_fields: Mapping[str, Mapping[str, Any]],
        num_cores: int,
        attend: Callable[[], None],
        samples: Callable[[TunableVersion], Sequence[InputSet]],
        activity: Callable[[], Activity],
        activity_descriptor: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._promotion = promotion
        self._promoter = promoter
        self._options = options
        self._device_fields = device_fields
        self._num_cores = num_cores
        self._attend = attend
        self._samples = samples
        self._activity = activity
        self._activity_descriptor = activity_descriptor
        self._clock = clock
        self._job: Job | None = None
        self._child: Child | None = None
        self._stopping = False
        self._careful = False

    @property
    def is_idle(self) -> bool:
        return self._child is None

    def is_working_on(self, ref: VersionRef) -> bool:
        return self._job is not None and self._job.ref == ref

    def cancel(self, ref: VersionRef, reason: str) -> None:
        if self._child is not None and self.is_working_on(ref):
            self._child.cancel(reason)

    def stop(self) -> None:
        """End the child soon, and start no other; from any thread."""
        self._stopping = True
        child = self._child
        if child is not None:
            child.cancel("the server stops")

    def make(self, job: Job) -> None:
        """Every task gets an outcome, unless the job is cancelled. A task that takes its child along is the only one
        that suffers: another child goes on with the rest."""
        self._job = job
        self._careful = False
        tasks = list(job.tasks)
        try:
            while tasks and not self._stopping:
                record = self._book.records.get(job.ref)
                if record is None or record.held:
                    return
                tasks = self._make_some(record, job, tasks)
        finally:
            self._job = None

    def _make_some(self, record: Record, job: Job, tasks: Sequence[Task]) -> list[Task]:
        """One child. Returns the tasks that another may still do."""
        budget = self._options.budget
        seconds = budget.seconds if record.tuning.budget_seconds is None else record.tuning.budget_seconds
        left = seconds - record.spent_seconds
        if left <= 0:
            self._book.fail(record, job.device, tasks, f"its time of {seconds:g} s for tuning is used up")
            return []
        record.state, record.reason = "tuning", "starting"
        self._book.tell(record)
        making = Making(
            tasks,
            lambda event: self._heard(record, event),
            lambda task, event: self._specialized(record, job.device, task, event),
        )
        try:
            result = self._run(record, job, tasks, left, making)
        finally:
            making.close()
        self._count(record, result)
        if result.outcome == "cancelled":
            self._book.note(record, "cancelled", reason=result.reason)
            return []
        if result.outcome == "failed":
            _log.warning("tuning of %s: %s", job.ref.model, result.reason, extra={"model": job.ref.model})
            if result.detail:
                _log.info("the tuning process said: %s", result.detail[-2000:], extra={"model": job.ref.model})
        blamed, rest = making.left()
        if blamed and not self._careful and result.stage.startswith(SCHEDULING_STAGE):
            self._careful = True  # without what may have taken the child along
            return [*blamed, *rest]
        if blamed:
            reason = result.reason or "the tuning process told no outcome"
            self._book.fail(record, job.device, blamed, reason)
        return rest

    def _run(self, record: Record, job: Job, tasks: Sequence[Task], seconds: float, making: Making) -> JobResult:
        budget = self._options.budget
        spec = self._spec(record, job, tasks, seconds)
        spec["samples"] = making.samples_descriptor(self._samples_of(record.version))
        self._child = Child(
            spec,
            Limits(seconds, budget.memory_bytes, budget.silence_seconds),
            on_event=making.on_event,
            on_tick=self._attend,
            pacer=Pacer(self._activity) if budget.pause else None,
            descriptors=[d for d in (spec["activity"], spec["samples"]) if d is not None],
            command=self._options.command,
            temporary_root=self._options.temporary_root,
            clock=self._clock,
        )
        if self._stopping:
            self._child.cancel("the server stops")
        try:
            return self._child.run()
        finally:
            self._child = None

    def _spec(self, record: Record, job: Job, tasks: Sequence[Task], seconds: float) -> dict[str, Any]:
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
            "device_fields": dict(self._device_fields[job.device]),
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
            "careful": self._careful,
            "passed_rows": [
                bucket.signature.rows
                for bucket in record.buckets.values()
                if bucket.outcome == "passed" and bucket.device == job.device
            ],
            "tasks": [
                {"signature": task.signature.to_json(), "digest": task.digest, "mode": task.mode} for task in tasks
            ],
        }

    def _samples_of(self, version: TunableVersion) -> Sequence[InputSet]:
        with self._promotion.lease(version.ref) as held:
            return self._samples(version) if held else []

    def _heard(self, record: Record, event: Mapping[str, Any]) -> None:
        if event["event"] == "stage":
            progress = event.get("progress")
            if isinstance(progress, (int, float)):
                record.progress = min(1.0, max(0.0, float(progress)))
            record.reason = str(event.get("stage", ""))[:200]
            self._book.tell(record)
        self._book.hear({**event, "model": record.version.ref.model})

    def _specialized(self, record: Record, device: str, task: Task, event: Mapping[str, Any]) -> None:
        counters = self._book.counters
        counters.specializations[str(event["outcome"])] += 1
        counters.add_report(event.get("report"))
        bucket = record.bucket(device, task.signature)
        if bucket is None or bucket.digest != task.digest:
            return  # the settings changed meanwhile: this is for others than are wanted now
        verdict = event.get("verdict")
        bucket.outcome = event["outcome"]
        bucket.reason = str(event.get("reason", ""))[:1000]
        bucket.verdict = dict(verdict) if isinstance(verdict, Mapping) else {}
        numbers = {name: bucket.verdict[name] for name in _TOLD_NUMBERS if bucket.verdict.get(name) is not None}
        self._book.note(record, bucket.outcome, signature=task.signature.text, reason=bucket.reason, **numbers)
        if bucket.provisional or bucket.inconclusive:
            again_in = self._options.remeasure_seconds * 2**record.num_remeasured
            record.remeasure_at = self._clock() + again_in
        if bucket.outcome != "passed" and bucket.generation:
            self._promoter.roll_back(record, bucket, f"measured again: {bucket.reason}", "measured again")
        self._book.tell(record)

    def _count(self, record: Record, result: JobResult) -> None:
        record.spent_seconds += result.running_seconds
        counters = self._book.counters
        counters.child_seconds += result.running_seconds
        counters.peak_bytes = max(counters.peak_bytes, result.peak_bytes)
        word = next((word for text, word in _WORDS if text in result.reason), "error" if result.reason else "")
        counters.jobs[result.outcome, word] += 1


def jobs_to_ask_again(record: Record) -> list[Job]:
    """Jobs for what a busy machine left open: what serves on a provisional verdict goes through the gate again, what
    was refused without certainty is made again (of decisions that are known by now)."""
    tasks: dict[str, list[Task]] = {}
    for bucket in record.buckets.values():
        if bucket.provisional and bucket.generation:
            tasks.setdefault(bucket.device, []).append(Task(bucket.signature, bucket.digest, "gate"))
        elif bucket.inconclusive and bucket.outcome == "refused":
            tasks.setdefault(bucket.device, []).append(Task(bucket.signature, bucket.digest, "build"))
    return [Job(record.version.ref, device, tuple(found)) for device, found in tasks.items()]
