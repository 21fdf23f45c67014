"""What a server remembers of the one before it that died. The dead ones are real processes."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys

import pytest

from hone.tuning.probation import Death, Probation, Served
from tests.unit.tuning.fakes import PASS, Rig

A, B, C = (Served(letter * 64, "cpu", f"model {letter}") for letter in "abc")

#: Serves A and B on probation and C beyond it, on two threads; what each runs is told by the arguments.
SERVER = """
import faulthandler, sys, threading
from pathlib import Path
from hone.tuning.probation import Probation, Served
folder, main_runs, other_runs = sys.argv[1:]
probation = Probation(Path(folder))
early = probation.board.claim()  # a thread that came before the tuner
probation.open()
faulthandler.enable(probation.fault_note)
served = [Served(letter * 64, "cpu", f"model {letter}") for letter in "abcd"]
marks = dict(zip("abcd", probation.begin(served)))
probation.passed(marks["c"])
probation.end(marks["d"])
probation.board.cells[early] = marks.get(main_runs, 0)
running = threading.Event()
def other():
    cell = probation.board.claim()
    probation.board.cells[cell] = marks.get(other_runs, 0)
    running.set()
    threading.Event().wait()
threading.Thread(target=other, daemon=True).start()
running.wait()
print("serving", flush=True)
sys.stdin.read()
probation.close()
"""


def server(folder, main_runs="", other_runs=""):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), main_runs, other_runs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "serving\n"
    return process


def end(process, number):
    process.send_signal(number)  # the kernel gives it to the main thread
    process.wait(30)
    process.stdin.close()
    process.stdout.close()


def deaths_in(folder):
    probation = Probation(folder)
    try:
        return probation.open()
    finally:
        probation.close()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT])
def test_a_death_by_a_fault_signal_is_held_against_what_its_thread_ran(tmp_path, number, caplog):
    caplog.set_level(logging.ERROR)
    end(server(tmp_path, main_runs="a", other_runs="b"), number)
    assert deaths_in(tmp_path) == [Death(number.name, (A,), (B,))]
    assert "a server that ran before died of a fault" in caplog.text
    assert deaths_in(tmp_path) == [], "told once"


def test_what_serves_beyond_its_probation_is_blamed_too(tmp_path):
    end(server(tmp_path, main_runs="c"), signal.SIGSEGV)
    [death] = deaths_in(tmp_path)
    assert death.blamed == (Served(C.artifact, "cpu", C.name, on_probation=False),)
    assert death.others == (A, B)


def test_a_fault_on_a_thread_that_ran_nothing_tuned_blames_nobody_at_once(tmp_path):
    end(server(tmp_path, other_runs="b"), signal.SIGSEGV)
    assert deaths_in(tmp_path) == [Death("SIGSEGV", (), (A, B))]


def test_a_fault_on_a_librarys_thread_blames_all_that_ran(tmp_path):
    process = server(tmp_path, main_runs="a", other_runs="b")
    [note] = tmp_path.glob("*.fault")
    end(process, signal.SIGKILL)
    note.write_text("Fatal Python error: Aborted\n\nThread 0x0000000000000001 (most recent call first):\n")
    assert deaths_in(tmp_path) == [Death("SIGABRT", (A, B), ())]


def test_a_sudden_end_is_unexplained(tmp_path):
    end(server(tmp_path, main_runs="a"), signal.SIGKILL)
    assert deaths_in(tmp_path) == [Death("", (), (A, B))]


def test_a_stop_as_it_should_be_leaves_nothing(tmp_path):
    process = server(tmp_path)
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
    assert deaths_in(tmp_path) == []


def test_a_server_that_lives_is_not_dead(tmp_path):
    process = server(tmp_path)
    try:
        assert deaths_in(tmp_path) == []
    finally:
        end(process, signal.SIGKILL)
    assert len(deaths_in(tmp_path)) == 1


@pytest.mark.parametrize("how", [[], ["-a"]], ids=["copied", "copied with its times"])
def test_a_copy_of_a_living_servers_notes_is_no_death(tmp_path, how, caplog):
    caplog.set_level(logging.INFO)
    process = server(tmp_path / "own", main_runs="a")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", *how, tmp_path / "own", copy], check=True)
    assert deaths_in(copy) == []
    assert list(copy.iterdir()) == [], "nobody needs them"
    assert "are copies" in caplog.text
    end(process, signal.SIGSEGV)
    assert deaths_in(tmp_path / "own") == [Death("SIGSEGV", (A,), (B,))], "its own are as they were"


def test_a_copy_of_a_dead_servers_notes_is_no_second_death(tmp_path, caplog):
    end(server(tmp_path / "own", main_runs="a"), signal.SIGSEGV)
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    assert deaths_in(tmp_path / "copy") == []
    assert "died of a fault" not in caplog.text
    (tmp_path / "own").rename(tmp_path / "moved")
    assert deaths_in(tmp_path / "moved") == [Death("SIGSEGV", (A,), (B,))], "what is moved is no copy"


def test_a_death_with_nothing_on_probation_is_nobodys_fault(tmp_path):
    first = Probation(tmp_path)
    first.open()
    [mark] = first.begin([A])
    first.end(mark)
    first._lock.close()  # as if killed
    first.fault_note.close()
    assert deaths_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    probation = Probation(blocked / "folder")
    assert probation.open() == []
    [mark] = probation.begin([A])
    with probation.board.running(mark):
        pass
    probation.passed(mark)
    probation.end(mark)
    probation.close()
    assert caplog.text.count("cannot remember") == 1


@pytest.mark.parametrize("told", [b"\xff{", b"[1]", b'{"x": {}}', b'{"1": {"artifact": "a"}}', b'{"1": 2}'])
def test_damaged_files_are_no_accusation(tmp_path, told):
    (tmp_path / "x.lock").touch()
    (tmp_path / "x.json").write_bytes(told)
    (tmp_path / "x.running").write_bytes(b"short")
    (tmp_path / "x.fault").write_bytes(b"\xff")
    assert deaths_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_cells_share_one_that_is_not_read(tmp_path):
    probation = Probation(tmp_path)
    probation.open()
    [mark] = probation.begin([A])
    cells = [probation.board.claim() for _ in range(1500)]
    for cell in cells:
        probation.board.cells[cell] = mark
    for cell in cells:
        probation.board.release(cell)
    assert len(set(cells)) == 1024
    assert probation.board.claim() in cells[:1023]
    probation.close()


# --- with the tuner


def test_a_fault_keeps_the_generation_out_and_lesser_suspicions_do_the_second_time(tmp_path, caplog):
    rig = Rig(tmp_path)
    promoter = rig.tuner._promoter
    promoter.blame([Death("SIGSEGV", (A,), (B,))])
    assert rig.cache.out == {A.artifact: "a server died of SIGSEGV while it ran, on probation"}
    assert "quarantined model a (artifact aaaaaaaaaaaa): a server died of SIGSEGV while it ran" in caplog.text
    promoter.blame([Death("SIGSEGV", (), (B,))])
    assert B.artifact not in rig.cache.out
    first = (
        "model b (artifact bbbbbbbbbbbb): a server died of SIGSEGV, though not while it ran, while it was on probation"
    )
    assert f"{first}; another time it is quarantined" in caplog.text
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    promoter.blame([Death("", (), (B,))])
    assert rig.cache.out[B.artifact] == "a server died without a word while it was on probation"
    assert "two servers" not in caplog.text
    late = Served(C.artifact, "cpu", C.name, on_probation=False)
    promoter.blame([Death("SIGILL", (late,))])
    assert C.artifact not in rig.cache.out
    promoter.blame([Death("SIGILL", (late,))])
    assert "SIGILL" in rig.cache.out[C.artifact]
    assert rig.tuner.counters.num_quarantines == 3


def test_promotion_begins_probation_and_a_stop_ends_it_neutrally(tmp_path):
    rig = Rig(tmp_path)
    rig.probation.open()
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    [told] = (tmp_path / "probation").glob("*.json")
    assert "m IN:FP32[1,4]" in told.read_text(encoding="utf-8")
    assert rig.tuner.stop()
    assert list((tmp_path / "probation").iterdir()) == []
    assert rig.cache.out == {}
    assert rig.cache.strikes == {}


def test_it_is_on_probation_and_running_while_it_is_loaded_and_warmed(tmp_path):
    rig = Rig(tmp_path)
    rig.probation.open()
    seen = []
    make = rig.make_engine

    def look(digest):
        [path] = (tmp_path / "probation").glob("*.running")
        [told] = (tmp_path / "probation").glob("*.json")
        seen.append((any(path.read_bytes()[8::16]), digest in told.read_text(encoding="utf-8")))
        return make(digest)

    rig.make_engine = look
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert seen == [(True, True)]
    assert rig.tuner.stop()
