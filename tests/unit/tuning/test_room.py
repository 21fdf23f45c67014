"""A full disk is told apart from what a model does; a child's warnings are lines in the server's log, each once."""

from __future__ import annotations

import logging

import pytest

from hone.specialization import Signature, VersionRef
from hone.tuning.maker import jobs_to_ask_again
from hone.tuning.record import Bucket, Record
from hone.tuning.room import ChildLog, Forwarding, lacks_room
from hone.tuning.running import RunningBoard
from tests.unit.kernels.support import mounted


@pytest.mark.parametrize(
    "reason, expected",
    [
        ("OSError: [Errno 28] No space left on device: 'module.o'", True),
        ("/usr/bin/ld: final link failed: No space left on device", True),
        ("[Errno 122] Disk quota exceeded", True),
        ("File too large", True),
        ("the tuning process died by SIGSEGV", False),
        ("", False),
    ],
)
def test_failures_of_room(reason, expected):
    assert lacks_room(reason) is expected


def test_what_failed_for_want_of_room_is_made_again_and_nothing_else_that_failed(fake_version):
    record = Record(fake_version)
    for rows, reason in ((1, "No space left on device"), (2, "it does not compile")):
        signature = Signature.of([("IN", "FP32", (rows, 4))])
        record.buckets["cpu", signature] = Bucket("cpu", signature, f"digest {rows}", "failed", reason)
    (job,) = jobs_to_ask_again(record)
    assert [(task.digest, task.mode) for task in job.tasks] == [("digest 1", "build")]


@pytest.fixture
def fake_version():
    class Version:
        ref = VersionRef("m", 1, "graph")

    return Version()


def test_warnings_become_events_of_one_line():
    events = []
    handler = Forwarding(lambda event, **fields: events.append({"event": event, **fields}))
    logger = logging.getLogger("hone.test_room")
    logger.addHandler(handler)
    try:
        logger.info("not this")
        logger.warning("cannot keep\n  %s", "it")
    finally:
        logger.removeHandler(handler)
    assert events == [
        {"event": "log", "level": logging.WARNING, "logger": "hone.test_room", "message": "cannot keep it"}
    ]


def test_a_warning_is_told_once_however_many_children_say_it(caplog):
    log = ChildLog()
    event = {"event": "log", "level": logging.WARNING, "logger": "hone.kernels.cache", "message": "cannot keep it"}
    log.hear(event, "m")
    log.hear(event, "other")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "while tuning m: cannot keep it"
    assert record.model == "m"


@pytest.mark.parametrize(
    "event", [{}, {"logger": 1, "message": "x"}, {"logger": "a", "message": {}}, {"logger": "a", "message": ""}]
)
def test_what_is_no_warning_says_nothing(event, caplog):
    ChildLog().hear(event, "m")
    assert caplog.records == []


def test_lines_cannot_be_forged(caplog):
    ChildLog().hear({"logger": "a", "message": "one\nWARNING two" + "x" * 5000}, "m")
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and len(record.getMessage()) < 1100


def test_marks_of_what_runs_need_room_when_they_are_made_and_not_when_they_are_written(tmp_path):
    """A write into a mapping that has no room behind it ends the process."""
    with mounted(tmp_path / "full", "size=16k,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting a small tmpfs takes root")
        (tmp_path / "full" / "filler").write_bytes(b"x" * 12_000)
        board = RunningBoard()
        with pytest.raises(OSError, match="space"):
            board.attach(tmp_path / "full" / "running")
        assert not (tmp_path / "full" / "running").exists()
        cell = board.claim()
        board.cells[cell] = 7
        assert board.cells[cell] == 7
