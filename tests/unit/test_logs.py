import io
import json
import logging
import os
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pytest

from hone import logs
from hone.config import Settings
from hone.errors import InvalidRequest, Unsupported
from hone.logs import LogControl

logger = logging.getLogger("hone.test_logs")
OTHER = logging.getLogger("some.library")


class Log:
    """A configured log whose lines can be read."""

    def __init__(self, **settings: Any) -> None:
        self.stream = io.StringIO()
        self.control = logs.configure(Settings(**settings), self.stream)

    def lines(self) -> list[str]:
        """All that was written; ends logging."""
        self.control.close()
        return self.stream.getvalue().split("\n")[:-1]

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def log() -> Iterator[Callable[..., Log]]:
    made: list[Log] = []

    def make(**settings: Any) -> Log:
        made.append(Log(**settings))
        return made[-1]

    yield make
    for one in made:
        one.control.close()


def without_time(line: str) -> str:
    stamp, rest = line.split(" ", 1)
    assert datetime.fromisoformat(stamp).tzinfo is not None
    return rest


def test_human_lines(log: Callable[..., Log]) -> None:
    one = log()
    logger.info("model is %s", "ready", extra={"model": "digits", "version": "1", "request_id": "a b"})
    logger.warning("slow", extra={"seconds": 1.5})
    assert [without_time(line) for line in one.lines()] == [
        'INFO hone.test_logs: model is ready model=digits version=1 request_id="a b"',
        "WARNING hone.test_logs: slow seconds=1.5",
    ]


def test_json_lines(log: Callable[..., Log]) -> None:
    one = log(log_format="json")
    path = Path("x")
    logger.error("load %s", "failed", extra={"model": "digits", "version": "1", "tries": 3, "where": path, "level": 7})
    (line,) = one.objects()
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "error",
        "logger": "hone.test_logs",
        "message": "load failed",
        "model": "digits",
        "version": "1",
        "tries": 3,
        "where": "x",
        "level_": 7,
    }


def test_exceptions_are_told_in_both_forms(log: Callable[..., Log]) -> None:
    for log_format in ("human", "json"):
        one = log(log_format=log_format)
        try:
            raise RuntimeError("broken engine")
        except RuntimeError:
            logger.exception("failed", extra={"model": "digits"})
        if log_format == "json":
            (line,) = one.objects()
            assert line["exception"].endswith("RuntimeError: broken engine")
            assert (line["level"], line["model"]) == ("error", "digits")
        else:
            first, *rest = one.lines()
            assert without_time(first) == "ERROR hone.test_logs: failed model=digits"
            assert all(line.startswith("    ") for line in rest)
            assert rest[-1] == "    RuntimeError: broken engine"


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_what_clients_send_cannot_forge_a_line(log: Callable[..., Log], log_format: str) -> None:
    one = log(log_format=log_format)
    evil = "x\n2026-01-01T00:00:00.000Z INFO hone: all is well\x1b[2J\u2028"
    logger.info("request for %s", evil, extra={"request_id": evil, "model": 'a" version=2'})
    (line,) = one.lines()
    assert "\x1b" not in line
    if log_format == "json":
        assert json.loads(line)["request_id"] == evil
    else:
        assert '"x\\n2026' in line
        assert 'model="a\\" version=2"' in line


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_names_that_are_not_unicode_can_be_logged(log: Callable[..., Log], log_format: str) -> None:
    one = log(log_format=log_format)
    logger.info("found %s", "a\udc80", extra={"path": "b\udc81"})
    (line,) = one.lines()
    line.encode()
    assert "dc80" in line
    assert "dc81" in line


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["info", "warning", "error", "critical", "library warning"]),
        ({"log_info": False}, ["warning", "error", "critical", "library warning"]),
        ({"log_warning": False}, ["info", "error", "critical"]),
        ({"log_error": False}, ["info", "warning", "library warning"]),
        ({"log_info": False, "log_warning": False, "log_error": False}, []),
        ({"log_verbose": 1}, ["verbose 1", "info", "warning", "error", "critical", "library warning"]),
        ({"log_verbose": 2}, ["verbose 1", "verbose 2", "info", "warning", "error", "critical", "library warning"]),
        ({"log_verbose": 1, "log_info": False, "log_warning": False}, ["verbose 1", "error", "critical"]),
    ],
)
@pytest.mark.parametrize("at_run_time", [False, True])
def test_switches(log: Callable[..., Log], settings: dict[str, Any], expected: list[str], at_run_time: bool) -> None:
    one = log(log_format="json", **({} if at_run_time else settings))
    if at_run_time:
        one.control.update({name.replace("log_verbose", "log_verbose_level"): v for name, v in settings.items()})
    logger.debug("verbose 1")
    logger.log(logs.verbose(2), "verbose 2")
    logger.info("info")
    logger.warning("warning")
    logger.error("error")
    logger.critical("critical")
    OTHER.debug("library debug")
    OTHER.warning("library warning")
    assert [line["message"] for line in one.objects()] == expected


def test_disabled_levels_cost_no_record(log: Callable[..., Log]) -> None:
    one = log(log_info=False)
    assert not logger.isEnabledFor(logging.INFO)
    one.control.update({"log_info": True})
    assert logger.isEnabledFor(logging.INFO)
    assert not logger.isEnabledFor(logging.DEBUG)


def test_settings_are_tritons(log: Callable[..., Log]) -> None:
    assert log().control.settings() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }


