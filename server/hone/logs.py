"""Structured logs: one line per record on stderr, as JSON or for people to read, written by a thread of their own.

Callers log with the standard library: `logger.info("model is ready", extra={"model": name, "version": "1"})`. Whatever
is in `extra` becomes a field. Nothing happens at import; `configure` takes the process's root logger over, and
`LogControl.close` gives it back.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from hone.config import Settings
from hone.errors import InvalidRequest, Unsupported

#: Lines that may wait for a slow stderr. Beyond it lines are dropped, counted, and reported when the stream recovers.
MAX_WAITING_LINES = 20_000

#: Seconds that waiting lines get to be written when the process ends.
CLOSE_TIMEOUT_SECONDS = 2.0

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_LEVEL_NAMES = {logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}
_FORMATS = {"default": "human", "human": "human", "ISO8601": "human", "json": "json"}

#: Loggers whose libraries may have given them handlers of their own.
_FOREIGN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "grpc", "grpc._cython.cygrpc")


def verbose(level: int) -> int:
    """The logging level of a message that shows with `log_verbose_level >= level`; 1 is DEBUG."""
    return max(1, logging.DEBUG + 1 - level)


def configure(settings: Settings, stream: TextIO | None = None) -> LogControl:
    """Send the logs of the whole process (warnings, uvicorn's and gRPC's included) to `stream`, by default stderr.

    uvicorn is to be run with `log_config=None`, or it replaces this for its own loggers.
    """
    return LogControl(settings, sys.stderr if stream is None else stream)


class LogControl:
    """What is logged and how; may be changed at any time, in the terms of Triton's log settings.

    `log_format` is `json`, or `default` (alias `human`), or `ISO8601`, which writes the same lines as `default` since
    those carry ISO 8601 times already.
    """

    def __init__(self, settings: Settings, stream: TextIO) -> None:
        self._settings: dict[str, bool | int | str] = {
            "log_file": "",
            "log_info": settings.log_info,
            "log_warning": settings.log_warning,
            "log_error": settings.log_error,
            "log_verbose_level": settings.log_verbose,
            "log_format": "default" if settings.log_format == "human" else settings.log_format,
        }
        self._handler = QueuedHandler(stream)
        root, package = logging.getLogger(), logging.getLogger("hone")
        loggers = (root, package, *(logging.getLogger(name) for name in _FOREIGN_LOGGERS))
        self._before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
        for logger in loggers:
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
        root.addHandler(self._handler)
        logging.captureWarnings(True)
        self._apply()

    def settings(self) -> dict[str, bool | int | str]:
        return dict(self._settings)

    def update(self, changes: Mapping[str, bool | int | str]) -> dict[str, bool | int | str]:
        """Change all of the settings named, or none. Returns what holds then.

        Raises InvalidRequest for an unknown setting or a value of the wrong kind, Unsupported for `log_file`.
        """
        for name, value in changes.items():
            self._check(name, value)
        self._settings.update(changes)
        self._apply()
        return self.settings()

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Write what waits, for as long as that, and put the loggers back as they were."""
        logging.captureWarnings(False)
        for logger, handlers, propagate, level in self._before:
            logger.handlers[:] = handlers
            logger.propagate = propagate
            logger.setLevel(level)
        self._handler.stop(timeout_seconds)

    def _check(self, name: str, value: bool | int | str) -> None:
        if name == "log_file":
            raise Unsupported("log file location can not be updated through network protocol")
        if name in ("log_info", "log_warning", "log_error"):
            if not isinstance(value, bool):
                raise InvalidRequest(f"log setting '{name}': expected true or false, got {value!r}")
        elif name == "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidRequest(f"log setting '{name}': expected an integer of at least 0, got {value!r}")
        elif name == "log_format":
            if value not in _FORMATS:
                raise InvalidRequest(f"log setting '{name}': expected one of {', '.join(_FORMATS)}, got {value!r}")
        else:
            raise InvalidRequest(f"unknown log setting '{name}', expected one of {', '.join(self._settings)}")

    def _apply(self) -> None:
        enabled = {
            "info": bool(self._settings["log_info"]),
            "warning": bool(self._settings["log_warning"]),
            "error": bool(self._settings["log_error"]),
        }
        verbose_level = int(self._settings["log_verbose_level"])
        self._handler.enabled = enabled
        human = _FORMATS[str(self._settings["log_format"])] == "human"
        self._handler.setFormatter(HumanFormatter() if human else JsonFormatter())
        lowest = next((level for level, name in _LEVEL_NAMES.items() if enabled[name]), logging.CRITICAL + 1)
        # Verbose is this package's own: other libraries' DEBUG lines would drown it (and may log about logging).
        logging.getLogger().setLevel(lowest)
        logging.getLogger("hone").setLevel(verbose(verbose_level) if verbose_level else lowest)


