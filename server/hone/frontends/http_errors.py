"""How errors look over HTTP: one table from `ErrorKind` to a status, and `{"error": "..."}` as the only form."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import orjson

from hone.errors import ErrorKind, HoneError

logger = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

STATUS_OF_KIND: Mapping[ErrorKind, int] = {
    ErrorKind.INVALID_ARGUMENT: 400,
    ErrorKind.ALREADY_EXISTS: 400,
    ErrorKind.CANCELLED: 400,
    ErrorKind.RESTRICTED: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.INTERNAL: 500,
    ErrorKind.UNSUPPORTED: 501,
    ErrorKind.UNAVAILABLE: 503,
}

JSON_HEADERS: Headers = ((b"Content-Type", b"application/json"),)


class HttpError(Exception):
    """A refusal that only HTTP knows, with its own status; `close` ends the connection after the answer."""

    def __init__(self, status: int, message: str, *, headers: Headers = (), close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.close = close


class Disconnected(Exception):
    """The client went away: there is nobody to answer."""


def not_found() -> HttpError:
    return HttpError(404, "Not Found")


def method_not_allowed(allowed: str) -> HttpError:
    return HttpError(405, "Method Not Allowed", headers=((b"Allow", allowed.encode("ascii")),))


def input_too_large(what: str, size: int, limit: int, *, close: bool = False) -> HttpError:
    """Row 37 of the error table; the names of the flags are part of Triton's message."""
    return HttpError(
        400,
        f"{what} of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
        " Use --http-max-input-size to increase the limit.",
        close=close,
    )


def error_body(message: str) -> bytes:
    try:
        return orjson.dumps({"error": message})
    except orjson.JSONEncodeError:
        # Lone surrogates of a client's text (file names, JSON escapes) have no UTF-8 form.
        return orjson.dumps({"error": message.encode("utf-8", "replace").decode("utf-8")})


def answer_of(error: Exception, request_id: str = "") -> tuple[int, Headers, bytes, bool]:
    """Status, headers, body and whether to close. A surprise is logged with its traceback and told as nothing."""
    if isinstance(error, HoneError):
        return STATUS_OF_KIND[error.kind], JSON_HEADERS, error_body(str(error)), False
    if isinstance(error, HttpError):
        headers = JSON_HEADERS + error.headers
        if error.close:
            headers += ((b"Connection", b"close"),)
        return error.status, headers, error_body(str(error)), error.close
    logger.error("unexpected error in an HTTP request%s", f" (id {request_id})" if request_id else "", exc_info=error)
    return 500, JSON_HEADERS, error_body("internal error"), False
