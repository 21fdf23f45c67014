"""How errors leave over gRPC: one table from `ErrorKind` to status code, and the one place that aborts a call."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
import grpc.aio

from hone.errors import ErrorKind, HoneError

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

STATUS_CODES: dict[ErrorKind, grpc.StatusCode] = {
    ErrorKind.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorKind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorKind.RESTRICTED: grpc.StatusCode.UNAVAILABLE,
}

#: Details travel percent-encoded in a trailer, and clients refuse more than 8 KiB of trailers: a name of a megabyte
#: in a message must not replace the status by the client's own complaint.
MAX_DETAILS_BYTES = 2048


def status_of(problem: Exception, method: str) -> tuple[grpc.StatusCode, str]:
    """Status and details for `problem`. What is not a `HoneError` is a fault of ours: logged whole, never told."""
    if isinstance(problem, HoneError):
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s failed: %s", method, problem)
        return STATUS_CODES[problem.kind], _shortened(str(problem))
    log.error("unexpected error in %s", method, exc_info=problem)
    return grpc.StatusCode.INTERNAL, "internal error"


async def abort(context: Context, problem: Exception, method: str) -> NoReturn:
    """End the call with the status of `problem`. Call it from the handler only: it raises to unwind."""
    code, details = status_of(problem, method)
    await context.abort(code, details)
    raise AssertionError("context.abort returned")  # for the type checker: abort always raises


def _shortened(details: str) -> str:
    encoded = details.encode("utf-8", "replace")
    if len(encoded) <= MAX_DETAILS_BYTES:
        return encoded.decode("utf-8")
    return encoded[: MAX_DETAILS_BYTES - 3].decode("utf-8", "ignore") + "..."
