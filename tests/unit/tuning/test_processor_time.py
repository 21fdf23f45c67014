"""Which part of its time a tuning child ran, and which it waited for a processor, with all that it started."""

from __future__ import annotations

import os
import threading

import pytest

from hone.tuning import group
from hone.tuning.budget import Starvation
from hone.tuning.child import Child
from hone.tuning.child_process import Limits
from hone.tuning.processor_time import ProcessorTime
from tests.unit.tuning.fakes import SCRIPT

MAIN, COMPILER, OTHER = 10, 11, 12


def looked(*looks, began=0.0):
    """(now, threads) of each look."""
    time = ProcessorTime(began)
    for now, threads in looks:
        time.look(now, threads)
    return pytest.approx(time.ran), pytest.approx(time.waited)


def test_a_thread_alone_waits_as_long_as_it_says():
    assert looked((1.0, {MAIN: (0.5, 0.25)}), (2.0, {MAIN: (0.6, 1.0)})) == (0.6, 1.0)


def test_a_compiler_that_starves_is_waiting_although_the_child_itself_asks_for_nothing():
    assert looked((10.0, {MAIN: (0.5, 0.0), COMPILER: (0.1, 9.4)})) == (0.6, 9.4)


def test_while_one_runs_the_group_does_not_wait():
    assert looked((10.0, {COMPILER: (10.0, 0.0), OTHER: (0.0, 10.0)})) == (10.0, 0.0)


def test_those_that_wait_side_by_side_wait_once():
    assert looked((10.0, {COMPILER: (1.0, 9.0), OTHER: (1.0, 9.0)})) == (2.0, 8.0)


def test_what_ended_between_two_looks_keeps_its_time():
    looks = (1.0, {COMPILER: (0.25, 0.5)}), (2.0, {}), (3.0, {OTHER: (0.25, 0.5)})
    assert looked(*looks) == (0.5, 1.0)


def test_a_number_that_is_given_again_is_another_thread():
    assert looked((1.0, {COMPILER: (0.5, 0.5)}), (2.0, {COMPILER: (0.1, 0.25)})) == (0.6, 0.75)


def test_the_kernel_tells_of_every_thread():
    threads = group.thread_times([os.getpid()])
    assert threads.keys() >= {threading.get_native_id()}
    assert threads[os.getpid()][0] > 0
    assert group.thread_times([0]) == {}


# --- with a child


class Clock:
    """Ten seconds pass with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


@pytest.fixture
def hanging(tmp_path):
    """Makes children that tell one stage and then nothing any more, with clocks of their own."""

    def make(clock, **fields):
        path = tmp_path / "m.onnx"
        path.with_name("m.onnx.script.json").write_text('{"*": "hang"}', encoding="ascii")
        task = {"signature": [], "digest": "d", "mode": "build"}
        spec = {"path": str(path), "tasks": [task], "build_threads": 1, "run_threads": 1}
        limits = Limits(seconds=5000.0, memory_bytes=1 << 40, silence_seconds=300.0)
        return Child(spec, limits, on_event=lambda event: None, command=SCRIPT, clock=clock, **fields)

    return make


def starving(clock):
    """As the kernel would tell it of a child that sleeps until a compiler is done, which gets a hundredth."""
    return lambda pids: {MAIN: (0.01, 0.0), COMPILER: (clock.now / 100, clock.now * 0.99)}


def test_a_child_whose_compiler_starves_is_not_told_to_hang(hanging, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(group, "thread_times", starving(clock))
    monkeypatch.setattr(group, "give_idle_priority", lambda pid: True)
    child = hanging(clock, starvation=Starvation(window_seconds=800.0))
    result = child.run()
    assert (result.outcome, result.reason) == ("starved", "others kept every processor busy")
    assert result.running_seconds < 300 < result.seconds


def test_a_child_that_wants_no_processor_and_says_nothing_hangs(hanging, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(group, "thread_times", lambda pids: {MAIN: (0.01, 0.0), COMPILER: (0.5, 0.0)})
    result = hanging(clock, starvation=Starvation(window_seconds=800.0)).run()
    assert (result.outcome, result.cause) == ("failed", "hang")


def test_where_threads_cannot_be_read_the_clock_counts(hanging, monkeypatch):
    def nobody_can_look(pids):
        raise OSError("no descriptor left")

    monkeypatch.setattr(group, "thread_times", nobody_can_look)
    assert hanging(Clock()).run().cause == "hang"
