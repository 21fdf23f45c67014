"""Does anybody notice? Latency before, during and after tuning, and across swaps: `make bench-swap`.

An open loop (requests are sent when they are due, whether or not earlier ones were answered; latency counts from when a
request was due) at 25, 50 and 75 % of what one closed loop of eight connections gets through, against a server that
does not tune, one that tunes the same model, the tuned one, and one that is swapped back and forth all the time. So
that what tuning costs can be told from what sharing a machine costs, also beside processes that know nothing of the
server, at the lowest priority, as tuning is.
"Before" is measured on both sides of "during", so that a machine that changes meanwhile does not look like tuning.
What tuning costs is told by the same seconds: the tuning processes are stopped for one second in three, and the ratio
is that of requests that were due while they ran to requests that were due while they stood still.
Prints p50, p99 and the slowest, the number of failed requests, how long tuning took beside each load, and what share
of the machine others took meanwhile. Takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.bench import hone_command, note
from benchmarks.open_loop import MODEL, Client, Latencies, Processors, capacity, open_loop
from benchmarks.processes import ROOT, Child, child, free_ports
from benchmarks.report import describe_machine

LOADS = (0.25, 0.5, 0.75)
#: Bars at 50 % load p99 while tuning, and how long tuning takes, against the same without the other.
P99_BAR, DURATION_BAR = 1.25, 3.0
#: Tuning beside a load is watched for so many times its idle time, and so many seconds, at most.
MAX_DURATION, MAX_TUNING_SECONDS = 3.2, 170.0
#: Seconds that tuning processes run, stand still, and get to come to rest before that counts.
RUN_SECONDS, STOP_SECONDS, SETTLE_SECONDS = 2.0, 1.0, 0.05
#: Neighbours: one computes within its registers, one writes memory beyond its caches, as compilers and searches do.
NEIGHBOURS = {
    "spinner": "while True: pass",
    "memory": "import numpy\nblock = numpy.zeros(64 << 20, numpy.uint8)\nwhile True: block[:] = 1",
}
RESULTS = ROOT / "benchmarks" / "results" / "swap.json"


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
    num_failed, seconds = await open_loop(client, rate, until, lambda due, one: took.append(one))
    client.close()
    return Latencies.of(took, num_failed, seconds, processors.others())


class Turns:
    """Which of several lists a request belongs to, by when it was due."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._lists: list[list[float]] = []

    def begin(self, took: list[float]) -> None:
        """What is due from now on belongs to this list."""
        self._begins.append(time.monotonic())
        self._lists.append(took)

    def keep(self, due: float, seconds: float) -> None:
        place = bisect_right(self._begins, due) - 1
        if place >= 0:
            self._lists[place].append(seconds)


@dataclass
class Interleaved:
    """Latencies while tuning processes ran, and while they stood still, and for how many seconds they ran."""

    during: Latencies
    stopped: Latencies
    running_seconds: float


def signal_tuning(server: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to the groups of the server's tuning processes."""
    for process in server.children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if "hone.tuning.worker" in process.cmdline():
                os.killpg(process.pid, number)


async def interleaved(running: Running, rate: float, limit: float) -> Interleaved:
    """Load until tuning has ended, or its processes ran for `limit` seconds."""
    client = Client(running.port)
    await client.open()
    processors = Processors(running.process)
    turns, moving, still = Turns(), [0.0], [0.0]
    during: list[float] = []
    stopped: list[float] = []
    between: list[float] = []  # coming to rest, and the first moments after
    ended = asyncio.Event()

    async def take_turns() -> None:
        while not ended.is_set() and moving[0] < limit and not await settled(running.port):
            turns.begin(during)
            began = time.monotonic()
            await asyncio.sleep(RUN_SECONDS)
            signal_tuning(running.process, signal.SIGSTOP)
            turns.begin(between)
            moving[0] += time.monotonic() - began
            try:
                await asyncio.sleep(SETTLE_SECONDS)
                turns.begin(stopped)
                began = time.monotonic()
                await asyncio.sleep(STOP_SECONDS)
                still[0] += time.monotonic() - began
                turns.begin(between)
            finally:
                signal_tuning(running.process, signal.SIGCONT)
        ended.set()

    async def over(elapsed: float) -> bool:
        return ended.is_set()

    task = asyncio.create_task(take_turns())
    num_failed, _ = await open_loop(client, rate, over, turns.keep)
    await task
    client.close()
    others = processors.others()
    return Interleaved(
        Latencies.of(during, num_failed, moving[0], others), Latencies.of(stopped, 0, still[0], others), moving[0]
    )


def lasting(seconds: float) -> Callable[[float], Awaitable[bool]]:
    async def over(elapsed: float) -> bool:
        return elapsed >= seconds

    return over


@contextlib.contextmanager
def computing(program: str) -> Iterator[None]:
    """A process beside the server that knows nothing of it, at the priority that tuning has: what sharing the machine
    with anything costs."""
    with child("neighbour", [sys.executable, "-c", program]) as neighbour:
        os.sched_setscheduler(neighbour.process.pid, os.SCHED_IDLE, os.sched_param(0))
        yield


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
    """One load: without tuning, while tuning (`limit` seconds at most), after it, without it beside other
    processes of its priority, and without any again."""
    before: list[float] = []

    async def without() -> Latencies:
        with server(repository, "--tuning=off") as running:
            return await phase(running, rate, lasting(seconds / 2), before)

    first = await without()
    began = time.perf_counter()
    with server(repository, "--tuning=on", f"--kernels-cache={cache}") as running:
        started = time.perf_counter() - began
        found = await interleaved(running, rate, limit)
        finished = await settled(running.port)
        buckets = call(running.port)["buckets"]
        after = await phase(running, rate, lasting(seconds), [])
    neighbours = {}
    for name, program in NEIGHBOURS.items():
        with server(repository, "--tuning=off") as running, computing(program):
            neighbours[name] = await phase(running, rate, lasting(seconds), [])
    second = await without()
    pooled = Latencies.of(
        before,
        first.num_failed + second.num_failed,
        first.seconds + second.seconds,
        (first.others + second.others) / 2,
    )
    return {
        "before": pooled,
        "during": found.during,
        "stopped": found.stopped,
        "after": after,
        **neighbours,
        "tuning_seconds": started + found.running_seconds,
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
        for name in ("before", "during", "stopped", "after", *NEIGHBOURS):
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
        ratio = found["during"]["p99"] / found["stopped"]["p99"]
        since = found["during"]["p99"] / found["before"]["p99"]
        longer = found["tuning_seconds"] / told["idle_tuning_seconds"]
        beside = {name: found[name]["p99"] / found["before"]["p99"] for name in NEIGHBOURS}
        found |= {
            "p99_ratio": ratio,
            "p99_ratio_before": since,
            "duration_ratio": longer,
            "neighbour_p99_ratios": beside,
        }
        more = "" if found["finished"] else "more than "
        in_time = found["finished"] and longer <= DURATION_BAR
        met = ("", "") if name != "50%" else (_met(ratio <= P99_BAR, P99_BAR), _met(in_time, DURATION_BAR))
        lines.append(
            f"{name:>4s} load: p99 while tuning runs {ratio:.2f} x while it is stopped{met[0]}, {since:.2f} x before;"
            f" beside a spinner {beside['spinner']:.2f} x, a writer of memory {beside['memory']:.2f} x;"
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
