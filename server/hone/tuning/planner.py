"""Which specializations a version is to have: its settings, its signatures, and what the cache knows of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hone.specialization import CPU, Signature, VersionRef
from hone.tuning.book import Book
from hone.tuning.capture import Capture
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import Job, Mode, Task
from hone.tuning.options import TunerOptions
from hone.tuning.places import MAX_SIGNATURES, Choice, choose
from hone.tuning.ports import TunableVersion
from hone.tuning.record import Bucket, Record
from hone.tuning.settings import ModelTuning, model_tuning
from hone.tuning.signatures import Traffic, seen_signatures, values_of, wanted_signatures
from hone.tuning.verdicts import Recalled

_log = logging.getLogger(__name__)

#: Signatures of a kind that people are told one by one.
_MAX_TOLD = 3

KeyOf = Callable[[TunableVersion, ModelTuning, Signature, str], str]
"""Digest of the artifact for a version, its settings and a signature on a kind of device."""


class Memory(Protocol):
    """What the cache knows of specializations on one kind of device; see `verdicts.Verdicts`."""

    def recall(self, digest: str) -> Recalled: ...

    def withdraw(self, digest: str) -> None:
        """Forget a refusal."""


class Planner:
    """Belongs to the tuner's thread."""

    def __init__(
        self,
        book: Book,
        kinds: Sequence[str],
        memories: Mapping[str, Memory],
        key_of: KeyOf,
        traffic: Traffic,
        options: TunerOptions,
        *,
        capture: Capture,
        names: Mapping[str, str] | None = None,
        plain_key_of: KeyOf | None = None,
    ) -> None:
        """`kinds` are digests of device keys; `names` are what executors call them. `plain_key_of` names plain
        artifacts, for GPUs whose baseline runs on the CPU."""
        self._plain_key_of = plain_key_of
        self._book = book
        self._kinds = list(kinds)
        self._names = names or {}
        self._memories = memories
        self._key_of = key_of
        self._traffic = traffic
        self._options = options
        self._capture = capture
        self._lost = ""

    def lose(self, kinds: Collection[str], reason: str) -> None:
        """Nothing can be used on these kinds of device any more."""
        self._kinds = [kind for kind in self._kinds if kind not in kinds]
        self._lost = reason

    def configure(self, record: Record) -> bool:
        """Read the version's settings, of each kind of device that it runs on. Whether they make artifacts found before
        useless."""
        before, record.remarks = record.tunings, {}
        record.tunings = {device: self._tuning_on(record, device) for device in self._kinds_of(record)}
        record.off = self._why_off(record)
        capture = any(tuning.capture and tuning.mode == "on" for tuning in record.tunings.values())
        self._capture.allow(record.version.ref, capture)
        return _lasting(before) != _lasting(record.tunings)

    def _tuning_on(self, record: Record, device: str) -> ModelTuning:
        version = record.version
        parameters = version.parameters_on(self._names.get(device, CPU))
        try:
            return model_tuning(parameters, version.inputs, self._options.mode)
        except ValueError as problem:
            record.remarks[device] = str(problem)
            model = version.ref.model
            _log.warning("%s is not tuned: %s", model, problem, extra={"model": model})
            self._book.note(record, "refused", reason=str(problem))
            return ModelTuning(mode="off")

    def _why_off(self, record: Record) -> str:
        """Empty where it is not."""
        if record.mode != "off":
            return ""
        if not record.tunings:
            return self._lost
        if self._options.mode == "off":
            return "tuning is off by the server's --tuning off"
        return "; ".join(dict.fromkeys(record.remarks.values())) or "tuning is off by its configuration"

    def choose(self, record: Record, busy: Container[str] = ()) -> dict[str, Choice]:
        """By kind of device, the signatures that are to have a bucket and have none, and those whose bucket is to make
        room for them. What makes these artifacts (`busy`) goes on."""
        return {
            device: self._choice(record, device, tuning, busy)
            for device, tuning in self._usable(record)
            if not record.held
        }

    def wants(self, record: Record, choices: Mapping[str, Choice]) -> list[Job]:
        """Add the buckets that were chosen; the jobs that this takes, and those that are to be tried again.

        What the cache holds needs no job: its bucket has passed already, or says why not.
        """
        if record.held:
            return []
        jobs = []
        for device, tuning in self._usable(record):
            tasks = []
            again = [bucket.signature for bucket in record.on(device) if bucket.again]
            for signature in [*again, *choices.get(device, Choice()).added]:
                bucket = record.buckets.get((device, signature))
                digest = self._key_of(record.version, tuning, signature, device)
                bucket = bucket or Bucket(device, signature, digest, kind=self._names.get(device, CPU))
                bucket.again = False
                record.buckets[device, signature] = bucket
                mode = self._recall(record, bucket)
                tasks += self._plain_tasks(record, bucket, mode)
                if mode is not None:
                    tasks.append(Task(signature, digest, mode))
            if tasks:
                jobs.append(Job(record.version.ref, device, tuple(tasks)))
        return jobs

    def _plain_tasks(self, record: Record, bucket: Bucket, mode: Mode | None) -> list[Task]:
        """Where a search is to come, or has found nothing, on a GPU whose baseline runs on the CPU: a plain module,
        known from before or to be made first."""
        digest = self._plain_digest(record, bucket)
        if not digest or bucket.outcome == "passed" or mode == "gate" or bucket.generation:
            return []
        known = self._memories[bucket.device].recall(digest)
        if known.state == "passed":
            bucket.plain, bucket.plain_verdict = digest, dict(known.verdict)
        elif mode == "build" and known.state in ("absent", "unproven"):
            bucket.plain = digest
            return [Task(bucket.signature, digest, "plain" if known.state == "absent" else "gate")]
        return []

    def _plain_digest(self, record: Record, bucket: Bucket) -> str:
        """Of a bucket's plain artifact, whether there is one or not; empty where none is wanted."""
        on_gpu = self._names.get(bucket.device, CPU) != CPU and record.version.baseline_gpu is None
        if self._plain_key_of is None or not on_gpu:
            return ""
        return self._plain_key_of(record.version, record.tuning_on(bucket.device), bucket.signature, bucket.device)

    def known(self, record: Record) -> None:
        """Add buckets for what the cache holds, ready to be promoted, and for nothing else."""
        for device, tuning in self._usable(record):
            for signature in self._choice(record, device, tuning).added:
                digest = self._key_of(record.version, tuning, signature, device)
                known = self._memories[device].recall(digest)
                if known.state == "passed":
                    bucket = Bucket(device, signature, digest, "passed", verdict=dict(known.verdict))
                    bucket.kind = self._names.get(device, CPU)
                    record.buckets.setdefault((device, signature), bucket)

    def _usable(self, record: Record) -> list[tuple[str, ModelTuning]]:
        return [(device, tuning) for device, tuning in record.tunings.items() if device in self._kinds]

    def _kinds_of(self, record: Record) -> list[str]:
        """Kinds of device that the version runs on."""
        on = record.version.kinds
        return [device for device in self._kinds if on is None or self._names.get(device, CPU) in on]

    def anew(self, record: Record) -> list[Job]:
        """Jobs that ask again for all that the version has: what is there already goes through the gate again, the rest
        is made again. What serves goes on serving meanwhile. Who is quarantined stays out."""
        tasks: dict[str, list[Task]] = {}
        for bucket in record.buckets.values():
            if bucket.device not in self._kinds or record.tuning_on(bucket.device).mode != "on":
                continue
            memory = self._memories[bucket.device]
            memory.withdraw(bucket.digest)
            if plain := self._plain_digest(record, bucket):
                memory.withdraw(plain)
            known = memory.recall(bucket.digest)
            there = known.state in ("passed", "unproven")
            if known.state == "quarantined" or (self._options.hindrance(bucket.device)[0] and not there):
                continue
            if not bucket.generation or bucket.serves_plain:
                bucket.outcome, bucket.reason, bucket.verdict = "", "", {}
            mode: Mode = "gate" if there else "build"
            found = tasks.setdefault(bucket.device, [])
            found += [*self._plain_tasks(record, bucket, mode), Task(bucket.signature, bucket.digest, mode)]
        return [Job(record.version.ref, device, tuple(found)) for device, found in tasks.items()]

    def gain(self, job: Job) -> float:
        """Traffic share times time: the share of all engine time that the job may shorten."""
        values = self._values(job)
        return sum(values[task.signature] for task in job.tasks)

    def ordered(self, job: Job) -> Job:
        """With plain modules first, then the most valuable; of those worth the same, smaller batches."""
        values = self._values(job)
        record = self._book.records.get(job.ref)
        buckets = record.buckets if record is not None else {}

        def order(task: Task) -> tuple[bool, float, int]:
            bucket = buckets.get((job.device, task.signature))
            is_plain = task.mode == "plain" or (bucket is not None and task.digest == bucket.plain)
            return not is_plain, -values[task.signature], task.signature.rows

        return replace(job, tasks=tuple(sorted(job.tasks, key=order)))

    def _values(self, job: Job) -> dict[Signature, float]:
        """Of the job's signatures. Traffic that a bucket takes which is not in the job is not counted."""
        record = self._book.records.get(job.ref)
        signatures = dict.fromkeys(task.signature for task in job.tasks)
        batching = record is not None and record.version.max_batch_size > 0
        others = () if record is None else (sig for device, sig in record.buckets if device == job.device)
        shares = self._traffic.shares(job.ref.model, job.ref.version)
        values = values_of([*signatures, *others], shares, batching=batching)
        return {signature: values[signature] for signature in signatures}

    def forget_failures(self, record: Record) -> None:
        """Let failed and unfinished specializations be tried again; verdicts stand."""
        for key, bucket in list(record.buckets.items()):
            if bucket.serves_plain and bucket.outcome in ("", "failed"):
                bucket.again = True
            elif not bucket.generation and bucket.outcome in ("", "failed"):
                del record.buckets[key]

    def _choice(self, record: Record, device: str, tuning: ModelTuning, busy: Container[str] = ()) -> Choice:
        if tuning.mode == "off":
            return Choice()
        version, ref = record.version, record.version.ref
        held = {bucket.signature: bucket for bucket in record.on(device)}
        configured = wanted_signatures(
            version.inputs, version.max_batch_size, named=[*tuning.signatures, *self._sampled(record)]
        )
        self._tell_limit(record, device, configured)
        seen = seen_signatures(self._traffic.frequent(ref.model, ref.version), version.max_batch_size)
        counts = self._traffic.counts(ref.model, ref.version)
        return choose(
            held,
            configured=configured,
            seen=seen,
            uses=values_of([*held, *configured, *seen], counts, batching=version.max_batch_size > 0),
            busy={one for one, bucket in held.items() if bucket.digest in busy or bucket.plain in busy},
        )

    def _tell_limit(self, record: Record, device: str, configured: Sequence[Signature]) -> None:
        """Once for each configuration."""
        left = [signature.text for signature in configured[MAX_SIGNATURES:]]
        told = ""
        if left:
            more = f" and {len(left) - _MAX_TOLD} more" if len(left) > _MAX_TOLD else ""
            told = (
                f"its configuration asks for {len(configured)} signatures, of which the first {MAX_SIGNATURES} are"
                f" specialized; without: {', '.join(left[:_MAX_TOLD])}{more}"
            )
        if told and told not in record.remarks.values():
            model = record.version.ref.model
            _log.warning("tuning of %s: %s", model, told, extra={"model": model})
        record.remarks[device] = told

    def samples(self, version: TunableVersion) -> list[InputSet]:
        """Real inputs of a version: warm-up data, then captured requests. The caller holds a lease on it."""
        return [*version.samples(), *self._capture.samples(version.ref)]

    def _sampled(self, record: Record) -> list[Signature]:
        """Signatures of the warm-up data; those of captured requests are counted as traffic."""
        version = record.version
        if record.sampled is None:
            datatypes = {spec.name: spec.datatype for spec in version.inputs}
            found = [
                Signature.of((name, datatypes[name], array.shape) for name, array in sample.arrays.items())
                for sample in version.samples()
                if sample.arrays.keys() == datatypes.keys()
            ]
            record.sampled = list(dict.fromkeys(found))
        return record.sampled

    def _recall(self, record: Record, bucket: Bucket) -> Mode | None:
        """Take over what the cache knows; how the specialization is to be made where that is not enough."""
        known = self._memories[bucket.device].recall(bucket.digest)
        bucket.verdict = dict(known.verdict)
        if known.state == "passed":
            bucket.outcome = "passed"
            return None
        if known.state in ("refused", "unsupported", "quarantined"):
            bucket.outcome, bucket.reason = known.state, known.reason
            self._book.note(record, known.state, signature=bucket.signature.text, reason=known.reason, remembered=True)
            return None
        if record.tuning_on(bucket.device).mode == "cache" and known.state == "absent":
            bucket.outcome, bucket.reason = "refused", "it is not in the cache, and tuning is 'cache'"
            return None
        outcome, reason = self._options.hindrance(bucket.device)
        if outcome and known.state == "absent":
            bucket.outcome, bucket.reason = outcome, reason
            return None
        return "gate" if known.state == "unproven" else "build"


def newest_of(records: Mapping[VersionRef, Record], ref: VersionRef) -> list[VersionRef]:
    """Other loads of the same version number."""
    return [old for old in records if (old.model, old.version) == (ref.model, ref.version) and old != ref]


def _lasting(tunings: Mapping[str, ModelTuning]) -> dict[str, ModelTuning]:
    """Settings without those that change no artifact and no verdict."""
    return {
        device: replace(tuning, budget_seconds=None, capture=False, signatures=()) for device, tuning in tunings.items()
    }
