"""Does anybody notice? Latency before, during and after tuning, and across swaps: `make bench-swap`.

An open loop (requests are sent when they are due, whether or not earlier ones were answered; latency counts from when a
request was due) at 25, 50 and 75 % of what one closed loop of eight connections gets through, against a server that
does not tune, one that tunes the same model, the tuned one, and one that is swapped back and forth all the time.
"Before" is measured on both sides of "during", so that a machine that changes meanwhile does not look like tuning.
Prints p50, p99 and the slowest, the number of failed requests, how long tuning took beside each load, and what share
of the machine others took meanwhile. Ends within eight minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.bench import hone_command, note
from benchmarks.processes import ROOT, Child, child, free_ports
from benchmarks.report import describe_machine

MODEL = "digits"
LOADS = (0.25, 0.5, 0.75)
NUM_CONNECTIONS = 8
#: Bars at 50 % load p99 while tuning, and how long tuning takes, against the same without the other.
P99_BAR, DURATION_BAR = 1.25, 3.0
#: Tuning beside a load is watched for so many times its idle time, and so many seconds, at most.
MAX_DURATION, MAX_TUNING_SECONDS = 3.2, 100.0
#: What is not answered so long after a phase has failed: the server was given more than it can do.
DRAIN_SECONDS = 5.0
RESULTS = ROOT / "benchmarks" / "results" / "swap.json"


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

    A thread keeps the time: timers of event loops come in whole milliseconds, and would send requests in bursts.
    """

    def __init__(self, rate: float, send: Callable[[float], None]) -> None:
        self._rate = rate
        self._send = send
        self._due: deque[float] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_time, name="arrivals", daemon=True)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._descriptor, self._hand_over)
        self._thread.start()

    def stop(self) -> None:
        """All that was due before is handed over."""
        self._stopping.set()
        self._thread.join()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        while self._due:
            self._send(self._due.popleft())

    def _keep_time(self) -> None:
        generator = np.random.default_rng(1)
        due = time.perf_counter()
        while not self._stopping.is_set():
            due += float(generator.exponential(1 / self._rate))
            time.sleep(max(0.0, due - time.perf_counter()))
            self._due.append(due)
            os.eventfd_write(self._descriptor, 1)

    def _hand_over(self) -> None:
        os.eventfd_read(self._descriptor)
        while self._due:
            self._send(self._due.popleft())


async def open_loop(
    client: Client, rate: float, until: Callable[[float], Awaitable[bool]], took: list[float]
) -> tuple[int, float]:
    """Send `rate` requests a second until `until(seconds so far)` is true. Adds the seconds that each took; returns how
    many failed, and how long it went on."""
    num_failed = 0
    tasks: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        nonlocal num_failed
        try:
            good = await client.ask()
        except (OSError, asyncio.IncompleteReadError):
            good = False
        took.append(time.perf_counter() - due)
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


