"""An open loop against one model over HTTP: requests are sent when they are due, whether or not earlier ones were
answered, and latency counts from when a request was due. With how much of the machine others took meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import psutil

MODEL = "digits"
NUM_CONNECTIONS = 8
#: What is not answered so long after a phase has failed: the server was given more than it can do.
DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Latencies:
    """Microseconds, over all requests of a phase."""

    num_requests: int
    num_failed: int
    p50: float
    p99: float
    slowest: float
    seconds: float
    """How long the phase was."""
    others: float
    """Share of the machine's processors that neither the server, with all it started, nor this load took."""

    @classmethod
    def of(cls, took: list[float], num_failed: int, seconds: float, others: float) -> Latencies:
        p50, p99, slowest = (float(value) * 1e6 for value in np.percentile(took or [0.0], (50, 99, 100)))
        return cls(len(took), num_failed, p50, p99, slowest, seconds, others)

    def __str__(self) -> str:
        return (
            f"{self.num_requests:7d} requests, {self.num_failed} failed, p50 {self.p50:6.0f} us,"
            f" p99 {self.p99:7.0f} us, slowest {self.slowest:8.0f} us, {self.seconds:5.1f} s,"
            f" others took {self.others:.0%} of the machine"
        )


class Processors:
    """Who uses them: seconds in all, and of one server with everything it started and this process."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._began = (time.perf_counter(), *self.used())

    def used(self) -> tuple[float, float]:
        """Seconds so far: in all since the machine's start, and by the server and this process."""
        times = psutil.cpu_times()
        own = 0.0
        for process in (psutil.Process(), self._server, *self._server.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system
                if process != psutil.Process():
                    own += used.children_user + used.children_system
        return sum(times) - times.idle - times.iowait - getattr(times, "guest", 0) - getattr(
            times, "guest_nice", 0
        ), own

    def others(self) -> float:
        """Share of the machine that the rest took since this was made."""
        began, all_before, own_before = self._began
        all_now, own_now = self.used()
        taken = (all_now - all_before) - (own_now - own_before)
        return max(0.0, taken / (time.perf_counter() - began) / (psutil.cpu_count() or 1))


class Client:
    """Keep-alive connections that send one prepared request each time."""

    def __init__(self, port: int) -> None:
        image = np.random.default_rng(0).random((1, 1, 8, 8), np.float32)
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": "image",
                        "shape": [1, 1, 8, 8],
                        "datatype": "FP32",
                        "parameters": {"binary_data_size": image.nbytes},
                    }
                ]
            }
        ).encode()
        body = head + image.tobytes()
        self._port = port
        self._request = (
            f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
        ).encode() + body
        self._free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def open(self) -> None:
        for _ in range(NUM_CONNECTIONS):
            self._free.put_nowait(await asyncio.open_connection("127.0.0.1", self._port))

    async def ask(self) -> bool:
        """Whether the answer was 200."""
        connection = await self._free.get()
        reader, writer = connection
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            return head.startswith(b"HTTP/1.1 200")
        finally:
            self._free.put_nowait(connection)

    def close(self) -> None:
        while not self._free.empty():
            self._free.get_nowait()[1].close()


async def capacity(client: Client, seconds: float) -> float:
    """Requests a second of a closed loop."""
    end = time.perf_counter() + seconds
    num_answered = 0

    async def loop() -> None:
        nonlocal num_answered
        while time.perf_counter() < end:
            await client.ask()
            num_answered += 1

    await asyncio.gather(*(loop() for _ in range(NUM_CONNECTIONS)))
    return num_answered / seconds


class Arrivals:
    """Due times of a Poisson process, each handed to `send` on the event loop when it comes.

    The kernel's timer keeps the time: timers of event loops come in whole milliseconds, and would send requests in
    bursts; a thread of its own would be one more that wants a processor.
    """

    def __init__(self, rate: float, send: Callable[[float], None]) -> None:
        self._rate = rate
        self._send = send
        self._generator = np.random.default_rng(1)
        self._due = 0.0
        self._timer = Timer()

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._timer.descriptor, self._hand_over)
        self._due = time.monotonic() + float(self._generator.exponential(1 / self._rate))
        self._timer.set(self._due)

    def stop(self) -> None:
        """All that was due before is handed over."""
        asyncio.get_running_loop().remove_reader(self._timer.descriptor)
        self._timer.close()
        self._hand_over_due()

    def _hand_over(self) -> None:
        self._timer.read()
        self._hand_over_due()
        self._timer.set(self._due)

    def _hand_over_due(self) -> None:
        now = time.monotonic()
        while self._due <= now:
            self._send(self._due)
            self._due += float(self._generator.exponential(1 / self._rate))


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Timer:
    """A descriptor that becomes readable at a time of the monotonic clock (timerfd; Python has it from 3.13 on)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()

    def set(self, seconds: float) -> None:
        value = self._spec.value
        value.seconds = int(seconds)
        value.nanoseconds = int((seconds - value.seconds) * 1e9)
        self._libc.timerfd_settime(self.descriptor, 1, ctypes.byref(self._spec), None)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 8)

    def close(self) -> None:
        os.close(self.descriptor)


async def open_loop(
    client: Client,
    rate: float,
    until: Callable[[float], Awaitable[bool]],
    keep: Callable[[float, float], None],
) -> tuple[int, float]:
    """Send `rate` requests a second until `until(seconds so far)` is true. `keep` hears of each when it was due, by the
    monotonic clock, and the seconds that it took. Returns how many failed, and how long it went on."""
    num_failed = 0
    tasks: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        nonlocal num_failed
        try:
            good = await client.ask()
        except (OSError, asyncio.IncompleteReadError):
            good = False
        keep(due, time.monotonic() - due)
        num_failed += not good

    def send(due: float) -> None:
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    arrivals = Arrivals(rate, send)
    began = time.perf_counter()
    arrivals.start()
    while not await until(time.perf_counter() - began):
        await asyncio.sleep(0.25)
    arrivals.stop()
    seconds = time.perf_counter() - began
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
        for task in left:
            task.cancel()
        num_failed += len(left)
    return num_failed, seconds
