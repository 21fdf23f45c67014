"""Which specializations a version is to have: its settings, its signatures, and what the cache knows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hone.specialization import Signature, VersionRef
from hone.tuning.book import Book
from hone.tuning.capture import Capture
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import Job, Mode, Task
from hone.tuning.options import TunerOptions
from hone.tuning.ports import TunableVersion
from hone.tuning.record import Bucket, Record
from hone.tuning.settings import ModelTuning, model_tuning
from hone.tuning.signatures import Traffic, wanted_signatures
from hone.tuning.verdicts import Recalled

KeyOf = Callable[[TunableVersion, ModelTuning, Signature, str], str]
"""Digest of the artifact for a version, its settings and a signature on a kind of device."""


class Memory(Protocol):
    """What the cache knows of specializations on one kind of device; see `verdicts.Verdicts`."""

    def recall(self, digest: str) -> Recalled: ...


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
    ) -> None:
        self._book = book
        self._kinds = kinds
        self._memories = memories
        self._key_of = key_of
        self._traffic = traffic
        self._options = options
        self._capture = capture

    def configure(self, record: Record) -> bool:
        """Read the version's settings. Whether they make artifacts found before useless."""
        before = record.tuning
        try:
            record.tuning = model_tuning(record.version.parameters, record.version.inputs, self._options.mode)
        except ValueError as problem:
            record.tuning = ModelTuning(mode="off")
            record.reason = str(problem)
            self._book.note(record, "refused", reason=record.reason)
        self._capture.allow(record.version.ref, record.tuning.capture and record.tuning.mode == "on")
        return _lasting(before) != _lasting(record.tuning)

    def wants(self, record: Record) -> list[Job]:
        """Add buckets for signatures that are worth a specialization and have none; the jobs that this takes.

        What the cache holds needs no job: its bucket has passed already, or says why not.
        """
        if record.tuning.mode == "off" or record.held:
            return []
        wanted = self._wanted(record)
        jobs = []
        for device in self._kinds:
            tasks = []
            for signature in wanted:
                if (device, signature) in record.buckets:
                    continue
                digest = self._key_of(record.version, record.tuning, signature, device)
                bucket = record.buckets[device, signature] = Bucket(device, signature, digest)
                mode = self._recall(record, bucket)
                if mode is not None:
                    tasks.append(Task(signature, digest, mode))
            if tasks:
                tasks.sort(key=lambda task: task.signature.rows)
                jobs.append(Job(record.version.ref, device, tuple(tasks)))
        return jobs

    def forget_failures(self, record: Record) -> None:
        """Let failed and unfinished specializations be tried again; verdicts stand."""
        for key, bucket in list(record.buckets.items()):
            if not bucket.generation and bucket.outcome in ("", "failed"):
                del record.buckets[key]

    def _wanted(self, record: Record) -> list[Signature]:
        version, ref = record.version, record.version.ref
        return wanted_signatures(
            version.inputs,
            version.max_batch_size,
            named=[*record.tuning.signatures, *self._sampled(record)],
            frequent=self._traffic.frequent(ref.model, ref.version),
        )

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
        if record.tuning.mode == "cache" and known.state == "absent":
            bucket.outcome, bucket.reason = "refused", "it is not in the cache, and tuning is 'cache'"
            return None
        if self._options.cannot_build and known.state == "absent":
            bucket.outcome, bucket.reason = "failed", self._options.cannot_build
            return None
        return "gate" if known.state == "unproven" else "build"


def newest_of(records: Mapping[VersionRef, Record], ref: VersionRef) -> list[VersionRef]:
    """Other loads of the same version number."""
    return [old for old in records if (old.model, old.version) == (ref.model, ref.version) and old != ref]


def _lasting(tuning: ModelTuning) -> ModelTuning:
    """Settings without those that change no artifact and no verdict."""
    return replace(tuning, budget_seconds=None, capture=False, signatures=())