def call(port: int, action: str | None = None) -> dict[str, Any]:
    """The tuning status, after an action if one is given."""
    data = None if action is None else json.dumps({"action": action}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/{MODEL}/tuning", data)
    with urllib.request.urlopen(request, timeout=30) as answer:
        told: dict[str, Any] = json.loads(answer.read())
        return told


async def settled(port: int) -> bool:
    return (await asyncio.to_thread(call, port))["state"] not in ("queued", "tuning")


async def tuned(port: int) -> bool:
    told = await asyncio.to_thread(call, port)
    return any(bucket["engine"] == "tvm" for bucket in told["buckets"])


async def wait_for(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            raise TimeoutError("the server did not get there in time")
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Running:
    """A server under test."""

    port: int
    process: psutil.Process


@contextlib.contextmanager
def server(repository: Path, *flags: str) -> Iterator[Running]:
    ports = free_ports(3)
    command = [part for part in hone_command(repository, ports) if part != "--tuning=off"]
    process: Child
    with child("hone", [*command, *flags]) as process:
        process.wait_ready(ports[0])
        yield Running(ports[0], psutil.Process(process.process.pid))


async def phase(
    running: Running, rate: float, until: Callable[[float], Awaitable[bool]], took: list[float]
) -> Latencies:
    """Load until `until(seconds so far)`; `took` may hold what the same phase measured earlier."""
    client = Client(running.port)
    await client.open()
    processors = Processors(running.process)
    num_failed, seconds = await open_loop(client, rate, until, took)
    client.close()
    return Latencies.of(took, num_failed, seconds, processors.others())


def lasting(seconds: float) -> Callable[[float], Awaitable[bool]]:
    async def over(elapsed: float) -> bool:
        return elapsed >= seconds

    return over


async def find_capacity(repository: Path) -> float:
    with server(repository, "--tuning=off") as running:
        client = Client(running.port)
        await client.open()
        await capacity(client, 0.5)
        full = await capacity(client, 3.0)
        client.close()
        return full


async def idle_tuning(repository: Path, cache: Path) -> float:
    """Seconds from the server's start to the end of tuning, beside no load; fills the cache."""
    began = time.perf_counter()
    with server(repository, "--tuning=on", f"--kernels-cache={cache}") as running:
        await wait_for(lambda: settled(running.port), 300)
        return time.perf_counter() - began


async def beside(repository: Path, cache: Path, rate: float, seconds: float, limit: float) -> dict[str, Any]:
    """One load: without tuning, while tuning (`limit` seconds at most), after it, and without it again."""
    before: list[float] = []

    async def without() -> Latencies:
        with server(repository, "--tuning=off") as running:
            return await phase(running, rate, lasting(seconds / 2), before)

    first = await without()
    began = time.perf_counter()
    with server(repository, "--tuning=on", f"--kernels-cache={cache}") as running:

        async def over(elapsed: float) -> bool:
            return elapsed > limit or await settled(running.port)

        during = await phase(running, rate, over, [])
        tuning_seconds = time.perf_counter() - began
        finished = await settled(running.port)
        buckets = call(running.port)["buckets"]
        after = await phase(running, rate, lasting(seconds), [])
    second = await without()
    pooled = Latencies.of(
        before,
        first.num_failed + second.num_failed,
        first.seconds + second.seconds,
        (first.others + second.others) / 2,
    )
    return {
        "before": pooled,
        "during": during,
        "after": after,
        "tuning_seconds": tuning_seconds,
        "finished": finished,
        "buckets": buckets,
    }


async def swapping(repository: Path, cache: Path, rates: dict[str, float], seconds: float) -> dict[str, Any]:
    """The tuned server, swapped back and forth under each load."""
    told: dict[str, Any] = {}
    with server(repository, "--tuning=cache", f"--kernels-cache={cache}") as running:
        await wait_for(lambda: tuned(running.port), 60)
        for name, rate in rates.items():
            swaps = [0]
            task = asyncio.create_task(swap_for_ever(running.port, swaps))
            told[name] = await phase(running, rate, lasting(seconds), []), swaps[0]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return told


async def swap_for_ever(port: int, swaps: list[int]) -> None:
    while True:
        for action in ("pin_baseline", "start"):
            await asyncio.to_thread(call, port, action)
            await asyncio.sleep(0.25)
            swaps[0] += 1


async def measure(folder: Path, seconds: float, loads: Sequence[float]) -> dict[str, Any]:
    repository = folder / "models"
    shutil.copytree(ROOT / "model_repo" / MODEL, repository / MODEL)
    full = await find_capacity(repository)
    note(f"capacity {full:,.0f} requests/s")
    idle = await idle_tuning(repository, folder / "idle")
    note(f"tuning beside no load takes {idle:.1f} s")
    told: dict[str, Any] = {"model": MODEL, "capacity": full, "idle_tuning_seconds": idle, "loads": {}}
    for load in loads:
        found = await beside(
            repository, folder / f"{load}", load * full, seconds, min(MAX_DURATION * idle, MAX_TUNING_SECONDS)
        )
        for name in ("before", "during", "after"):
            note(f"{load:4.0%} {name:9s} {found[name]}")
            found[name] = vars(found[name])
        told["loads"][f"{load:.0%}"] = found
    try:
        swapped = await swapping(repository, folder / "idle", {f"{load:.0%}": load * full for load in loads}, seconds)
    except TimeoutError:
        told["not_swapped"] = "nothing was promoted from the cache within 60 s"
        note(f"swapping was not measured: {told['not_swapped']}")
        swapped = {}
    for name, (latencies, num_swaps) in swapped.items():
        note(f"{name:>4s} swapping  {latencies}, {num_swaps} swaps")
        told["loads"][name] |= {"swapping": vars(latencies), "num_swaps": num_swaps}
    return told


def verdicts(told: dict[str, Any]) -> list[str]:
    """The lines that compare with the bars."""
    lines = []
    for name, found in told["loads"].items():
        ratio = found["during"]["p99"] / found["before"]["p99"]
        longer = found["tuning_seconds"] / told["idle_tuning_seconds"]
        found |= {"p99_ratio": ratio, "duration_ratio": longer}
        more = "" if found["finished"] else "more than "
        in_time = found["finished"] and longer <= DURATION_BAR
        met = ("", "") if name != "50%" else (_met(ratio <= P99_BAR, P99_BAR), _met(in_time, DURATION_BAR))
        lines.append(
            f"{name:>4s} load: p99 while tuning {ratio:.2f} x without{met[0]};"
            f" tuning took {more}{longer:.2f} x its idle time{met[1]}"
        )
    return lines


def _met(met: bool, bar: float) -> str:
    return f" (bar {bar:g}: {'met' if met else 'MISSED'})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase but tuning itself (default: 8)")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="shares of the capacity")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/swap.json, if complete)")
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="hone-bench-swap-") as folder:
        told = uvloop.run(measure(Path(folder), arguments.seconds, arguments.loads))
    print("\n".join(verdicts(told)))
    output = arguments.output or (RESULTS if tuple(arguments.loads) == LOADS else None)
    if output is not None:
        output.write_text(json.dumps({**machine, **told}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
