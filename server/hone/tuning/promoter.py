"""What serves: promotions, the watch over them, roll-backs, and who is kept out afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from hone.specialization import CPU, Specialization, VersionRef
from hone.tuning.book import Book
from hone.tuning.inputs import InputSet
from hone.tuning.jobs import PLAIN
from hone.tuning.planner import Memory
from hone.tuning.ports import EngineLoader, Promotion, TunableVersion
from hone.tuning.probation import Death, Probation, Served
from hone.tuning.promote import Refused, prepare
from hone.tuning.record import Bucket, Outcome, Record
from hone.tuning.watch import Incident, Watch, Watched

_log = logging.getLogger(__name__)

#: Causes that keep an artifact out the first time; the others do so the second time: slowness, unexplained deaths, and
#: deaths of a fault in what had served long without one.
_AT_ONCE = frozenset({"error", "outputs", "fault"})

#: How often it is tried to handle an incident, with pauses that double.
_MAX_TRIES = 6
_RETRY_SECONDS = 1.0


class Quarantine(Protocol):
    """The part of the kernels cache that keeps artifacts out, on one kind of device (`scope`)."""

    def quarantine(self, digest: str, scope: str, reason: str, cause: str = "quarantine") -> Any: ...

    def strike(self, digest: str, scope: str, cause: str, reason: str, *, limit: int = 2) -> Any:
        """A record whose `reason` is None while the artifact may still serve."""


@dataclass(slots=True, eq=False)
class _Open:
    """An incident, and what has been done about it so far."""

    incident: Incident
    out: bool | None = None
    """Whether its artifact is kept out; None until that is written down."""
    returned: list[Bucket] = field(default_factory=list)
    """What it served."""
    is_out_told: bool = False
    num_tries: int = 0
    next_try: float = float("-inf")


class Promoter:
    """Belongs to the tuner's thread."""

    def __init__(
        self,
        book: Book,
        promotion: Promotion,
        *,
        memories: Mapping[str, Memory],
        quarantine: Quarantine,
        load: EngineLoader,
        watch: Watch,
        samples: Callable[[TunableVersion], Sequence[InputSet]],
        probation: Probation,
        kinds: Mapping[str, str],
        remeasure_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kinds`: digest of a device key -> the name that serving's executors have for that kind of device."""
        self._kinds = kinds
        self._book = book
        self._promotion = promotion
        self._memories = memories
        self._quarantine = quarantine
        self._load = load
        self._watch = watch
        self._samples = samples
        self._probation = probation
        self._remeasure_seconds = remeasure_seconds
        self._clock = clock
        self._lost: dict[str, str] = {}
        """Kinds of device on which nothing can serve any more, and why."""
        self._open: list[_Open] = []
        self._barred: dict[tuple[str, str], str] = {}
        """Artifacts (kind of device, digest) that the quarantine could not be told of, and what is held against them:
        this process keeps them out by itself."""

    # --- into service

    def promote(self, ref: VersionRef, *, only: Container[str] | None = None, but: Container[str] = ()) -> None:
        """Load and warm all that passed and does not serve yet (`only` these artifacts, all `but` these); then make it
        current, in one step for each kind of device: a wave. Where nothing tuned serves yet the first goes alone,
        before the rest is loaded."""
        record = self._book.records.get(ref)
        if record is None or record.held:
            return
        for bucket in record.buckets.values():
            if bucket.device in self._lost and bucket.waits:
                self._lose(record, bucket, self._lost[bucket.device])
        waiting = [
            bucket
            for bucket in record.buckets.values()
            if bucket.waits and bucket.digest not in but and (only is None or bucket.digest in only)
        ]
        waiting += [
            bucket.as_plain()
            for bucket in record.buckets.values()
            if bucket.plain_waits and bucket.plain not in but and (only is None or bucket.plain in only)
        ]
        for device in dict.fromkeys(bucket.device for bucket in waiting):
            began = self._clock()
            here = [bucket for bucket in waiting if bucket.device == device]
            if not any(bucket.generation for bucket in record.buckets.values() if bucket.device == device):
                self._promote_on(record, device, here[:1])
                self._book.tell(record)
                here = here[1:]
            if here:
                self._promote_on(record, device, here)
            self._book.counters.promote_seconds += self._clock() - began

    def _promote_on(self, record: Record, device: str, waiting: Sequence[Bucket]) -> None:
        ref = record.version.ref
        with self._promotion.lease(ref) as held:
            ready = self._prepared(record, device, waiting) if held else []
        if not ready:
            return
        swapping = self._clock()
        generations = self._promotion.promote(ref, ready)
        self._book.counters.swap_seconds += self._clock() - swapping
        if generations is None:  # unloaded or reloaded meanwhile: nobody took the engines
            for one in ready:
                self._probation.end(one.mark)
                one.engine.close()
            return
        for one in ready:
            self._promoted(record, device, one, generations[one.signature])

    def _prepared(self, record: Record, device: str, waiting: Sequence[Bucket]) -> list[Specialization]:
        ready = []
        samples = self._samples(record.version)
        model = record.version.ref.model
        served = [Served(bucket.digest, device, f"{model} {bucket.signature.text}") for bucket in waiting]
        for bucket, mark in zip(waiting, self._probation.begin(served), strict=True):
            known = self._memories[device].recall(bucket.digest)
            barred = self._barred.get((device, bucket.digest))
            if known.state == "quarantined" or barred is not None:  # meanwhile, by another server or another version
                self._probation.end(mark)
                self._refuse(record, bucket, Refused(known.reason if barred is None else barred), "quarantined")
                continue
            told = known.entry.manifest.get("domains") if known.entry is not None else None
            running = partial(self._probation.board.running, mark)
            made = prepare(bucket, told, record.version, record.tuning_on(device), samples, self._load, running)
            if isinstance(made, Specialization):
                ready.append(replace(made, device=self._kinds.get(device, CPU), mark=mark))
            else:
                self._probation.end(mark)
                self._refuse(record, bucket, made)
        return ready

    def _refuse(self, record: Record, bucket: Bucket, refused: Refused, outcome: Outcome = "failed") -> None:
        bucket.outcome, bucket.reason = outcome, refused.reason
        own = record.buckets.get((bucket.device, bucket.signature))
        if own is not None and own.plain == bucket.digest:
            own.plain_verdict = {}
        if refused.cause and self._keep_out(bucket.digest, bucket.device, refused.cause, refused.reason):
            bucket.outcome = "quarantined"
        self._book.note(record, bucket.outcome, signature=bucket.signature.text, reason=refused.reason)

    def _promoted(self, record: Record, device: str, one: Specialization, generation: int) -> None:
        version, tuning = record.version, record.tuning_on(device)
        bucket = record.buckets[device, one.signature]
        bucket.promoted(generation, one.artifact)
        verdict = bucket.plain_verdict if bucket.serves_plain else bucket.verdict
        bucket.reason = str(verdict.get("note", "")) or (PLAIN if bucket.serves_plain else "")
        self._book.counters.num_promotions += 1
        speedup = verdict.get("speedup")
        self._book.note(record, "promoted", signature=one.signature.text, generation=generation, speedup=speedup)
        self._watch.begin(
            Watched(
                version.ref,
                generation,
                one.signature,
                device,
                one.artifact,
                version.baseline,
                one.engine,
                tuning.precision,
                tuning.tolerance,
                version.max_batch_size > 0,
                one.mark,
            )
        )
        if bucket.provisional:
            record.remeasure_at = self._clock() + self._remeasure_seconds

    # --- out of service

    def roll_back(self, record: Record, bucket: Bucket, reason: str, cause: str) -> None:
        """Return a bucket to what served before; nothing is held against its artifact."""
        generation = self._return(record, bucket)
        self._book.counters.num_rollbacks[cause] += 1
        self._book.note(record, "rolled_back", signature=bucket.signature.text, generation=generation, reason=reason)

    def retire(self, record: Record, bucket: Bucket, reason: str) -> None:
        """Return a bucket to the baseline and forget it; what was found out about it stays in the cache."""
        generation = bucket.generation
        while bucket.generation:
            self._return(record, bucket)
        del record.buckets[bucket.device, bucket.signature]
        told = {"signature": bucket.signature.text, "reason": reason}
        self._book.note(record, "retired", generation=generation, **told)

    def _return(self, record: Record, bucket: Bucket) -> int:
        """To what served before; the generation that it was."""
        generation = bucket.generation
        bucket.returned()
        self._promotion.roll_back(record.version.ref, generation)
        self._forget(record.version.ref, generation)
        return generation

    def lose(self, kinds: Collection[str], reason: str) -> None:
        """These kinds of device are lost: what is on them serves no longer, nothing is held against it, and nothing is
        promoted there any more."""
        self._lost.update(dict.fromkeys(kinds, reason))
        for record in self._book.records.values():
            for bucket in record.buckets.values():
                if bucket.device in kinds:
                    self._lose(record, bucket, reason)

    def _lose(self, record: Record, bucket: Bucket, reason: str) -> None:
        while bucket.generation:
            self.roll_back(record, bucket, reason, "device lost")
        bucket.plain, bucket.plain_verdict, bucket.again = "", {}, False
        if bucket.outcome in ("", "passed"):
            bucket.outcome, bucket.reason = "failed", reason

    def roll_back_all(self, record: Record, reason: str) -> None:
        for bucket in record.buckets.values():
            while bucket.generation:
                self.roll_back(record, bucket, reason, "request")

    def renew(self, record: Record) -> None:
        """The version was loaded again: generations that it still runs go on, with another baseline; those that ended
        with the load before (it was unloaded meanwhile) are to be promoted again."""
        version = record.version
        for watched in self._watch.watched():
            if watched.ref == version.ref:
                watched.baseline, watched.instances = version.baseline, None
        for bucket in record.buckets.values():
            if bucket.generation:
                with self._promotion.lease(version.ref, bucket.generation) as held:
                    if not held:
                        self._forget(version.ref, bucket.generation)
                        if bucket.before:  # the slot that kept it is gone too
                            self._forget(version.ref, bucket.before)
                        bucket.before = 0
                        bucket.returned()

    def forget(self, ref: VersionRef) -> None:
        """The version is gone, and its generations with it."""
        self._forget(ref, None)

    def _forget(self, ref: VersionRef, generation: int | None) -> None:
        for watched in self._watch.end(ref, generation):
            self._probation.end(watched.mark)

    # --- the watch

    def follow_watch(self, *, idle: bool) -> None:
        """Each incident is handled on its own: what goes wrong with one is told, and tried again a few times."""
        incidents, passed = self._watch.step(idle=idle)
        for incident in incidents:
            self._book.counters.num_rollbacks[incident.cause] += 1
            watched = incident.watched
            _log.warning(
                "%s %s: rolled back to what served before: %s",
                watched.ref.model,
                watched.signature.text,
                incident.reason,
                extra={"model": watched.ref.model},
            )
            self._open.append(_Open(incident))
        for one in [one for one in self._open if self._clock() >= one.next_try]:
            try:
                self._handle(one)
            except Exception as problem:
                self._put_off(one, problem)
            else:
                self._open.remove(one)
        for watched in passed:
            self._probation.passed(watched.mark)

    def _put_off(self, one: _Open, problem: Exception) -> None:
        one.num_tries += 1
        one.next_try = self._clock() + _RETRY_SECONDS * 2 ** (one.num_tries - 1)
        gives_up = one.num_tries >= _MAX_TRIES
        if gives_up:
            self._open.remove(one)
        watched = one.incident.watched
        _log.error(
            "%s generation %d was rolled back (%s), but what follows from that went wrong: %s; %s",
            watched.ref.model,
            watched.generation,
            one.incident.reason,
            f"{type(problem).__name__}: {problem}",
            f"given up after {one.num_tries} times" if gives_up else "it is tried again",
            exc_info=problem,
            extra={"model": watched.ref.model},
        )

    def _handle(self, one: _Open) -> None:
        """The generation was rolled back already; see to it that it does not come back, and tell. Nothing is done a
        second time when this is tried again."""
        incident, watched = one.incident, one.incident.watched
        self._probation.end(watched.mark)
        try:
            if one.out is None:
                one.out = self._keep_out(watched.artifact, watched.device, incident.cause, incident.reason)
        finally:  # people are told in any case that it serves no longer
            self._tell_return(one)

    def _tell_return(self, one: _Open) -> None:
        incident, watched = one.incident, one.incident.watched
        record = self._book.records.get(watched.ref)
        if record is None:
            return
        for bucket in record.buckets.values():
            if bucket.before == watched.generation:  # what serves now goes on, and can be returned to it no longer
                bucket.before, bucket.plain, bucket.plain_verdict = 0, "", {}
                told = {"signature": bucket.signature.text, "reason": incident.reason}
                self._book.note(record, "rolled_back", generation=watched.generation, **told)
                self._book.tell(record)
        for bucket in record.served_by(watched.generation):
            if bucket.serves_plain:
                bucket.plain, bucket.plain_verdict = "", {}
            else:
                bucket.outcome = "refused"
            bucket.reason = incident.reason
            bucket.returned()
            one.returned.append(bucket)
            told = {"signature": bucket.signature.text, "reason": incident.reason}
            self._book.note(record, "rolled_back", generation=watched.generation, **told)
        if one.out and not one.is_out_told:
            one.is_out_told = True
            for bucket in one.returned:
                if bucket.outcome == "refused" and bucket.digest == watched.artifact:
                    bucket.outcome = "quarantined"
                self._book.note(record, "quarantined", signature=bucket.signature.text, reason=incident.reason)
        if one.returned:
            record.settle()
            self._book.tell(record)

    # --- who is kept out

    def blame(self, deaths: Sequence[Death]) -> None:
        """Hold the deaths of servers against what they ran then; where that is not known, against all that was on
        probation, though not at once."""
        for death in deaths:
            for one in death.blamed:
                when = "on probation" if one.on_probation else "long after its probation"
                reason = f"a server died of {death.fault} while it ran, {when}"
                self._hold_against(one, "fault" if one.on_probation else "late fault", reason)
            for one in death.others if not death.blamed else ():
                of = f"of {death.fault}, though not while it ran," if death.fault else "without a word"
                self._hold_against(one, "death", f"a server died {of} while it was on probation")

    def _hold_against(self, one: Served, cause: str, reason: str) -> None:
        try:
            out = self._keep_out(one.artifact, one.scope, cause, reason)
        except Exception:  # others are to be told of, too, and the tuner is to live on
            _log.exception(
                "%s (artifact %s): %s; that cannot be written down, and is held against it only until this server ends",
                one.name or "a tuned module",
                one.artifact[:12],
                reason,
            )
            return
        told = (one.name or "a tuned module", one.artifact[:12], reason)
        if out:
            _log.error("quarantined %s (artifact %s): %s", *told)
        else:
            _log.warning("%s (artifact %s): %s; another time it is quarantined", *told)

    def _keep_out(self, artifact: str, device: str, cause: str, reason: str) -> bool:
        """Whether the artifact is kept out from now on. What cannot be written down raises, and bars it in this
        process."""
        self._barred[device, artifact] = reason
        if cause in _AT_ONCE:
            self._quarantine.quarantine(artifact, device, reason, cause)
            out = True
        else:
            out = self._quarantine.strike(artifact, device, cause, reason).reason is not None
        del self._barred[device, artifact]
        self._book.counters.num_quarantines += out
        return out
