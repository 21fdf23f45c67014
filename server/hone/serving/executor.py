"""Executor threads: where engines run.

One thread per instance of a model version, started at first use and ended after some idle time, so that a thousand
idle models cost no threads. Work comes in through one queue; finished work goes back through `Completions`. Only what
is over sooner than it could be handed over is run on the loop itself (see `brief`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from hone.specialization import CPU, DEVICE_ORDINAL, ActivityMeter, RunningMarks
from hone.types import Array

_log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0


class BatchBuffers:
    """Reused, 64-byte-aligned memory in which one executor thread assembles batches, one buffer per input.

    Reuse right after the run is safe because engines return arrays that do not overlap their inputs.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def get(self, name: str, num_bytes: int) -> Array:
        """A uint8 array of `num_bytes`, valid until the next call for the same name."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < num_bytes:
            buffer = self._buffers[name] = aligned_empty(num_bytes)
        return buffer[:num_bytes]


class ThreadState:
    """What one thread that runs engines owns. Made on that thread, and closed by it."""

    __slots__ = ("_cell", "_marks", "buffers", "device", "is_loop")

    def __init__(self, device: str = CPU, marks: RunningMarks | None = None, *, is_loop: bool = False) -> None:
        self.buffers = BatchBuffers()
        self.is_loop = is_loop
        """Whether it is the event loop's thread, which runs brief executions."""
        self.device = device
        """The kind of device that the thread's executions run on."""
        self._marks = marks
        self._cell = marks.claim() if marks is not None else 0

    def note(self, mark: int) -> None:
        """Remember, also over a crash, that the thread runs the specialization of this mark; 0 for none."""
        if self._marks is not None:
            self._marks.cells[self._cell] = mark

    def close(self) -> None:
        if self._marks is not None:
            self._marks.release(self._cell)


class Execution(Protocol):
    """One run of an engine, for one request or a batch."""

    def run(self, thread: ThreadState) -> None:
        """Do the work, on an executor thread. Failures are kept in the execution; nothing is raised."""

    def deliver(self) -> None:
        """Hand the results out, on the event loop."""


