"""Digests: SHA-256 over canonical JSON for keys, and over bytes for files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from hone.kernels.files import open_regular

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(fields: Mapping[str, JSON]) -> str:
    """SHA-256, in hexadecimal, of the fields as canonical JSON: the order of keys does not matter, all else does.

    Raises TypeError for what JSON does not have (tuples count as lists) and ValueError for NaN and infinities, both
    naming the place: a key that is silently turned into text would be the same for different things.
    """
    return hashlib.sha256(canonical_json(fields)).hexdigest()


def canonical_json(value: JSON) -> bytes:
    """Sorted keys, no spaces, ASCII only. Raises as `digest_of`."""
    _check(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest_of_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a regular file's content. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def _check(value: object, place: str) -> None:
    match value:
        case None | bool() | str():
            return
        case int():
            if type(value) is not int:
                raise TypeError(f"{place or 'value'}: {type(value).__name__} is not plain JSON, convert it first")
        case float():
            if type(value) is not float:
                raise TypeError(f"{place or 'value'}: {type(value).__name__} is not plain JSON, convert it first")
            if not math.isfinite(value):
                raise ValueError(f"{place or 'value'}: {value} has no place in JSON")
        case dict():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise TypeError(f"{place or 'value'}: key {name!r} is {type(name).__name__}, expected a string")
                _check(item, f"{place}.{name}" if place else name)
        case list() | tuple():
            for index, item in enumerate(value):
                _check(item, f"{place}[{index}]")
        case _:
            raise TypeError(f"{place or 'value'}: {type(value).__name__} is not JSON")
