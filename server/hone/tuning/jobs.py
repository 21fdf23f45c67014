"""Jobs, and the queue that says which comes next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hone.specialization import Signature, VersionRef

Mode = Literal["build", "gate", "plain"]

#: How a child's stage begins while it tries schedules at random, which may take it along: a child that ends there is
#: followed by one that does without.
SCHEDULING_STAGE = "trying schedules"
#: The same while it runs kernels on a GPU: who broke the device is blocked by then, and another child goes on.
PROFILING_STAGE = "measuring kernels on the GPU"
#: What people are told of a plain module.
PLAIN = "a module with plain schedules, until one is searched for"


@dataclass(frozen=True, slots=True)
class Task:
    """One specialization to make. `gate` takes an artifact that is there already through the whole gate again. `plain`
    makes one without a search, which serves until the one that was searched for is there (GPUs; see `Bucket.plain`)."""

    signature: Signature
    digest: str
    mode: Mode = "build"


@dataclass(frozen=True, slots=True)
class Job:
    """The specializations of one model version that are to be made on one kind of device."""

    ref: VersionRef
    device: str
    """Digest of the device key."""
    tasks: tuple[Task, ...]


class JobQueue:
    """Jobs by expected gain, one for each model version and kind of device. Belongs to one thread.

    `gain` says what a job is worth now, so that the order follows traffic; equal ones go in the order they came.
    """

    def __init__(self, gain: Callable[[Job], float]) -> None:
        self._gain = gain
        self._jobs: dict[tuple[str, int, str], Job] = {}

    def put(self, job: Job) -> None:
        """Add a job; it takes the place of one for the same version with an older graph, or joins one with the same."""
        key = (job.ref.model, job.ref.version, job.device)
        waiting = self._jobs.get(key)
        if waiting is not None and waiting.ref == job.ref:
            tasks = {task.digest: task for task in (*waiting.tasks, *job.tasks)}
            job = Job(job.ref, job.device, tuple(tasks.values()))
        self._jobs[key] = job

    def take(self, device: str, *, skip: Callable[[Job], bool] = lambda job: False) -> Job | None:
        """Remove and return the most valuable job for this kind of device."""
        waiting = [(key, job) for key, job in self._jobs.items() if job.device == device and not skip(job)]
        if not waiting:
            return None
        key, job = max(waiting, key=lambda item: self._gain(item[1]))
        del self._jobs[key]
        return job

    def cancel(self, ref: VersionRef) -> bool:
        """Drop the jobs of a version. Whether there were any."""
        gone = [key for key, job in self._jobs.items() if job.ref == ref]
        for key in gone:
            del self._jobs[key]
        return bool(gone)

    def without(self, ref: VersionRef, device: str, signature: Signature) -> None:
        """Take what waits for a signature out of a version's job."""
        key = (ref.model, ref.version, device)
        waiting = self._jobs.get(key)
        if waiting is None or waiting.ref != ref:
            return
        tasks = tuple(task for task in waiting.tasks if task.signature != signature)
        if tasks:
            self._jobs[key] = Job(ref, device, tasks)
        else:
            del self._jobs[key]

    def keep_only(self, served: Sequence[VersionRef]) -> list[Job]:
        """Drop the jobs of versions that are no longer served; those dropped."""
        alive = set(served)
        gone = {key: job for key, job in self._jobs.items() if job.ref not in alive}
        for key in gone:
            del self._jobs[key]
        return list(gone.values())

    @property
    def kinds(self) -> set[str]:
        """Kinds of device that jobs wait for."""
        return {job.device for job in self._jobs.values()}

    def drop(self, kinds: Collection[str]) -> None:
        """Drop the jobs for these kinds of device."""
        self._jobs = {key: job for key, job in self._jobs.items() if job.device not in kinds}

    def of(self, ref: VersionRef) -> list[Job]:
        return [job for job in self._jobs.values() if job.ref == ref]

    def __len__(self) -> int:
        return len(self._jobs)


class Devices:
    """Which devices are free: one job at a time on each, and one at a time for each kind.

    Two cards of one kind share their jobs (what one learns holds for both); cards of different kinds have their own.
    Belongs to one thread.
    """

    def __init__(self, devices: Sequence[tuple[str, str]]) -> None:
        """(device's own name, digest of its key) for each device."""
        self._kinds = dict(devices)
        self._busy: set[str] = set()
        self._turn = list(self._kinds)

    @property
    def kinds(self) -> list[str]:
        """Each kind once, in the order of the devices."""
        return list(dict.fromkeys(self._kinds.values()))

    def withdraw(self, kinds: Collection[str]) -> None:
        """None of these kinds is free any more."""
        self._turn = [name for name in self._turn if self._kinds[name] not in kinds]

    def free(self) -> list[tuple[str, str]]:
        """Devices that may take a job, the one that waited longest first; one for each kind that has none running."""
        busy_kinds = {self._kinds[name] for name in self._busy}
        found: dict[str, str] = {}
        for name in self._turn:
            kind = self._kinds[name]
            if kind not in busy_kinds:
                found.setdefault(kind, name)
        return [(name, kind) for kind, name in found.items()]

    def acquire(self, name: str) -> None:
        if self._kinds[name] in {self._kinds[busy] for busy in self._busy}:
            raise ValueError(f"a device of the kind of '{name}' has a job already")
        self._busy.add(name)
        if name in self._turn:
            self._turn.remove(name)
            self._turn.append(name)

    def release(self, name: str) -> None:
        self._busy.discard(name)
