"""JSON as clients of the protocol write it: NaN and Infinity allowed, nesting bounded, always an `InvalidRequest`
when it cannot be read. orjson does the work; the standard library takes over for what orjson refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

from hone.errors import InvalidRequest
from hone.types import Array

MAX_DEPTH = 100

_NOT_STRUCTURE = bytes(b for b in range(256) if b not in b'[]{}"')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE_STRING = re.compile(rb'"[^"]*"')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STRING_OR_INF = re.compile(r'"(?:[^"\\]|\\.)*"|\bInf\b', re.DOTALL)


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Parse JSON. Raises InvalidRequest for anything that is not JSON nested at most MAX_DEPTH deep."""
    raw = text if isinstance(text, bytes) else bytes(text)
    check_depth(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if b"NaN" in raw or b"Inf" in raw:
            return _loads_non_finite(raw)
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None


def check_depth(raw: bytes) -> None:
    """Raise InvalidRequest when brackets nest deeper than MAX_DEPTH, without parsing."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    if b"\\" in raw:
        raw = _STRING.sub(b"", raw)
    brackets = raw.translate(None, _NOT_STRUCTURE)
    if b'"' in brackets:
        brackets = _BARE_STRING.sub(b"", brackets)
    codes = np.frombuffer(brackets, np.uint8)
    opening = (codes == ord("[")) | (codes == ord("{"))
    closing = (codes == ord("]")) | (codes == ord("}"))
    depth = np.cumsum(opening.astype(np.int32) - closing.astype(np.int32))
    if int(depth.max(initial=0)) > MAX_DEPTH:
        raise InvalidRequest(f"JSON nesting depth exceeds maximum allowed depth of {MAX_DEPTH}")


def _loads_non_finite(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
        if "Inf" in text:
            text = _STRING_OR_INF.sub(lambda match: "Infinity" if match[0] == "Inf" else match[0], text)
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone halves of a pair have no UTF-8 form
        return value
    except RecursionError:
        raise InvalidRequest(f"JSON nesting depth exceeds maximum allowed depth of {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    except ValueError as error:  # not UTF-8, or an integer of thousands of digits
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None


def dump_numbers(array: Array) -> bytes:
    """A flat JSON list of numbers or booleans, row-major; NaN and Infinity as the literals of the protocol."""
    if array.size == 0:
        return b"[]"
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return json.dumps(flat.tolist(), separators=(",", ":")).encode("ascii")
    return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
