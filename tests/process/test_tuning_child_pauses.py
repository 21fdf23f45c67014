"""A child is stopped while requests are in flight, and yet never starves."""

from __future__ import annotations

import threading
from pathlib import Path

from hone.tuning.activity import ActivityBoard
from hone.tuning.budget import Pacer
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
