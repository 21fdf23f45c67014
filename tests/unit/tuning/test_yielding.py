"""Threads of a tuning process yield while serving is busy: those that run, and only then."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hone.tuning import yielding
from hone.tuning.yielding import RunningThreads, ThreadTimers

#: A thread that computes, then waits for a signal whose handler returns: it comes only to threads with a timer.
WAIT = """
import ctypes, sys, threading, time
from hone.tuning.activity import Activity
from hone.tuning.yielding import give_way

started = time.monotonic()
busy = sys.argv[1] == "busy"
give_way(lambda: Activity(int(1e6 * time.monotonic()), int(1e6 * time.monotonic())) if busy else Activity(7, 7))
libc = ctypes.CDLL(None)

def work():
    while True:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        began = time.monotonic()
        libc.usleep(900_000)
        print("interrupted" if time.monotonic() - began < 0.8 else "slept", flush=True)

threading.Thread(target=work, daemon=True).start()
sys.stdin.read()
"""


class Interrupted:
    """A thread that counts how often a signal came to it."""

    def __init__(self) -> None:
        self.num = 0
        self.ended = False
        self.thread = threading.Thread(target=self._count, daemon=True)
        self.thread.start()

    def _count(self) -> None:
        libc = ctypes.CDLL(None)
        while not self.ended:
            libc.usleep(60_000_000)  # ended early by a signal
            self.num += 1

    def wait_for(self, num: int) -> None:
        deadline = time.monotonic() + 30
        while self.num < num:
            assert time.monotonic() < deadline, f"{self.num} signals came of {num}"
            time.sleep(0.005)


def test_signals_come_to_the_threads_that_are_kept_and_to_no_others():
    timers = ThreadTimers()
    chosen, other = Interrupted(), Interrupted()
    timers.keep(frozenset({chosen.thread.native_id}))
    chosen.wait_for(20)
    assert other.num == 0
    timers.keep(frozenset({other.thread.native_id}))
    other.wait_for(20)
    before = chosen.num
    other.wait_for(other.num + 20)
    assert chosen.num == before
    other.ended = True
    other.thread.join(30)
    timers.keep(frozenset())
    assert timers.threads == frozenset()


def test_threads_that_have_ended_get_no_timer():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    deadline = time.monotonic() + 30
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # Python's part of it ends a little earlier
        assert time.monotonic() < deadline
    timers = ThreadTimers()
    timers.keep(frozenset({thread.native_id}))
    assert timers.threads == frozenset()
    timers.keep(frozenset())


def test_the_timer_of_a_thread_that_ends_is_given_back():
    timers = ThreadTimers()
    for _ in range(3):
        one = Interrupted()
        timers.keep(frozenset({one.thread.native_id}))
        one.wait_for(1)
        one.ended = True
        one.thread.join(30)
        timers.keep(frozenset())
    assert timers.threads == frozenset()


def test_only_threads_that_run_are_found():
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    computing, waiting = threading.Thread(target=compute), threading.Thread(target=ended.wait)
    for thread in (computing, waiting):
        thread.start()
    try:
        running = RunningThreads()
        deadline = time.monotonic() + 30
        while running.look() != {computing.native_id}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ended.set()
        computing.join()
        waiting.join()


def test_without_such_timers_nothing_is_started(monkeypatch, caplog):
    def refuse() -> None:
        raise OSError("no timers here")

    monkeypatch.setattr(yielding, "ThreadTimers", refuse)
    num_threads = threading.active_count()
    with caplog.at_level("INFO"):
        yielding.give_way(lambda: pytest.fail("nobody is to ask"))
    assert threading.active_count() == num_threads
    assert "no timers here" in caplog.text


def told(how: str, num_lines: int) -> list[str]:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            return [process.stdout.readline().strip() for _ in range(num_lines)]
        finally:
            process.kill()


def test_a_process_yields_while_serving_is_busy():
    assert told("busy", 8).count("interrupted") >= 4  # not where the machine kept it from running between two looks


def test_a_process_is_left_alone_while_serving_rests():
    assert told("idle", 2) == ["slept", "slept"]
