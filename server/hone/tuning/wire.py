"""The lines that a tuning child and its parent exchange: one JSON object a line, each and all of them bounded.

The parent trusts nothing that comes out of a child: a line that is too long, is no JSON object or has no `event` is
garbage, and garbage fails the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Message = dict[str, Any]

#: Longest job specification, and longest event, in bytes with the line's end.
MAX_SPEC_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 18
#: All events of one job together.
MAX_TOTAL_BYTES = 1 << 25


class Garbage(ValueError):
    """Something that is not a message; the text says what was found."""


def encode(message: Mapping[str, Any], max_bytes: int = MAX_LINE_BYTES) -> bytes:
    """One line. Raises Garbage for what is too long or is no plain JSON (NaN and infinity are not)."""
    try:
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as problem:
        raise Garbage(f"not expressible in JSON: {problem}") from problem
    if len(line) > max_bytes:
        raise Garbage(f"expected at most {max_bytes} bytes a message, found {len(line)}")
    return line


def decode(line: bytes) -> Message:
    """Raises Garbage."""
    try:
        message = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise Garbage(f"expected a JSON object a line, found {_shown(line)}") from problem
    if not isinstance(message, dict):
        raise Garbage(f"expected a JSON object a line, found {_shown(line)}")
    return message


class LineReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._max_total_bytes = max_total_bytes
        self._total_bytes = 0
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises Garbage at the first that is none, behind those before it, and
        when a limit is passed."""
        self._total_bytes += len(data)
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            self._check_length(line)
            message = decode(bytes(line))
            if not isinstance(message.get("event"), str):
                raise Garbage(f"expected a message with an 'event', found {_shown(bytes(line))}")
            yield message
        self._check_length(rest)
        if self._total_bytes > self._max_total_bytes:
            raise Garbage(f"expected at most {self._max_total_bytes} bytes a job, found more")

    def _check_length(self, line: bytes | bytearray) -> None:
        if len(line) >= self._max_line_bytes:
            raise Garbage(f"expected at most {self._max_line_bytes} bytes a message, found more")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _shown(line: bytes) -> str:
    return repr(line[:60])[1:] + ("..." if len(line) > 60 else "")
