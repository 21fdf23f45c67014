"""What the benchmark of tuning beside load counts and says; not what it measures."""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import psutil
import pytest

from benchmarks.open_loop import Arrivals, Latencies, Processors, open_loop
from benchmarks.swap import Turns, signal_tuning, verdicts


def told(p99_while_tuning: float, tuning_seconds: float, finished: bool = True) -> dict[str, Any]:
    found = {
        "before": {"p99": 800.0},
        "stopped": {"p99": 1000.0},
        "during": {"p99": p99_while_tuning},
        "spinner": {"p99": 1100.0},
        "memory": {"p99": 1500.0},
        "tuning_seconds": tuning_seconds,
        "finished": finished,
    }
    return {"idle_tuning_seconds": 10.0, "loads": {"25%": dict(found), "50%": found}}


@pytest.mark.parametrize(
    ("p99", "seconds", "finished", "words"),
    [
        (
            1200.0,
            25.0,
            True,
            ["1.20 x while it is stopped (bar 1.25: met), 1.50 x before", "took 2.50 x its idle time (bar 3: met)"],
        ),
        (
            1300.0,
            35.0,
            True,
            ["1.30 x while it is stopped (bar 1.25: MISSED)", "took 3.50 x its idle time (bar 3: MISSED)"],
        ),
        (1000.0, 25.0, False, ["took more than 2.50 x its idle time (bar 3: MISSED)"]),
    ],
)
def test_ratios_are_held_against_the_bars_at_half_load_only(p99, seconds, finished, words):
    lines = verdicts(told(p99, seconds, finished))
    assert "bar" not in lines[0]
    for word in words:
        assert word in lines[1]
    assert "beside a spinner 1.38 x, a writer of memory 1.88 x" in lines[1]


def test_latency_counts_from_when_a_request_was_due():
    class Slow:
        """Answers one request at a time, each in 20 ms."""

        def __init__(self) -> None:
            self.lock = asyncio.Lock()
            self.num_asked = 0

        async def ask(self) -> bool:
            async with self.lock:
                await asyncio.sleep(0.02)
                self.num_asked += 1
                return self.num_asked != 2

    async def over(elapsed: float) -> bool:
        return elapsed >= 0.3

    took: list[float] = []
    client = Slow()
    keep = lambda due, seconds: took.append(seconds)  # noqa: E731
    num_failed, seconds = asyncio.run(open_loop(client, 200.0, over, keep))  # type: ignore[arg-type]
    assert len(took) == client.num_asked > 10
    assert num_failed == 1
    assert seconds >= 0.3
    assert max(took) >= 10 * 0.02, "they queue behind each other, and that counts"


def test_percentiles_are_of_all_requests_in_microseconds():
    found = Latencies.of([i / 1000 for i in range(1, 101)], 3, 2.0, 0.25)
    assert (found.num_requests, found.num_failed) == (100, 3)
    assert found.p50 == pytest.approx(50_500)
    assert found.slowest == pytest.approx(100_000)
    assert "3 failed" in str(found)
    assert "others took 25% of the machine" in str(found)


def test_what_the_server_takes_is_not_others():
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        processors = Processors(psutil.Process(process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        used, own = processors.used()
        process.communicate("\n")
    assert own >= 0.45
    assert used > own


def test_arrivals_come_at_their_rate_and_never_early():
    due: list[tuple[float, float]] = []

    async def run() -> None:
        arrivals = Arrivals(1000.0, lambda when: due.append((when, time.monotonic())))
        arrivals.start()
        await asyncio.sleep(0.5)
        arrivals.stop()

    asyncio.run(run())
    gaps = [after - before for (before, _), (after, _) in pairwise(due)]
    assert 350 < len(due) < 650
    assert statistics.mean(gaps) == pytest.approx(0.001, rel=0.2)
    assert statistics.stdev(gaps) == pytest.approx(0.001, rel=0.3), "exponential: as much spread as mean"
    assert all(handed >= when for when, handed in due)


def test_requests_belong_to_the_turn_in_which_they_were_due():
    turns, first, second = Turns(), [], []
    early = time.monotonic()
    turns.begin(first)
    within = time.monotonic()
    turns.begin(second)
    turns.keep(time.monotonic(), 3.0)
    turns.keep(within, 2.0)  # answered after the turn had ended
    turns.keep(early, 1.0)
    assert (first, second) == ([2.0], [3.0])


def test_only_tuning_processes_are_stopped():
    wait = "import sys; print(flush=True); sys.stdin.read()"
    parent = f"""
import subprocess, sys
wait = {wait!r}
flags = dict(process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
children = [subprocess.Popen([sys.executable, "-c", wait, *more], **flags) for more in (["hone.tuning.worker"], [])]
for child in children: child.stdout.readline()
print(*(child.pid for child in children), flush=True)
sys.stdin.read()
for child in children: child.stdin.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        worker, other = (psutil.Process(int(pid)) for pid in it.stdout.readline().split())
        signal_tuning(psutil.Process(it.pid), signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while worker.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert other.status() != psutil.STATUS_STOPPED
        signal_tuning(psutil.Process(it.pid), signal.SIGCONT)
        it.communicate("", timeout=30)
