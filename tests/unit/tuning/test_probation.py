"""What a server remembers of the one before it that died. The dead ones are real processes."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

import pytest

from hone.tuning.probation import Death, Probation
from tests.unit.tuning.fakes import PASS, Rig

SERVER = """
import faulthandler, sys
from pathlib import Path
from hone.tuning.probation import Probation
probation = Probation(Path(sys.argv[1]))
probation.open()
faulthandler.enable(probation.fault_note)
probation.begin("a" * 64, "cpu")
probation.begin("b" * 64, "cpu")
probation.end("b" * 64, "cpu")
print("serving", flush=True)
sys.stdin.read()
probation.close()
"""


def server(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "serving\n"
    return process


def end(process, number):
    process.send_signal(number)
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
def test_a_death_by_a_fault_signal_is_known_as_one(tmp_path, number, caplog):
    caplog.set_level(logging.ERROR)
    end(server(tmp_path), number)
    [death] = deaths_in(tmp_path)
    assert death.artifacts == (("a" * 64, "cpu"),)
    assert death.fault.startswith("Fatal Python error: ")
    assert "a server that ran before died of a fault" in caplog.text
    assert deaths_in(tmp_path) == [], "told once"


def test_a_sudden_end_is_unexplained(tmp_path):
    end(server(tmp_path), signal.SIGKILL)
    assert deaths_in(tmp_path) == [Death((("a" * 64, "cpu"),), "")]


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


def test_a_death_with_nothing_on_probation_is_nobodys_fault(tmp_path):
    first = Probation(tmp_path)
    first.open()
    first.begin("a", "cpu")
    first.end("a", "cpu")
    first._lock.close()  # as if killed
    first.fault_note.close()
    assert deaths_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    probation = Probation(blocked / "folder")
    assert probation.open() == []
    probation.begin("a", "cpu")
    probation.end("a", "cpu")
    probation.close()
    assert caplog.text.count("cannot remember") == 1


def test_damaged_files_are_no_accusation(tmp_path):
    (tmp_path / "x.lock").touch()
    (tmp_path / "x.json").write_bytes(b"\xff{")
    assert deaths_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


# --- with the tuner


def test_a_fault_keeps_the_generation_out_and_two_unexplained_deaths_do(tmp_path):
    rig = Rig(tmp_path)
    promoter = rig.tuner._promoter
    promoter.blame([Death((("a", "cpu"),), "Fatal Python error: Segmentation fault")])
    assert "Segmentation fault" in rig.cache.out["a"]
    promoter.blame([Death((("b", "cpu"),), "")])
    assert "b" not in rig.cache.out
    promoter.blame([Death((("b", "cpu"),), "")])
    assert "unexplained" in rig.cache.out["b"]
    assert rig.tuner.counters.num_quarantines == 2


def test_promotion_begins_probation_and_a_stop_ends_it_neutrally(tmp_path):
    rig = Rig(tmp_path)
    rig.probation.open()
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    [told] = (tmp_path / "probation").glob("*.json")
    assert "IN:FP32[1,4]" in told.read_text(encoding="utf-8")
    assert rig.tuner.stop()
    assert list((tmp_path / "probation").iterdir()) == []
    assert rig.cache.out == {}
    assert rig.cache.strikes == {}
