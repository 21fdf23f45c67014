"""Protobuf's wire format, as far as reading the outline of a large message takes: no copy, no schema."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: Larger files are mapped: whoever truncates one while it is looked at ends the process (SIGBUS).
_MAX_READ_BYTES = 64 << 20
#: No message may be larger, says protobuf.
MAX_MESSAGE_BYTES = (1 << 31) - 1


class Malformed(Exception):
    """The bytes are no protobuf message."""


def contents_of(path: Path) -> memoryview:
    """The bytes of a file, read or, where they are many, mapped for as long as views of them live. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _MAX_READ_BYTES:
            return memoryview(file.read())
        try:
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except ValueError as problem:
            raise OSError(f"{path.name} was truncated while it was opened") from problem


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of a message. Fixed-width values come as unsigned integers. Raises Malformed."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise Malformed(f"not a protobuf message (wire type {kind})")
        if at + size > end:
            raise Malformed("the file is truncated")
        part = message[at : at + size]
        at += size
        yield number, part if kind == _BYTES else int.from_bytes(part, "little")


def varints(packed: memoryview) -> list[int]:
    """The numbers of a packed repeated field. Raises Malformed."""
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def encoded(number: int, value: int | bytes | memoryview) -> list[bytes | memoryview]:
    """One field in wire format, in parts that are to be joined: a number as a varint, all else with its length."""
    if isinstance(value, int):
        return [_to_varint(number << 3 | _VARINT), _to_varint(value)]
    return [_to_varint(number << 3 | _BYTES), _to_varint(len(value)), value]


def encoded_parts(number: int, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """One field whose bytes are these parts, as `encoded` gives it; none of them is copied."""
    return [_to_varint(number << 3 | _BYTES), _to_varint(sum(map(len, parts))), *parts]


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise Malformed("the file is truncated")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
