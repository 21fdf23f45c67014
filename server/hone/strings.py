"""BYTES tensors as the protocol writes them: each element behind its length, four bytes little-endian."""

from __future__ import annotations

import struct

import numpy as np

from hone.errors import InvalidRequest
from hone.types import Array

_LENGTH = struct.Struct("<I")


def from_length_prefixed(name: str, content: bytes | bytearray | memoryview, count: int) -> Array:
    """A flat BYTES tensor of exactly `count` elements, each after its length in four little-endian bytes.

    Raises InvalidRequest where lengths and elements do not fill `content` exactly. Allocates by what `content` holds,
    not by what `count` claims.
    """
    content = bytes(content)
    found: list[bytes] = []
    end = len(content)
    position = 0
    while position < end:
        start = position + _LENGTH.size
        if start > end:
            raise InvalidRequest(
                f"incomplete string length indicator for inference input '{name}', expecting {_LENGTH.size} bytes but"
                f" only {end - position} bytes available"
            )
        (length,) = _LENGTH.unpack_from(content, position)
        position = start + length
        if position > end:
            raise InvalidRequest(
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only"
                f" {end - start} bytes available"
            )
        found.append(content[start:position])
    if len(found) > count:
        raise InvalidRequest(
            f"unexpected number of string elements {len(found)} for inference input '{name}', expecting {count}"
        )
    if len(found) < count:
        raise InvalidRequest(f"expected {count} string elements for inference input '{name}', got {len(found)}")
    strings: Array = np.empty(count, np.object_)
    strings[:] = found
    return strings


def to_length_prefixed(array: Array) -> bytes:
    parts: list[bytes] = []
    for item in array.reshape(-1):
        parts += (_LENGTH.pack(len(item)), item)
    return b"".join(parts)
