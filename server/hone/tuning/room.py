"""A full disk in the tuning child: which failures it explains, and how its words reach the server's log."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

#: What the system says of a full disk, of a quota, and of a file that is larger than allowed; compilers and linkers
#: say it too, in the midst of their own words.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_MAX_MESSAGE = 1000
#: Warnings that are told only once each; more kinds than that no healthy server has.
_MAX_TOLD = 256


def lacks_room(reason: str) -> bool:
    """Whether a failure is one of room, which may be there later: it says nothing of the model."""
    return any(text in reason for text in _NO_ROOM)


class Forwarding(logging.Handler):
    """In the child: warnings of hone become events, so that they reach the server's log as lines of their own."""

    def __init__(self, emit: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = " ".join(record.getMessage().split())[:_MAX_MESSAGE]
            self._emit("log", level=record.levelno, logger=record.name, message=text)
        except OSError:  # the server is gone, and this process goes with it
            self.handleError(record)


class ChildLog:
    """In the server: a child's warnings, each once, however many children say it."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def hear(self, event: Mapping[str, Any], model: str) -> None:
        """What is no such event's form says nothing: a child's words are not trusted."""
        level, name, message = event.get("level"), event.get("logger"), event.get("message")
        if not isinstance(name, str) or not isinstance(message, str) or not message:
            return
        told = (name, message)
        if told in self._told or len(self._told) >= _MAX_TOLD:
            return
        self._told.add(told)
        severity = logging.ERROR if type(level) is int and level >= logging.ERROR else logging.WARNING
        line = " ".join(message.split())[:_MAX_MESSAGE]
        logging.getLogger("hone.tuning.child").log(severity, "while tuning %s: %s", model, line, extra={"model": model})
