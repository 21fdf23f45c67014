"""The tuner: one thread that makes models faster while they serve. `step` is its whole story."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, Literal

from hone.specialization import CPU, VersionRef
from hone.tuning.activity import Activity
from hone.tuning.book import Book, TunerCounters
from hone.tuning.child_process import JobCause
from hone.tuning.commands import Commands
from hone.tuning.holding import KEEPING, OperatorHolds
from hone.tuning.jobs import Devices, JobQueue
from hone.tuning.lanes import Lanes
from hone.tuning.maker import MAX_REMEASURED, Maker, jobs_to_ask_again
from hone.tuning.options import Device, TunerOptions
from hone.tuning.planner import KeyOf, Memory, Planner, newest_of
from hone.tuning.ports import EngineLoader, Promotion, ServedModels, TunableVersion
from hone.tuning.probation import Probation
from hone.tuning.promoter import Promoter, Quarantine
from hone.tuning.record import Record
from hone.tuning.shares import MemoryShares
from hone.tuning.signatures import Traffic
from hone.tuning.watch import Watch

_log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
#: Between learning that a GPU is lost and holding nothing against anybody any more.
_LOSS_SECONDS = 1.0
_WATCH_TICK_SECONDS = 0.1

#: What people are told of a job that waits.
_FOR_TURN = "waits for its turn: one at a time is tuned on each kind of device"
_RETIRED = "seldom used of late: its place is another's"
_FOR_MEMORY = "waits for memory: what is tuned on another kind of device was promised more than its part"


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Tuner:
    """Owns the queue, the choices and at most one child for each kind of device. `start` and `stop` it; `wake` it when
    models changed.

    All state belongs to the tuner's thread; `status` reads finished snapshots and `act` leaves a note, so that neither
    waits for work, and no lock is needed.
    """

    def __init__(
        self,
        models: ServedModels,
        promotion: Promotion,
        *,
        devices: Sequence[Device],
        memories: Mapping[str, Memory],
        quarantine: Quarantine,
        key_of: KeyOf,
        plain_key_of: KeyOf | None = None,
        load: EngineLoader,
        watch: Watch,
        probation: Probation,
        traffic: Traffic,
        options: TunerOptions,
        holds: OperatorHolds | None = None,
        activity: Callable[[], Activity] = lambda: Activity(0, 0),
        activity_descriptor: int | None = None,
        listener: Callable[[dict[str, Any]], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], str] = _utc_now,
        num_cores: int | None = None,
        upkeep: Callable[[], object] = lambda: None,
        lost: Callable[[], str] = lambda: "",
    ) -> None:
        """`lost`: why this process can use its GPUs no longer; empty while it can."""
        self._lost = lost
        self._lost_since: float | None = None
        self._loss = ""
        """What people are told of it once nothing is made for GPUs any more."""
        self._gpu_kinds = frozenset(device.key for device in devices if device.kind != CPU)
        self._alive = frozenset(device.key for device in devices)
        """Kinds of device that are not lost."""
        self._models = models
        self._traffic = traffic
        self._probation = probation
        self._watch = watch
        self._options = options
        self._activity = activity
        self._clock = clock
        self._devices = Devices([(device.name, device.key) for device in devices])
        self._book = Book(utc, listener)
        self._holds = holds or OperatorHolds(None)
        self._planner = Planner(
            self._book,
            self._devices.kinds,
            memories,
            key_of,
            traffic,
            options,
            capture=watch.capture,
            names={device.key: device.kind for device in devices},
            plain_key_of=plain_key_of,
        )
        self._queue = JobQueue(self._planner.gain)
        self._promoter = Promoter(
            self._book,
            promotion,
            memories=memories,
            quarantine=quarantine,
            load=load,
            watch=watch,
            samples=self._planner.samples,
            probation=probation,
            kinds={device.key: device.kind for device in devices},
            remeasure_seconds=options.remeasure_seconds,
            clock=clock,
        )
        budget = options.budget
        self._shares = (
            MemoryShares(budget.memory_bytes, max(1, len(self._devices.kinds)), self._resident_bytes)
            if budget.memory_is_set  # else each child has its own
            else None
        )
        self._lanes = Lanes(
            {
                kind: Maker(
                    self._book,
                    promotion,
                    self._promoter,
                    options=options,
                    device_fields={device.key: device.fields for device in devices},
                    ordinals={device.key: device.ordinal for device in reversed(devices)},
                    num_cores=num_cores or len(os.sched_getaffinity(0)),
                    samples=self._planner.samples,
                    activity=activity,
                    activity_descriptor=activity_descriptor,
                    clock=clock,
                    num_sharing=self._num_sharing,
                    shares=self._shares,
                )
                for kind in self._devices.kinds
            },
            on_cpu=[device.key for device in devices if device.kind == CPU],
            clock=clock,
        )
        self._commands = Commands(
            self._book, self._planner, self._queue, self._lanes, self._holds, drop=self._drop, plan=self._plan
        )
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._upkeep = upkeep
        self._next_look = self._next_frequent = self._next_upkeep = float("-inf")
        self._quiet_since = clock()
        self._last_activity = activity()

    # --- called by any thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tuner", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 60.0) -> bool:
        """End the child and the thread; what is on probation has neither passed nor failed. False at the timeout."""
        self._stopping.set()
        self._lanes.stop()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return False
        self._commands.leave()
        self._probation.close()
        return True

    def wake(self) -> None:
        """Models were loaded or unloaded: look now."""
        self._wake.set()

    def status(self, model: str, version: str = "") -> dict[str, Any]:
        """Raises NotFound."""
        return self._book.status(self._book.place_of(model, version))

    def statuses(self) -> list[dict[str, Any]]:
        return self._book.statuses()

    def act(self, model: str, version: str, action: str) -> Future[None]:
        """See `specialization.TuningControl`."""
        done = self._commands.put(model, version, action)
        self._wake.set()
        return done

    @property
    def counters(self) -> TunerCounters:
        return self._book.counters

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    # --- the thread

    def _run(self) -> None:
        self._promoter.blame(self._probation.open())
        while not self._stopping.is_set():
            try:
                busy = self.step()
            except Exception:
                # A mistake in here must neither take tuning down for good nor spin.
                _log.exception("tuning went wrong; serving is not affected")
                busy = False
            if not busy and not self._stopping.is_set():
                self._wake.wait(_WATCH_TICK_SECONDS if self._watch.watched() else _TICK_SECONDS)
        self._lanes.close()

    def step(self) -> bool:
        """On each kind of device, take the most valuable job, make its specializations in a child (compile, gate,
        publish), and promote those that passed; all a little further with each step. What the cache knows already is
        promoted on arrival. False when there is nothing to make."""
        try:
            self.attend()
        finally:  # children are looked after whatever goes wrong elsewhere
            busy = self._work()
        return busy

    def _work(self) -> bool:
        for device, kind in self._devices.free():
            job = self._queue.take(kind) if self._has_room(kind) else None
            if job is not None:
                job = self._planner.ordered(job)
                self._devices.acquire(device)
                self._lanes.begin(kind, device, job)
        if self._lanes.is_idle:
            return False
        for device, job in self._lanes.step():
            self._devices.release(device)
            self._finish(job.ref)
        return True

    def attend(self) -> None:
        """All that does not wait for a child: commands, models that came and went, the cache, the watch."""
        now = self._clock()
        self._commands.follow()
        self._promoter.follow_watch(idle=self._lanes.is_idle)  # before promotions: what has failed is kept out by then
        if self._wake.is_set() or now >= self._next_look:
            self._wake.clear()
            self._next_look = now + _TICK_SECONDS
            self._follow_models()
        self._follow_loss(now)
        if now >= self._next_upkeep and self._lanes.is_idle:  # a child may be using what would move
            self._next_upkeep = now + self._options.upkeep_seconds
            self._upkeep()
        if now >= self._next_frequent:
            self._next_frequent = now + self._options.frequent_interval_seconds
            for record in list(self._book.records.values()):
                self._plan(record)
        self._follow_quiet(now)

    def _num_sharing(self) -> int:
        """Kinds of device that there is work for."""
        return max(1, len({*self._lanes.busy, *self._queue.kinds}))

    def _resident_bytes(self, kind: str) -> int:
        return self._lanes.resident_bytes(kind)

    def _has_room(self, kind: str) -> bool:
        """Whether others leave a job for this kind of device its part of the memory."""
        return self._shares is None or self._shares.has_room(kind, self._lanes.busy)

    def _finish(self, ref: VersionRef) -> None:
        try:
            self._follow_models()  # it may have been reloaded with another configuration since the last look
        finally:
            try:
                self._promoter.promote(ref, but=self._lanes.at_work(ref))
            finally:  # nobody else would: it would be told to be at work for ever
                record = self._book.records.get(ref)
                if record is not None:
                    self._settle(record)

    # --- models

    def _follow_models(self) -> None:
        served = {version.ref: version for version in self._models.tunable()}
        places = {(ref.model, ref.version) for ref in served}
        for ref in [ref for ref in self._book.records if ref not in served]:
            is_replaced = (ref.model, ref.version) in places
            self._leave(ref, "replaced" if is_replaced else "unloaded")
            if is_replaced:
                self._holds.drop(ref)  # it was meant for the graph that is replaced
        for ref, version in served.items():
            record = self._book.records.get(ref)
            if record is None:
                self._arrive(version)
            elif record.version is not version:
                self._renew(record, version)

    def _arrive(self, version: TunableVersion) -> None:
        for old in newest_of(self._book.records, version.ref):
            self._leave(old, "replaced")
        record = self._book.records[version.ref] = Record(version)
        self._planner.configure(record)
        held = self._holds.get(version.ref)
        if not held:
            self._plan(record)
            return
        if held in KEEPING:  # what served when it was held goes on serving
            self._planner.known(record)
            self._promoter.promote(version.ref)
        record.held = held
        self._book.note(record, "held", reason=held)
        self._settle(record)

    def _renew(self, record: Record, version: TunableVersion) -> None:
        """The same graph with another configuration: specializations stay where the settings allow it."""
        record.version, record.sampled = version, None
        self._promoter.renew(record)
        if self._planner.configure(record):
            self._drop(record, "its tuning settings changed", "settings")
            record.buckets.clear()
        self._plan(record)
        self._promoter.promote(record.version.ref, but=self._lanes.at_work(record.version.ref))
        self._settle(record)

    def _leave(self, ref: VersionRef, cause: Literal["unloaded", "replaced"]) -> None:
        self._lanes.cancel(ref, f"the model was {cause}", cause)
        self._queue.cancel(ref)
        self._promoter.forget(ref)
        self._watch.capture.allow(ref, False)
        self._book.remove(ref)
        if self._book.at((ref.model, ref.version)) is None:
            self._traffic.forget(ref.model, ref.version)

    def _plan(self, record: Record) -> None:
        """Promote at once what the cache holds, and queue what is to be made."""
        ref = record.version.ref
        before = set(record.buckets)
        choices = self._planner.choose(record, self._lanes.at_work(ref))
        for device, choice in choices.items():
            for signature in choice.retired:
                self._queue.without(ref, device, signature)
                self._promoter.retire(record, record.buckets[device, signature], _RETIRED)
        for job in self._planner.wants(record, choices):
            self._queue.put(job)
        if set(record.buckets) != before or record.state == "queued":
            self._promoter.promote(ref, but=self._lanes.at_work(ref))
            self._settle(record)

    def _settle(self, record: Record) -> None:
        """The record's state, by what is still to be done."""
        ref = record.version.ref
        if self._queue.of(ref) and not record.held:
            if not self._lanes.is_working_on(ref):
                busy = self._lanes.busy
                waits = [job for job in self._queue.of(ref) if job.device not in busy]
                starved = bool(waits) and not any(self._has_room(job.device) for job in waits)
                record.state, record.progress, record.reason = "queued", 0.0, _FOR_MEMORY if starved else _FOR_TURN
        elif not self._lanes.is_working_on(ref):
            record.settle()
            if not record.buckets and record.mode != "off" and not record.held:
                record.reason = self._why_no_signatures(record)
        self._book.tell(record)

    def _why_no_signatures(self, record: Record) -> str:
        if self._alive.isdisjoint(record.tunings):
            return self._loss
        return "its input shapes are not known: name signatures in its configuration, or send requests"

    def _drop(self, record: Record, reason: str, cause: JobCause) -> None:
        """Return every signature of a version to the baseline, and stop working on it."""
        self._lanes.cancel(record.version.ref, reason, cause)
        self._queue.cancel(record.version.ref)
        self._promoter.roll_back_all(record, reason)

    # --- a lost GPU

    def _follow_loss(self, now: float) -> None:
        """Take out of service what runs on GPUs that the process has lost, and make nothing more for them. Nothing is
        held against it: who broke the GPU has been told of by who ran it, for which there is a moment."""
        if not self._gpu_kinds or not (reason := self._lost()):
            return
        if self._lost_since is None:
            self._lost_since = now
            _log.error("GPUs are lost, restart the server to have them again: %s", reason)
        if now - self._lost_since < _LOSS_SECONDS:
            return
        gone, self._gpu_kinds = self._gpu_kinds, frozenset()
        self._alive -= gone
        self._loss = told = f"the GPU is lost: {reason}"
        self._devices.withdraw(gone)
        self._queue.drop(gone)
        self._lanes.cancel_on(gone, told, "device lost")
        self._planner.lose(gone, told)
        self._promoter.lose(gone, told)
        for record in self._book.records.values():
            self._settle(record)

    # --- quiet times

    def _follow_quiet(self, now: float) -> None:
        """Once serving has rested for a while and nothing else is to be done, ask again what noise left open."""
        activity = self._activity()
        if activity != self._last_activity or activity.num_in_flight:
            self._last_activity, self._quiet_since = activity, now
        rests = now - self._quiet_since >= self._options.idle_seconds
        if not rests or len(self._queue) or not self._lanes.is_idle:
            return
        for record in self._book.records.values():
            if record.held or not 0 < record.remeasure_at <= now:
                continue
            jobs = [job for job in jobs_to_ask_again(record) if self._has_time(record, job.device)]
            if not jobs:
                continue
            record.num_remeasured += 1
            again_in = self._options.remeasure_seconds * 2**record.num_remeasured
            record.remeasure_at = now + again_in if record.num_remeasured < MAX_REMEASURED else 0.0
            for job in jobs:
                self._queue.put(job)

    def _has_time(self, record: Record, device: str) -> bool:
        on = device in self._alive and record.tuning_on(device).mode == "on"
        return on and self._lanes.seconds_left(record, device) > 0
