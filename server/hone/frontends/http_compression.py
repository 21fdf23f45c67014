"""gzip and deflate in both directions, bounded: a body that inflates past the limit is refused while it inflates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from hone.errors import InvalidRequest
from hone.frontends.http_errors import HttpError, input_too_large
from hone.frontends.http_tensors import Buffer

ENCODINGS = ("gzip", "deflate")

#: zlib's `wbits`: 16 more asks for the gzip form; deflate over HTTP is a zlib stream.
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_STEP_BYTES = 256 * 1024
#: Members that one gzip body may have; each costs a pass of its own.
_MAX_MEMBERS = 16
#: Tensors of random weights do not shrink: speed is worth more than the last percent.
_LEVEL = 1


def content_encoding(value: bytes | None) -> str | None:
    """The encoding of a request body, None for identity. Raises HttpError 501 (row 39) for any other."""
    if not value:
        return None
    name = value.strip().lower().decode("latin-1")
    if name in ENCODINGS:
        return name
    if name in {"", "identity"}:
        return None
    raise HttpError(
        501,
        f"Unsupported compression type '{name[:40]}': expected gzip or deflate",
        headers=((b"Accept-Encoding", b"gzip, deflate"),),
    )


def inflate(body: Buffer, encoding: str, limit: int) -> bytes:
    """The plain body. Raises InvalidRequest (corrupt or cut short) and HttpError (more than `limit` bytes)."""
    parts: list[bytes] = []
    size = 0
    rest: Buffer = body
    for _ in range(_MAX_MEMBERS):
        stream = zlib.decompressobj(_WINDOW_BITS[encoding])
        position = 0
        pending: Buffer = b""
        view = memoryview(rest)
        while not stream.eof:
            if not pending:
                pending = view[position : position + _STEP_BYTES]
                position += len(pending)
                if not pending:
                    raise InvalidRequest(f"failed to decompress the {encoding} request body: it ends too early")
            try:
                part = stream.decompress(pending, min(_STEP_BYTES, limit + 1 - size))
            except zlib.error as problem:
                raise InvalidRequest(f"failed to decompress the {encoding} request body: {problem}") from None
            pending = stream.unconsumed_tail
            size += len(part)
            if size > limit:
                raise input_too_large("decompressed request body", size, limit)
            parts.append(part)
        rest = stream.unused_data + bytes(view[position:])
        if not rest:
            return b"".join(parts)
        if encoding != "gzip":
            raise InvalidRequest(f"failed to decompress the {encoding} request body: {len(rest)} bytes follow its end")
    raise InvalidRequest(f"failed to decompress the gzip request body: it has more than {_MAX_MEMBERS} members")


def compress(parts: Sequence[Buffer], encoding: str) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    pieces = [stream.compress(part) for part in parts]
    pieces.append(stream.flush())
    return b"".join(pieces)


def accepted_encoding(value: bytes) -> str | None:
    """The encoding that an Accept-Encoding header likes best among gzip, deflate and identity (None).

    The highest weight wins, and the first of equals; `*` stands for gzip. What cannot be read is passed over.
    """
    best: str | None = None
    best_weight = 0.0
    for item in value.decode("latin-1").lower().split(","):
        name, *options = (part.strip() for part in item.split(";"))
        weight = 1.0
        for option in options:
            key, _, number = option.partition("=")
            if key.strip() == "q":
                weight = _weight(number.strip())
        if name == "*":
            name = "gzip"
        if weight > best_weight and (name in ENCODINGS or name == "identity"):
            best, best_weight = name, weight
    return best if best in ENCODINGS else None


def _weight(text: str) -> float:
    """A q-value of 0 to 1; 0 for what is none, so that it is never chosen."""
    if not text.replace(".", "", 1).isascii() or not text.replace(".", "", 1).isdigit():
        return 0.0
    return min(float(text), 1.0)
