"""A child is of idle priority, so that requests go first; one that cannot be, or starved, is stopped while they are in
flight, and yet never starves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from hone.tuning.activity import ActivityBoard
from hone.tuning.budget import Pacer, Starvation
from tests.process.tuning_children import Ran
from tests.running import wait_until


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_requests_pause_it_and_their_end_resumes_it(tmp_path):
    board = ActivityBoard()
    counter = tmp_path / "counter"
    # The smallest share there is: on the scale of this test it does not run at all while requests are in flight.
    ran = Ran("count", path=str(counter), pacer=Pacer(board.read, min_share=1e-6))
    thread = threading.Thread(target=ran.run)
    thread.start()
    try:
        wait_until(counter.exists, "the child counts")
        board.started()
        wait_until(lambda: state_of(ran.child.pid) == "T", "the child is stopped")
        board.finished()
        before = counter.read_text(encoding="ascii")
        wait_until(lambda: counter.read_text(encoding="ascii") not in ("", before), "the child counts on")
    finally:
        ran.child.cancel("enough")
        thread.join()
        board.close()
    ran.assert_gone()


def test_a_stopped_child_can_be_cancelled(tmp_path):
    board = ActivityBoard()
    board.started()
    ran = Ran("hang", compiler=True, pacer=Pacer(board.read, min_share=1e-6))
    thread = threading.Thread(target=ran.run)
    thread.start()
    wait_until(lambda: ran.child.pid and state_of(ran.child.pid) == "T", "the child is stopped")
    ran.child.cancel("the model was unloaded")
    thread.join(60)
    assert not thread.is_alive()
    board.close()
    ran.assert_gone()


def test_at_idle_priority_it_is_not_stopped_and_its_compilers_have_it_too(tmp_path):
    board = ActivityBoard()
    board.started()
    counter = tmp_path / "counter"
    ran = Ran(
        "count", compiler=True, path=str(counter), starvation=Starvation(), pacer=Pacer(board.read, min_share=1e-6)
    )
    thread = threading.Thread(target=ran.run)
    thread.start()
    try:
        wait_until(lambda: ran.named("compiler"), "the child has a compiler")
        wait_until(lambda: counter.exists() and int(counter.read_text("ascii") or 0) > 20, "the child goes on")
        for pid in (ran.child.pid, ran.named("compiler")[0]["pid"]):
            assert os.sched_getscheduler(pid) == os.SCHED_IDLE
            assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    finally:
        ran.child.cancel("enough")
        thread.join()
        board.close()


def test_it_is_given_up_when_others_keep_every_processor_busy():
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        ran = Ran("burn", starvation=Starvation(min_share=0.9, window_seconds=0.5))
        result = ran.run()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert (result.outcome, result.reason) == ("starved", "others kept every processor busy")
    assert result.running_seconds < result.seconds, "the time in which it waited does not count"
    ran.assert_gone()


def test_it_goes_on_in_slices_while_serving_never_rests(tmp_path):
    board = ActivityBoard()
    board.started()
    counter = tmp_path / "counter"
    ran = Ran("count", path=str(counter), pacer=Pacer(board.read, min_share=0.5, slice_seconds=0.02))
    thread = threading.Thread(target=ran.run)
    thread.start()
    try:
        wait_until(lambda: counter.exists() and int(counter.read_text("ascii") or 0) > 20, "the child goes on")
    finally:
        ran.child.cancel("enough")
        thread.join()
        board.close()


def slept(*, busy: bool, num: int) -> list[bool]:
    board = ActivityBoard()
    if busy:
        board.started()
    ran = Ran("compute and sleep", num=num, activity=board.descriptor, descriptors=(board.descriptor,))
    result = ran.run()
    board.close()
    assert result.outcome == "done", result
    return [event["whole"] for event in ran.named("slept")]


def test_its_threads_yield_while_requests_are_in_flight():
    told = slept(busy=True, num=8)
    assert told.count(False) >= 4, "signals that make it yield end its sleep, too"


def test_its_threads_are_left_alone_while_serving_rests():
    assert slept(busy=False, num=2) == [True, True]
