"""A tuning child as its parent sees it: started, fed one job, watched, and ended with all it started.

Everything that can hang, crash or eat memory runs in there, so every way it can end is a result with a reason that one
can read, and none is an exception. `steps` is the tuner's thread's part of it: children take turns there, one for each
kind of device.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hone.kernels.entry import STAGING_LOCK
from hone.kernels.files import FILE_MODE
from hone.kernels.spare import has_room
from hone.tuning import group
from hone.tuning.budget import Pacer, Starvation
from hone.tuning.child_process import ChildProcess, JobCause, JobResult, Limits
from hone.tuning.running_time import RunningTime
from hone.tuning.wire import MAX_SPEC_BYTES, Garbage, Message, encode

WORKER_COMMAND = (sys.executable, "-m", "hone.tuning.worker")

#: Seconds between two looks at the child: while requests may make it pause, and else.
_PACED_TICK_SECONDS = 0.01
_TICK_SECONDS = 0.05


class Child:
    """One child process for one job. `on_event` and `on_tick` are called on the thread that calls `run`.

    An event is a JSON object with an `event`; the child's own `stage` and the last words (`done`, and `failed` with a
    `reason`) are understood here, the rest is the caller's. Events with `"paced": true` tell that the child steps
    aside for requests by itself from here on, those with false that it is to be paused from outside. In its job's
    `running_time` it finds the descriptor of the time that it has run (see there). With
    a `starvation` it gets idle priority, until that says that it starves; where the system grants it, it is never
    paused: the kernel lets others pass, in microseconds.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        limits: Limits,
        *,
        on_event: Callable[[Message], None],
        on_tick: Callable[[], None] = lambda: None,
        pacer: Pacer | None = None,
        starvation: Starvation | None = None,
        descriptors: Sequence[int] = (),
        command: Sequence[str] = WORKER_COMMAND,
        temporary_root: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`temporary_root`: where the child and its compilers get a temporary folder, which goes with them."""
        self._temporary_root = temporary_root
        self._spec = spec
        self._limits = limits
        self._on_event = on_event
        self._on_tick = on_tick
        self._pacer = pacer
        self._starvation = starvation
        self._descriptors = tuple(descriptors)
        self._command = tuple(command)
        self._clock = clock
        self._cancelled = threading.Event()
        self._cancel_reason = ""
        self._cancel_cause: JobCause = "cancelled"
        self.pid: int | None = None
        self.num_turns = 1
        """Children that take turns on this thread: none may wait for long then."""
        self.held = False
        """Whether it is to stand still, for the sake of another's measurement."""
        self._watch: ChildProcess | None = None

    def cancel(self, reason: str, cause: JobCause = "cancelled") -> None:
        """End the child soon; from any thread, at any time. Who is first says why."""
        if not self._cancel_reason:
            self._cancel_reason, self._cancel_cause = reason, cause
        self._cancelled.set()

    @property
    def resident_bytes(self) -> int:
        """With all it started, as last seen."""
        return self._watch.resident_bytes if self._watch is not None else 0

    @property
    def is_timing(self) -> bool:
        """Whether it measures, and so steps aside by itself."""
        return self._watch is not None and self._watch.paces_itself

    def run(self) -> JobResult:
        """Take all steps, until the child's whole process group is gone."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: JobResult = end.value
                return result

    def steps(self) -> Generator[None, None, JobResult]:
        """Each waits a moment for the child, and looks after it; the child ends with them, also when they are closed
        early."""
        if self._cancelled.is_set():
            return JobResult("cancelled", self._cancel_reason, self._cancel_cause)
        with ExitStack() as stack:
            try:
                temporary = self._temporary_folder()
                stack.callback(shutil.rmtree, temporary, ignore_errors=True)
                stack.enter_context(_in_use(temporary))
            except OSError as problem:
                reason = f"no temporary folder for a tuning process: {problem.strerror or problem}"
                return JobResult("failed", reason, "start")
            try:
                running_time = stack.enter_context(RunningTime())
            except OSError as problem:
                return JobResult("failed", f"cannot start a tuning process: {problem.strerror or problem}", "start")
            return (yield from self._run_in(temporary, running_time))

    def _run_in(self, temporary: str, running_time: RunningTime) -> Generator[None, None, JobResult]:
        shared = running_time.descriptor
        try:
            spec = encode({**self._spec, "running_time": shared}, MAX_SPEC_BYTES)
        except Garbage as problem:
            return JobResult("failed", f"the job cannot be sent to a tuning process: {problem}", "start")
        try:
            watch = ChildProcess(self._command, spec, (*self._descriptors, shared), temporary, self._clock)
            idle_priority = self._starvation is not None and group.give_idle_priority(watch.pid)
        except OSError as problem:
            return JobResult("failed", f"cannot start a tuning process: {problem.strerror or problem}", "start")
        self.pid, self._watch = watch.pid, watch
        try:
            if idle_priority:
                return (yield from self._supervise(watch, running_time, None, self._starvation))
            return (yield from self._supervise(watch, running_time, self._pacer, None))
        finally:
            watch.close()

    def _temporary_folder(self) -> str:
        """A killed compiler cannot clean up behind itself, so it gets a folder that is removed with it."""
        root = self._temporary_root
        if root is not None and os.access(root, os.W_OK | os.X_OK) and has_room(root):
            return tempfile.mkdtemp(prefix="tuning-", dir=root)
        return tempfile.mkdtemp(prefix="hone-tuning-")

    def _supervise(
        self, watch: ChildProcess, running_time: RunningTime, pacer: Pacer | None, starvation: Starvation | None
    ) -> Generator[None, None, JobResult]:
        while True:
            yield
            if self._cancelled.is_set():  # asked first: what it still says was meant for who asks no longer
                return watch.result("cancelled", self._cancel_reason, self._cancel_cause)
            tick = _TICK_SECONDS if pacer is None and self.num_turns == 1 else _PACED_TICK_SECONDS / self.num_turns
            ended = watch.has_ended()  # asked first: then all it ever wrote is in its pipes
            try:
                for event in watch.poll(0.0 if ended else tick):
                    self._on_event(event)
            except Garbage as problem:
                return watch.result("failed", f"the tuning process wrote garbage: {problem}", "garbage")
            if watch.last_word is not None and (ended or watch.lingers()):
                return watch.verdict()
            if ended:
                return watch.death()
            self._on_tick()
            if self._cancelled.is_set():
                return watch.result("cancelled", self._cancel_reason, self._cancel_cause)
            reason, cause = watch.exceeded(self._limits)
            running_time.tell(watch.running_seconds())
            if reason:
                return watch.result("failed", reason, cause)
            if starvation is not None and starvation.step(*watch.ran_and_waited):
                return watch.result("starved", "others kept every processor busy", "starved")
            pause = pacer is not None and pacer.step(self._clock()) and not watch.paces_itself
            watch.set_paused((pause or self.held) and watch.last_word is None)


@contextmanager
def _in_use(temporary: str) -> Iterator[None]:
    """Locked as the cache's own staging folders are, so that none who sweeps those takes it for a dead one's."""
    lock = os.open(Path(temporary, STAGING_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