class Completions:
    """The way back from executor threads to the event loop, one for all executors of a loop.

    Threads call `put`, everything else happens on the loop. One wake-up serves all that finished since the last: a
    wake-up costs more than a small inference. It goes through an eventfd because writing to one lets go of the
    interpreter lock: the loop wakes to a free lock (6 µs there and back, against 34 µs through call_soon_threadsafe).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._finished: deque[Callable[[], None]] = deque()
        self._wake_pending = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._descriptor, self._deliver)

    def put(self, deliver: Callable[[], None]) -> None:
        """Have `deliver` called on the loop, in the order of the calls of `put`."""
        self._finished.append(deliver)
        if not self._wake_pending:
            self._wake_pending = True
            os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Call when no executor runs any more, or when the process is about to end."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _deliver(self) -> None:
        os.eventfd_read(self._descriptor)
        # The flag falls before the queue is emptied: a thread that finishes meanwhile asks for a wake-up of its own.
        self._wake_pending = False
        finished = self._finished
        while finished:
            deliver = finished.popleft()
            try:
                deliver()
            except Exception:
                _log.exception("delivering results failed")


class DeviceExecutor:
    """The executor threads of one model version.

    All methods are called on the event loop, and so is `deliver` of each execution. Threads only take work out of the
    inbox: when they start and end is decided on the loop, so that nothing needs a lock.
    """

    def __init__(
        self,
        name: str,
        num_instances: int,
        completions: Completions,
        idle_seconds: float = IDLE_SECONDS,
        activity: ActivityMeter | None = None,
        devices: Sequence[tuple[str, int]] = (),
        marks: RunningMarks | None = None,
    ) -> None:
        """`devices` are those that the instances run on, one for each, as the kind of device and its ordinal; all on
        the CPU without."""
        self.name = name
        self._devices = tuple(devices) or ((CPU, 0),) * num_instances
        self._marks = marks
        self.num_instances = num_instances
        self.num_threads = 0
        self._completions = completions
        self._activity = activity
        self._loop = asyncio.get_running_loop()
        self._idle_seconds = idle_seconds
        self._inbox: deque[Execution | None] = deque()
        # Counts the inbox's items; each read takes one. There is one while there are threads.
        self._descriptor = -1
        self._num_outstanding = 0
        self._last_use = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._closed = False
        self._ended = asyncio.Event()
        self._here: ThreadState | None = None
        """The loop's own, once it has run something."""

    def submit(self, execution: Execution, *, is_brief: bool = False) -> None:
        """A brief one is run and delivered before this returns, whatever the threads are at; for executors on the CPU
        only."""
        if self._closed:
            raise RuntimeError(f"executor of {self.name} is closed")
        self._num_outstanding += 1
        if self._activity is not None:
            self._activity.started()
        if is_brief:
            self._run_here(execution)
            return
        self._inbox.append(execution)
        if not self._ending:
            self._wake()

    async def close(self) -> None:
        """Finish what was submitted, then end the threads. Waits as long as the engine does; may be cancelled."""
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        while self.num_threads:  # more than once where work had come while they were ending
            self._ended.clear()
            if not self._ending:
                self._end_threads()
            await self._ended.wait()
        if self._here is not None:
            self._here.close()
            self._here = None

    def _run_here(self, execution: Execution) -> None:
        if self._here is None:
            self._here = ThreadState(CPU, self._marks, is_loop=True)
        self._attempt(execution, self._here)
        self._finish(execution)

    def _attempt(self, execution: Execution, thread: ThreadState) -> None:
        try:
            execution.run(thread)
        except BaseException:  # a fault of hone: the execution reports it to its requests when delivered
            _log.exception("execution of %s broke its contract", self.name)

    def _wake(self) -> None:
        """Have one more item of the inbox taken."""
        if self.num_threads < min(self._num_outstanding, self.num_instances):
            if not self.num_threads:
                self._descriptor = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
                self._watch_idleness()
            place = self._devices[self.num_threads]
            self.num_threads += 1
            threading.Thread(
                target=self._work, args=(self._descriptor, *place), name=f"execute {self.name}", daemon=True
            ).start()
        os.eventfd_write(self._descriptor, 1)

    def _work(self, descriptor: int, device: str, ordinal: int) -> None:
        """An executor thread. Threads begin with a context of their own, so that the ordinal is this one's alone."""
        DEVICE_ORDINAL.set(ordinal)
        state = ThreadState(device, self._marks)
        while True:
            os.eventfd_read(descriptor)
            execution = self._inbox.popleft()
            if execution is None:
                state.close()
                self._completions.put(self._thread_ended)
                return
            self._attempt(execution, state)
            self._completions.put(partial(self._finish, execution))
            del execution

    def _finish(self, execution: Execution) -> None:
        self._num_outstanding -= 1
        if self._activity is not None:
            self._activity.finished()
        if not self._num_outstanding:
            self._last_use = self._loop.time()
        execution.deliver()

    def _watch_idleness(self) -> None:
        self._idle_timer = None
        if self._closed or self._ending:
            return
        left = self._idle_seconds
        if self.num_threads and not self._num_outstanding:
            left -= self._loop.time() - self._last_use
            if left <= 0:
                self._end_threads()
                return
        self._idle_timer = self._loop.call_later(left, self._watch_idleness)

    def _end_threads(self) -> None:
        self._ending = True
        self._inbox.extend([None] * self.num_threads)
        os.eventfd_write(self._descriptor, self.num_threads)

    def _thread_ended(self) -> None:
        self.num_threads -= 1
        if self.num_threads:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._ending = False
        self._ended.set()
        for _ in range(len(self._inbox)):  # what was submitted while the threads were ending
            self._wake()


def aligned_empty(num_bytes: int, alignment: int = 64) -> Array:
    """An uninitialised uint8 array whose first byte is aligned: what TVM and vector loads want."""
    block = np.empty(num_bytes + alignment, dtype=np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + num_bytes]
