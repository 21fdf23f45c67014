"""Does anybody notice? Latency before, during and after tuning, and across swaps: `make bench-swap`.

An open loop (requests are sent when they are due, whether or not earlier ones were answered; latency counts from when a
request was due) at 25, 50 and 75 % of what one closed loop of eight connections gets through, against a server that
does not tune, one that tunes the same model, the tuned one, and one that is swapped back and forth all the time.
Prints p50, p99 and the slowest, the number of failed requests, and how long tuning took beside each load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.bench import hone_command, note
from benchmarks.processes import ROOT, Child, child, free_ports
from benchmarks.report import describe_machine

MODEL = "digits"
LOADS = (0.25, 0.5, 0.75)
NUM_CONNECTIONS = 8
RESULTS = ROOT / "benchmarks" / "results" / "swap.json"


@dataclass(frozen=True)
class Latencies:
    """Microseconds, over all requests of a phase."""

    num_requests: int
    num_failed: int
    p50: float
    p99: float
    slowest: float

    @classmethod
    def of(cls, seconds: list[float], num_failed: int) -> Latencies:
        p50, p99, slowest = (float(value) * 1e6 for value in np.percentile(seconds or [0.0], (50, 99, 100)))
        return cls(len(seconds), num_failed, p50, p99, slowest)


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


async def open_loop(client: Client, rate: float, until: Callable[[float], Awaitable[bool]]) -> Latencies:
    """Send `rate` requests a second until `until(seconds so far)` is true."""
    took: list[float] = []
    num_failed = 0
    tasks: set[asyncio.Task[None]] = set()
    generator = np.random.default_rng(1)
    began = time.perf_counter()
    due = began

    async def one(due: float) -> None:
        nonlocal num_failed
        try:
            good = await client.ask()
        except (OSError, asyncio.IncompleteReadError):
            good = False
        took.append(time.perf_counter() - due)
        num_failed += not good

    while not await until(time.perf_counter() - began):
        slice_end = time.perf_counter() + 0.25
        while due < slice_end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(one(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += float(generator.exponential(1 / rate))
    await asyncio.gather(*tasks)
    return Latencies.of(took, num_failed)


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


@contextlib.contextmanager
def server(repository: Path, *flags: str) -> Any:
    ports = free_ports(3)
    command = [part for part in hone_command(repository, ports) if part != "--tuning=off"]
    process: Child
    with child("hone", [*command, *flags]) as process:
        process.wait_ready(ports[0])
        yield ports[0]


async def measure(folder: Path, seconds: float) -> dict[str, Any]:
    repository = folder / "models"
    shutil.copytree(ROOT / "model_repo" / MODEL, repository / MODEL)
    told: dict[str, Any] = {"phases": {}}

    async def phase(name: str, port: int, rate: float, until: Callable[[float], Awaitable[bool]]) -> None:
        client = Client(port)
        await client.open()
        began = time.perf_counter()
        result = await open_loop(client, rate, until)
        client.close()
        told["phases"][name] = {**vars(result), "seconds": time.perf_counter() - began}
        note(
            f"{name:28s} {result.num_requests:7d} requests, {result.num_failed} failed, p50 {result.p50:7.0f} us,"
            f" p99 {result.p99:8.0f} us, slowest {result.slowest:8.0f} us"
        )

    async def for_a_while(elapsed: float) -> bool:
        return elapsed >= seconds

    with server(repository, "--tuning=off") as port:
        client = Client(port)
        await client.open()
        await capacity(client, 0.5)
        full = told["capacity"] = await capacity(client, 3.0)
        client.close()
        note(f"capacity {full:,.0f} requests/s")
        for load in LOADS:
            await phase(f"{load:.0%} before", port, load * full, for_a_while)
    began = time.perf_counter()
    with server(repository, "--tuning=on", f"--kernels-cache={folder / 'idle'}") as port:
        await wait_for(lambda: settled(port), 600)
    told["idle_tuning_seconds"] = time.perf_counter() - began
    note(f"tuning beside no load takes {told['idle_tuning_seconds']:.1f} s")
    for load in LOADS:
        with server(repository, "--tuning=on", f"--kernels-cache={folder / f'{load}'}") as port:

            async def over(elapsed: float, port: int = port) -> bool:
                return elapsed > 300 or await settled(port)

            await phase(f"{load:.0%} during", port, load * full, over)
            await phase(f"{load:.0%} after", port, load * full, for_a_while)
    with server(repository, "--tuning=cache", f"--kernels-cache={folder / 'idle'}") as port:
        await wait_for(lambda: tuned(port), 60)
        for load in LOADS:
            swapping = asyncio.create_task(swap_for_ever(port, told))
            await phase(f"{load:.0%} swapping", port, load * full, for_a_while)
            swapping.cancel()
    return told


async def swap_for_ever(port: int, told: dict[str, Any]) -> None:
    while True:
        for action in ("pin_baseline", "start"):
            await asyncio.to_thread(call, port, action)
            await asyncio.sleep(0.25)
            told["num_swaps"] = told.get("num_swaps", 0) + 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase but tuning itself")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hone-bench-swap-") as folder:
        told = uvloop.run(measure(Path(folder), arguments.seconds))
    for load in LOADS:
        before, during = (told["phases"][f"{load:.0%} {name}"] for name in ("before", "during"))
        print(
            f"{load:.0%} load: p99 while tuning {during['p99'] / before['p99']:.2f} x without (bar 1.25 at 50 %);"
            f" tuning took {during['seconds'] / told['idle_tuning_seconds']:.2f} x its idle time (bar 3)"
        )
    told |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    arguments.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
