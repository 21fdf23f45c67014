"""A maker for each kind of device. Their jobs go on side by side: each has a child of its own, and the tuner's thread
looks after all of them in turns, so that what they share needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass

from hone.specialization import VersionRef
from hone.tuning.child_process import JobCause
from hone.tuning.jobs import Job
from hone.tuning.maker import Maker
from hone.tuning.record import Record

#: A child may stand still for so long for the sake of another's measurement, and then goes on for as long at least: it
#: may hold a lock of the cache that the other one waits for.
_HOLD_SECONDS = 45.0


@dataclass(slots=True, eq=False)
class _Running:
    device: str
    """The device's own name."""
    job: Job
    steps: Generator[None, None, None]
    held_since: float | None = None
    free_until: float = float("-inf")


class Lanes:
    """Belongs to the tuner's thread, but for `stop`."""

    def __init__(
        self,
        makers: Mapping[str, Maker],
        on_cpu: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`makers` by kind of device. While one of those `on_cpu` measures, all others stand still: what they compile
        would take the cores that are measured."""
        self._makers = dict(makers)
        self._on_cpu = frozenset(on_cpu)
        self._clock = clock
        self._running: dict[str, _Running] = {}

    # --- what goes on

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def busy(self) -> list[str]:
        """Kinds of device that have a job."""
        return list(self._running)

    def at_work(self, ref: VersionRef) -> frozenset[str]:
        """See `Maker.at_work`."""
        return frozenset().union(*(maker.at_work(ref) for maker in self._makers.values()))

    def is_working_on(self, ref: VersionRef) -> bool:
        return any(maker.is_working_on(ref) for maker in self._makers.values())

    def seconds_left(self, record: Record, device: str) -> float:
        return self._makers[device].seconds_left(record, device)

    def resident_bytes(self, kind: str) -> int:
        """Of the child for a kind of device; 0 where there is none."""
        child = self._makers[kind].child
        return child.resident_bytes if child is not None else 0

    # --- what is done

    def begin(self, kind: str, device: str, job: Job) -> None:
        """Take on a job for a kind of device that has none."""
        if kind in self._running:
            raise ValueError(f"a device of the kind of '{device}' has a job already")
        self._running[kind] = _Running(device, job, self._makers[kind].make(job))

    def step(self) -> Iterator[tuple[str, Job]]:
        """Take every job a little further; those that have ended, with the names of their devices. What a job raises
        (a mistake in here) is raised once it was told of."""
        for kind, running in list(self._running.items()):
            child = self._makers[kind].child
            if child is not None:
                child.num_turns, child.held = len(self._running), self._is_held(kind, running)
            try:
                next(running.steps)
            except StopIteration:
                del self._running[kind]
                yield running.device, running.job
            except Exception:
                del self._running[kind]
                yield running.device, running.job
                raise

    def _is_held(self, kind: str, running: _Running) -> bool:
        now = self._clock()
        timing = any(
            other != kind and other in self._on_cpu and (child := self._makers[other].child) and child.is_timing
            for other in self._running
        )
        if not timing or now < running.free_until:
            running.held_since = None
            return False
        if running.held_since is None:
            running.held_since = now
        if now - running.held_since >= _HOLD_SECONDS:
            running.free_until, running.held_since = now + _HOLD_SECONDS, None
            return False
        return True

    def cancel(self, ref: VersionRef, reason: str, cause: JobCause) -> None:
        for maker in self._makers.values():
            maker.cancel(ref, reason, cause)

    def cancel_on(self, kinds: Collection[str], reason: str, cause: JobCause) -> None:
        """Whatever goes on on these kinds of device."""
        for kind in kinds:
            if kind in self._running:
                self._makers[kind].cancel(self._running[kind].job.ref, reason, cause)

    def stop(self) -> None:
        """End all children soon, and start no other; from any thread."""
        for maker in self._makers.values():
            maker.stop()

    def close(self) -> None:
        """End what still runs; returns when all children are gone."""
        for running in self._running.values():
            running.steps.close()
        self._running.clear()
