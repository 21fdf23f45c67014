"""Every way a tuning child can end is a result with a reason, and leaves no process of its group."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hone.tuning import group
from hone.tuning.child import Child
from hone.tuning.child_process import Limits
from tests.process.tuning_children import GENEROUS, Ran
from tests.running import wait_until


def test_a_done_job_reports_events_and_runs_as_told():
    ran = Ran("echo", value="täglich", nice=7)
    result = ran.run()
    assert result.outcome == "done", result
    assert result.reason == ""
    assert ran.named("echo")[0] == {"event": "echo", "value": "täglich", "threads": "2", "nice": 7}
    assert result.stage == "working"
    ran.assert_gone()


def test_a_child_sees_the_time_that_it_has_run():
    ran = Ran("running time")
    result = ran.run()
    [told] = ran.named("ran")
    assert 0 < told["seconds"] <= result.running_seconds


def test_where_no_memory_can_be_shared_the_child_is_not_started(monkeypatch):
    monkeypatch.setattr("hone.tuning.child.RunningTime", _no_descriptor_left)
    result = Ran("echo", value=1).run()
    assert (result.reason, result.cause) == ("cannot start a tuning process: Too many open files", "start")


def test_what_libraries_print_is_no_event():
    ran = Ran("print")
    assert ran.run().outcome == "done"
    assert [event["event"] for event in ran.events] == ["stage", "done"]


def test_a_segfault_is_a_failed_job_that_names_the_signal_and_the_stage():
    ran = Ran("segfault", stage="compiling m", compiler=True)
    result = ran.run()
    assert (result.outcome, result.reason) == (
        "failed",
        "the tuning process died by SIGSEGV (while compiling m)",
    )
    assert "Fatal Python error: Segmentation fault" in result.detail
    assert "string_at" in result.detail
    assert ran.named("kept"), "what it reported before is kept"
    ran.assert_gone()


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("abort", "died by SIGABRT"),
        ("killed", "was killed by SIGKILL, most likely by the kernel because memory ran out"),
        ("exit", "ended with exit code 3 before its job was done"),
    ],
)
def test_deaths_have_readable_reasons(job, reason):
    ran = Ran(job, compiler=True)
    result = ran.run()
    assert (result.outcome, result.reason) == ("failed", f"the tuning process {reason} (while working)")
    ran.assert_gone()


def test_an_exception_is_a_failed_job_with_its_text():
    ran = Ran("raise")
    result = ran.run()
    assert (result.outcome, result.reason) == ("failed", "ValueError: told to fail")
    assert "Traceback" in result.detail
    ran.assert_gone()


@pytest.mark.parametrize("job", ["hang", "hang holding the interpreter", "ignore signals"])
def test_a_hanging_child_is_ended_at_its_deadline(job):
    ran = Ran(job, Limits(seconds=1.0, memory_bytes=GENEROUS.memory_bytes, silence_seconds=60.0), compiler=True)
    result = ran.run()
    assert result.outcome == "failed"
    assert "its time was 1 s (while working)" in result.reason
    assert ran.named("compiler")
    ran.assert_gone()


def test_a_silent_child_is_ended_before_its_deadline():
    ran = Ran("hang", Limits(seconds=600.0, memory_bytes=GENEROUS.memory_bytes, silence_seconds=1.0))
    result = ran.run()
    assert (result.outcome, result.reason) == (
        "failed",
        "the tuning process hung: no progress for 1 s (while working)",
    )
    ran.assert_gone()


def test_the_memory_of_what_it_started_counts():
    limit = 300 << 20
    ran = Ran("memory", Limits(seconds=60.0, memory_bytes=limit, silence_seconds=60.0), num_bytes=400 << 20)
    result = ran.run()
    assert result.outcome == "failed"
    assert "its limit is 300 MiB" in result.reason
    assert result.peak_bytes > limit
    ran.assert_gone()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hello\n", "expected a JSON object a line, found 'hello'"),
        ("[1]\n", "expected a JSON object a line, found '[1]'"),
        ('{"event":NaN}\n', "expected a JSON object a line"),
        ('{"stage":"x"}\n', "expected a message with an 'event'"),
        ("[" * 5000 + "\n", "expected a JSON object a line"),
    ],
)
def test_garbage_is_a_failed_job(text, found):
    ran = Ran("garbage", bytes=text, compiler=True)
    result = ran.run()
    assert result.outcome == "failed"
    assert result.reason.startswith("the tuning process wrote garbage: ")
    assert found in result.reason
    ran.assert_gone()


@pytest.mark.parametrize(
    ("job", "found"),
    [("endless line", "262144 bytes a message, found more"), ("endless events", "33554432 bytes a job, found more")],
)
def test_a_child_cannot_fill_the_server_with_words(job, found):
    ran = Ran(job)
    result = ran.run()
    assert result.outcome == "failed"
    assert found in result.reason
    ran.assert_gone()


def test_a_child_that_does_not_leave_after_its_job_is_ended_and_its_job_counts(monkeypatch):
    monkeypatch.setattr("hone.tuning.child_process._LEAVE_SECONDS", 0.2)
    ran = Ran("done, then hang", compiler=True)
    assert ran.run().outcome == "done"
    ran.assert_gone()


def test_cancelling_from_another_thread_ends_it():
    started = threading.Event()
    ran = Ran("hang", compiler=True, on_tick=started.set)
    thread = threading.Thread(target=lambda: (started.wait(60), ran.child.cancel("the model was unloaded")))
    thread.start()
    result = ran.run()
    thread.join()
    assert (result.outcome, result.reason) == ("cancelled", "the model was unloaded")
    ran.assert_gone()


def test_a_child_cancelled_before_its_start_is_never_started():
    ran = Ran("echo", value=1)
    ran.child.cancel("not wanted")
    assert ran.run().outcome == "cancelled"
    assert ran.child.pid is None


def test_a_command_that_cannot_start_is_a_failed_job():
    child = Child({}, GENEROUS, on_event=lambda event: None, command=("/nonexistent/python",))
    result = child.run()
    assert (result.outcome, result.reason) == ("failed", "cannot start a tuning process: No such file or directory")


def test_a_job_that_cannot_be_sent_is_a_failed_job():
    child = Child({"value": float("nan")}, GENEROUS, on_event=lambda event: None)
    assert child.run().reason.startswith("the job cannot be sent to a tuning process: not expressible in JSON")


def test_a_large_job_is_sent_whole():
    ran = Ran("echo", value="x" * 200_000)
    assert ran.run().outcome == "done"
    assert len(ran.named("echo")[0]["value"]) == 200_000


def test_children_leave_no_descriptors_open():
    from pathlib import Path

    Ran("echo", value=1).run()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for job in ("echo", "segfault", "raise"):
        Ran(job, value=1).run()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_a_cancelled_child_said_last_counts_no_more():
    ran = Ran("echo", value=1)
    steps = ran.child.steps()
    next(steps)
    while ran.child._watch._spec:  # it has not got its job yet
        next(steps)
    wait_until(lambda: group.has_ended(ran.child.pid), "it has said all and ended")
    ran.child.cancel("it is to be tuned anew")
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert (end.value.value.outcome, end.value.value.reason) == ("cancelled", "it is to be tuned anew")
    assert ran.events == []
    ran.assert_gone()


def _no_descriptor_left(*arguments, **fields):
    raise OSError(errno.EMFILE, "Too many open files")


def test_where_nobody_can_look_the_last_reading_counts(monkeypatch):
    monkeypatch.setattr(group, "resident_bytes", _no_descriptor_left)
    ran = Ran("echo", value=1)
    result = ran.run()
    assert (result.outcome, result.reason) == ("done", "")
    ran.assert_gone()


def test_pipes_are_closed_also_where_nobody_can_look_who_is_left(monkeypatch):
    ran = Ran("hang")
    steps = ran.child.steps()
    next(steps)
    watch = ran.child._watch
    with monkeypatch.context() as patched:
        patched.setattr(group, "end", _no_descriptor_left)
        with pytest.raises(OSError, match="Too many open files"):
            steps.close()
    assert watch._open == []
    watch.close()
    ran.assert_gone()


def test_a_reading_that_cannot_be_made_is_not_taken_for_an_end(monkeypatch):
    own = os.getpid()
    assert own in group.members(os.getpgid(own))
    monkeypatch.setattr(Path, "read_text", _no_descriptor_left)
    with pytest.raises(OSError, match="Too many open files"):
        group.members(os.getpgid(own))
    with pytest.raises(OSError, match="Too many open files"):
        group.resident_bytes([own])