class QueuedHandler(logging.Handler):
    """Formats where the record was made, and leaves writing to a thread: a full pipe never stops the event loop."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.enabled: Mapping[str, bool] = {}
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_lines, name="hone-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.enabled.get(_level_name(record.levelno), True):
            return
        if self._lines.qsize() >= MAX_WAITING_LINES:
            self._num_dropped += 1  # no race: logging calls this with the handler's lock held
            return
        try:
            line = self.format(record)
        except Exception:  # the standard library's contract: a record that cannot be formatted is reported, not raised
            self.handleError(record)
            return
        self._lines.put(line + "\n")

    def stop(self, timeout_seconds: float) -> None:
        self._lines.put(None)
        self._thread.join(timeout_seconds)
        super().close()

    def close(self) -> None:
        """Called by the standard library when the interpreter ends, in case nobody stopped this handler before."""
        self.stop(CLOSE_TIMEOUT_SECONDS)

    def _write_lines(self) -> None:
        ended = False
        num_reported = 0
        while not ended:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            ended = None in lines
            num_dropped = self._num_dropped
            if num_dropped > num_reported:
                lines.append(self.format(_dropped(num_dropped - num_reported)) + "\n")
            try:
                self._stream.write("".join(line for line in lines if line is not None))
                self._stream.flush()
            except (OSError, ValueError):
                continue  # the stream is closed or its reader is gone: nowhere is left to report that
            num_reported = num_dropped


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields of `extra`, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": _level_name(record.levelno),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        for name, value in _fields(record):
            # A field never hides one of ours.
            field = f"{name}_" if name in line or name == "exception" else name
            line[field] = _encodable(value) if isinstance(value, str) else value
        if trace := _traceback(record):
            line["exception"] = _encodable(trace)
        return orjson.dumps(line, default=lambda value: _encodable(str(value))).decode()


class HumanFormatter(logging.Formatter):
    """`2026-11-30T12:00:00.000Z INFO hone.serving: model is ready model=digits version=1`, then any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        # Clients choose names and ids: a line break among them must not look like a line of ours.
        message = "".join(c if c.isprintable() else _escaped(c) for c in record.getMessage())
        fields = "".join(f" {name}={_field_text(value)}" for name, value in _fields(record))
        trace = _traceback(record)
        indented = "".join(f"\n    {line}" for line in trace.splitlines()) if trace else ""
        text = f"{_time(record)} {_level_name(record.levelno).upper()} {record.name}: {message}{fields}{indented}"
        return _encodable(text)


def _level_name(level: int) -> str:
    if level < logging.INFO:
        return "debug"
    return _LEVEL_NAMES[min(level // 10 * 10, logging.CRITICAL)]


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(record).items() if name not in _STANDARD_FIELDS]


def _traceback(record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(logging.Formatter().formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _field_text(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=\\')
    return text if plain else json.dumps(text)


def _encodable(text: str) -> str:
    """Without lone surrogates, which file names that are not UTF-8 turn into."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def _dropped(count: int) -> logging.LogRecord:
    return logging.LogRecord(
        __name__, logging.WARNING, __file__, 0, "%d log lines were dropped: stderr is too slow", (count,), None
    )
