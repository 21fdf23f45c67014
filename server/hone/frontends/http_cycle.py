"""A request on one of hone's own connections, and its answer.

uvicorn's cycle gives plain ASGI its meaning (`send`); what costs on the tensor path is replaced: a large body is
received straight into one buffer, and an answer is one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from hone.frontends.http_errors import Disconnected, Headers, HttpError, answer_of, input_too_large
from hone.frontends.http_tensors import Buffer

if TYPE_CHECKING:
    from hone.frontends.http_connection import HttpConnection

logger = logging.getLogger(__name__)

#: Bodies with at least this much still to come are received straight into their buffer.
DIRECT_BYTES = 64 * 1024
#: Bytes of a body taken in before its handler asks for it.
HIGH_WATER_BYTES = 64 * 1024
#: Answers up to this size are joined into one buffer: cheaper than a vectored write.
JOINED_BYTES = 16 * 1024


class HttpExchange(RequestResponseCycle):
    """One request and its answer: both an `Exchange` and plain ASGI's `receive` and `send`."""

    def __init__(
        self,
        connection: HttpConnection,
        scope: dict[str, Any],
        fields: Mapping[bytes, bytes],
        *,
        content_length: int | None,
        keep_alive: bool,
    ) -> None:
        super().__init__(
            scope=cast(Any, scope),
            transport=cast(Any, connection),
            flow=connection.flow,
            logger=logger,
            access_logger=logger,
            access_log=False,
            default_headers=connection.server.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=b"expect" in fields and fields[b"expect"].lower() == b"100-continue",
            keep_alive=keep_alive,
            on_response=connection.response_complete,
        )
        self.fields = fields
        self._connection = connection
        #: None for a chunked body.
        self._content_length = content_length
        self._parts: list[Buffer] = []
        self._size = 0
        self._wanted = False
        self._received = False
        self._refusal: HttpError | None = None
        self._when_gone: Callable[[], object] | None = None
        self.task: asyncio.Task[None] | None = None

    # --- Exchange

    @property
    def gone(self) -> bool:
        return self.disconnected

    def whole_body(self) -> Buffer | None:
        if self.more_body or self._size > self._connection.limits.max_body:
            return None  # for read_body to wait or to refuse
        return self._take_body()

    async def read_body(self) -> Buffer:
        limit = self._connection.limits.max_body
        if self._content_length is not None and self._content_length > limit:
            raise input_too_large("request body", self._content_length, limit, close=True)
        self._want_body()
        if self.more_body and self._content_length is not None and self._content_length - self._size >= DIRECT_BYTES:
            self._parts = [self._connection.receive_directly(self, self._parts, self._content_length)]
        while self.more_body:
            if self._size > limit:
                raise input_too_large("request body", self._size, limit, close=True)
            await self._progress()
        if self._size > limit:
            raise input_too_large("request body", self._size, limit, close=True)
        return self._take_body()

    def call_when_gone(self, callback: Callable[[], object] | None) -> None:
        self._when_gone = callback
        if callback is not None and self.disconnected:
            callback()

    async def answer(self, status: int, headers: Headers, body: Sequence[Buffer]) -> None:
        connection = self._connection
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.more_body:
            self.keep_alive = False
        lines = [connection.server.status_line(status)]
        length = 0
        for part in body:
            length += len(part)
        told_close = False
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            if name == b"Connection":
                told_close = True
        if told_close:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(b"Content-Length: %d\r\n\r\n" % length)
        self.response_started = True
        if length <= JOINED_BYTES:
            connection.transport.write(b"".join((*lines, *body)))
        else:
            connection.transport.writelines((b"".join(lines), *body))
        self.response_complete = True
        if not self.keep_alive:
            connection.close()
        connection.response_complete()

    # --- plain ASGI

    async def receive(self) -> Any:
        """The whole body as one message, then the disconnect. A body that is refused looks like a disconnect."""
        if not self._received:
            self._received = True
            try:
                body = await self.read_body()
            except HttpError as error:
                self._refusal = error
                return {"type": "http.disconnect"}
            except Disconnected:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": bytes(body), "more_body": False}
        while not (self.disconnected or self.response_complete):
            await self.message_event.wait()
            self.message_event.clear()
        return {"type": "http.disconnect"}

    # --- the connection's side

    @property
    def wants_body(self) -> bool:
        return self._wanted

    async def run(self, app: Any) -> None:
        try:
            await self._run(app)
        finally:
            self._connection.exchange_ended(self)

    async def _run(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except HttpError as error:
            self._refusal = self._refusal or error
        except Exception as error:
            logger.error("unexpected error in the ASGI application", exc_info=error)
        if self.disconnected or self.response_complete:
            return
        if self.response_started:
            self._connection.abort()
            return
        refusal = self._refusal or HttpError(500, "internal error", close=True)
        status, headers, content, _ = answer_of(refusal)
        await self.answer(status, headers, [content])

    def feed(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if not self._wanted:
            if self._size > HIGH_WATER_BYTES:
                self.flow.pause_reading()
        elif self._size > self._connection.limits.max_body:
            self.message_event.set()

    def end_body(self, size: int | None = None) -> None:
        if size is not None:
            self._size = size
        self.more_body = False
        self.message_event.set()

    def refuse(self, error: HttpError) -> None:
        """The rest of the request is not coming, for this reason; the handler answers it."""
        self._refusal = error
        self.message_event.set()

    def lose(self) -> None:
        self.disconnected = True
        self.message_event.set()
        callback, self._when_gone = self._when_gone, None
        if callback is not None:
            callback()

    def _want_body(self) -> None:
        if self.waiting_for_100_continue and not self._connection.is_closing():
            self.waiting_for_100_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._wanted:
            self._wanted = True
            self.flow.resume_reading()

    async def _progress(self) -> None:
        if self.disconnected:
            raise Disconnected
        if self._refusal is not None:
            raise self._refusal
        await self.message_event.wait()
        self.message_event.clear()

    def _take_body(self) -> Buffer:
        if self.disconnected and self.more_body:
            raise Disconnected
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)