def test_format_can_change_while_running(log: Callable[..., Log]) -> None:
    one = log()
    logger.info("one")
    assert one.control.update({"log_format": "json"})["log_format"] == "json"
    logger.info("two")
    assert one.control.update({"log_format": "ISO8601"})["log_format"] == "ISO8601"
    logger.info("three")
    first, second, third = one.lines()
    assert without_time(first) == "INFO hone.test_logs: one"
    assert json.loads(second)["message"] == "two"
    assert without_time(third) == "INFO hone.test_logs: three"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_bogus": True}, "unknown log setting 'log_bogus'"),
        ({"log_info": "true"}, "'log_info': expected true or false"),
        ({"log_warning": 1}, "'log_warning': expected true or false"),
        ({"log_verbose_level": True}, "'log_verbose_level': expected an integer"),
        ({"log_verbose_level": -1}, "at least 0, got -1"),
        ({"log_verbose_level": "1"}, "got '1'"),
        ({"log_format": "xml"}, "'log_format': expected one of default"),
        ({"log_format": True}, "'log_format'"),
    ],
)
def test_wrong_updates_are_refused_whole(log: Callable[..., Log], changes: dict[str, Any], message: str) -> None:
    one = log()
    before = one.control.settings()
    with pytest.raises(InvalidRequest, match=message):
        one.control.update({"log_error": False, **changes})
    assert one.control.settings() == before
    logger.error("still on")
    assert len(one.lines()) == 1


def test_log_file_cannot_be_set(log: Callable[..., Log]) -> None:
    with pytest.raises(Unsupported, match="can not be updated through network protocol"):
        log().control.update({"log_file": "x.log"})


def test_other_libraries_log_in_the_same_form(log: Callable[..., Log]) -> None:
    uvicorn = logging.getLogger("uvicorn.error")
    own = io.StringIO()
    handler = logging.StreamHandler(own)
    uvicorn.addHandler(handler)
    uvicorn.propagate = False
    uvicorn.setLevel(logging.CRITICAL)
    try:
        one = log(log_format="json")
        uvicorn.warning("Invalid HTTP request received.", extra={"color_message": "\x1b[1m"})
        logging.getLogger("grpc").warning("too many pings")
        lines = one.objects()
        assert [(line["logger"], line["message"]) for line in lines] == [
            ("uvicorn.error", "Invalid HTTP request received."),
            ("grpc", "too many pings"),
        ]
        assert all("color_message" not in line for line in lines)
        assert own.getvalue() == ""
        assert (uvicorn.handlers, uvicorn.propagate, uvicorn.level) == ([handler], False, logging.CRITICAL)
    finally:
        uvicorn.removeHandler(handler)
        uvicorn.propagate = True
        uvicorn.setLevel(logging.NOTSET)


def test_python_warnings_are_logged(log: Callable[..., Log]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        one = log(log_format="json")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        (line,) = one.objects()
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "old thing" in line["message"]


def test_close_puts_the_loggers_back_and_ends_the_thread(log: Callable[..., Log]) -> None:
    root, package = logging.getLogger(), logging.getLogger("hone")
    before = (root.handlers[:], root.level, package.level)
    one = log(log_verbose=1)
    assert any(thread.name == "hone-logs" for thread in threading.enumerate())
    one.control.close()
    one.control.close()
    assert (root.handlers, root.level, package.level) == before
    assert not any(thread.name == "hone-logs" for thread in threading.enumerate())


def wait_for_bytes(pipe: TextIO) -> None:
    """Until the writer of the pipe is in the middle of a line that does not fit."""
    assert select.select([pipe], [], [], 30)[0]


def test_a_stream_that_blocks_never_blocks_the_caller_and_losses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 10)
    reader, writer = os.pipe()
    with os.fdopen(reader) as readable, os.fdopen(writer, "w") as writable:
        control = LogControl(Settings(log_format="json"), writable)
        try:
            filler = "x" * 100_000  # more than a pipe holds
            logger.info(filler)
            wait_for_bytes(readable)
            for number in range(50):
                logger.info("line %d", number)
            received: list[dict[str, Any]] = []
            while not received or "dropped" not in received[-1]["message"]:
                received.append(json.loads(readable.readline()))
        finally:
            control.close()
    messages = [line["message"] for line in received]
    assert messages == [filler, *(f"line {number}" for number in range(10)), messages[-1]]
    assert messages[-1].startswith("40 log lines were dropped")
    assert received[-1]["level"] == "warning"


def test_close_has_a_deadline() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as readable, os.fdopen(writer, "w") as writable:
        control = LogControl(Settings(), writable)
        logger.info("x" * 100_000)
        wait_for_bytes(readable)
        (writing,) = (thread for thread in threading.enumerate() if thread.name == "hone-logs")
        control.close(timeout_seconds=0.05)
        assert writing.is_alive()  # still stuck, and close returned
        assert len(readable.readline()) > 100_000
        writing.join()


def test_a_closed_stream_does_no_harm() -> None:
    stream = io.StringIO()
    control = LogControl(Settings(), stream)
    stream.close()
    logger.info("nobody hears")
    control.close()


def test_lines_are_written_when_the_process_ends_without_closing() -> None:
    code = """
import logging
from hone import logs
from hone.config import Settings
logs.configure(Settings(log_format="json"))
for number in range(1000):
    logging.getLogger("hone").info("line %d", number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == [f"line {n}" for n in range(1000)]
    assert done.stdout == ""


def test_importing_changes_no_logger() -> None:
    code = "import logging, hone.logs as _; print(logging.getLogger().handlers, logging.getLogger('hone').level)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[] 0", "")
