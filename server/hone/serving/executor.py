"""Executor threads: the only place where engines run.

One thread per instance of a model version, started at first use and ended after some idle time, so that a thousand
idle models cost no threads. Work comes in through one queue; finished work goes back to the event loop in bunches, one
wake-up for all that finished since the last (a wake-up costs more than a small inference).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from hone.types import Array, Engine, EngineInstance

_log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
#: How long results may wait for those of further requests that are in the queue already.
BUNCH_NS = 100_000


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
    """What one executor thread owns: its batch buffers and its instance of each engine it has run."""

    __slots__ = ("_instances", "buffers")

    def __init__(self) -> None:
        self.buffers = BatchBuffers()
        self._instances: dict[int, tuple[Engine, EngineInstance]] = {}

    def instance(self, engine: Engine) -> EngineInstance:
        held = self._instances.get(id(engine))
        if held is None:
            held = self._instances[id(engine)] = (engine, engine.instantiate())
        return held[1]


class Execution(Protocol):
    """One run of an engine, for one request or a batch."""

    def run(self, thread: ThreadState) -> None:
        """Do the work, on an executor thread. Failures are kept in the execution; nothing is raised."""

    def deliver(self) -> None:
        """Hand the results out, on the event loop."""


class DeviceExecutor:
    """The executor threads of one model version.

    `submit` and `close` are called on the event loop; `deliver` of each execution is called there too.
    """

    def __init__(
        self, name: str, num_instances: int, loop: asyncio.AbstractEventLoop, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.name = name
        self.num_instances = num_instances
        self._loop = loop
        self._idle_seconds = idle_seconds
        self._inbox: SimpleQueue[Execution | None] = SimpleQueue()
        self._finished: deque[Execution] = deque()
        self._wake_pending = False
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._num_outstanding = 0
        self._closed = False
        self._ended = asyncio.Event()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def submit(self, execution: Execution) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"executor of {self.name} is closed")
            self._num_outstanding += 1
            self._inbox.put(execution)
            if len(self._threads) < min(self._num_outstanding, self.num_instances):
                thread = threading.Thread(target=self._work, name=f"execute {self.name}", daemon=True)
                self._threads.add(thread)
                thread.start()

    async def close(self) -> None:
        """Finish what was submitted, then end the threads. Waits as long as the engine does; may be cancelled."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._inbox.put(None)
        if threads:
            await self._ended.wait()
        self._deliver_finished()

    def _work(self) -> None:
        state = ThreadState()
        bunch_end_ns = 0
        while True:
            try:
                execution = self._inbox.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if not self._inbox.empty():
                        continue
                    self._threads.discard(threading.current_thread())
                    return
            if execution is None:
                self._end_thread()
                return
            if not self._finished:
                bunch_end_ns = time.monotonic_ns() + BUNCH_NS
            try:
                execution.run(state)
            except BaseException:  # a fault of hone: the execution reports it to its requests when delivered
                _log.exception("execution of %s broke its contract", self.name)
            self._finished.append(execution)
            del execution
            if not self._wake_pending and (self._inbox.empty() or time.monotonic_ns() > bunch_end_ns):
                self._wake_pending = True
                self._loop.call_soon_threadsafe(self._deliver_finished)

    def _end_thread(self) -> None:
        with self._lock:
            self._threads.discard(threading.current_thread())
            last = not self._threads
        if last:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                self._loop.call_soon_threadsafe(self._ended.set)

    def _deliver_finished(self) -> None:
        # The flag falls before the queue is emptied: a thread that finishes meanwhile asks for a wake-up of its own.
        self._wake_pending = False
        finished = self._finished
        while finished:
            execution = finished.popleft()
            self._num_outstanding -= 1
            execution.deliver()


def aligned_empty(num_bytes: int, alignment: int = 64) -> Array:
    """An uninitialised uint8 array whose first byte is aligned: what TVM and vector loads want."""
    block = np.empty(num_bytes + alignment, dtype=np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + num_bytes]
