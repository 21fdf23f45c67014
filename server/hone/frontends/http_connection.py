"""One client connection: HTTP/1.1 by httptools, requests to an ASGI application, answers in one write.

uvicorn's cycle gives plain ASGI its meaning (`send`); what costs on the tensor path is replaced: the body of a large
request is received straight into one buffer, aligned for its tensors, and an answer is one call. Everything that a
hostile client can make grow has a limit, and every state it can linger in a deadline, which `HttpServer` looks after
once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools
import numpy as np
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from hone.frontends.http_errors import Disconnected, Headers, HttpError, answer_of, input_too_large
from hone.frontends.http_exchange import SCOPE_KEY
from hone.frontends.http_tensors import Buffer

if TYPE_CHECKING:
    from hone.frontends.http_server import HttpServer

logger = logging.getLogger(__name__)

#: Bodies with at least this much still to come are received straight into their buffer.
DIRECT_BYTES = 64 * 1024
#: Bytes of a body taken in before its handler asks for it.
HIGH_WATER_BYTES = 64 * 1024
#: Answers up to this size are joined into one buffer: cheaper than a vectored write.
JOINED_BYTES = 16 * 1024
#: Tensors begin at multiples of this in a body received directly.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may cost. Times are in seconds."""

    max_body: int
    max_connections: int
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    #: Non-empty chunks of a chunked body (CVE-2025-23310).
    max_chunks: int = 65_536
    #: From the first byte of a request to the end of its head.
    head_seconds: float = 10.0
    #: Without a byte of a body that is awaited.
    body_seconds: float = 30.0
    #: Between requests: longer than the pauses of clients that keep pools of connections.
    idle_seconds: float = 300.0
    #: Without taking a byte of an answer.
    write_seconds: float = 60.0
    #: For a client to finish sending what is not wanted any more, so that it gets to read why.
    linger_seconds: float = 5.0


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


class HttpConnection(asyncio.Protocol):
    """Also the transport that uvicorn's cycle writes to: `write`, `close` and `is_closing`."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self.transport: asyncio.Transport
        self.flow: FlowControl
        self._peer: tuple[str, int] | None = None
        self._address: tuple[str, int | None] | None = None
        #: The request whose head was parsed last, the one whose handler runs, and those that wait for it.
        self._latest: HttpExchange | None = None
        self._active: HttpExchange | None = None
        self._waiting: deque[HttpExchange] = deque()
        self._in_head = False
        self._head_bytes = 0
        self._read_bytes = 0
        self._num_chunks = 0
        self._direct: _DirectBody | None = None
        #: Why no more requests are taken here, told once the present ones are answered.
        self._refusal: HttpError | None = None
        self._deaf = False
        self._discarded = 0
        self._linger_until: float | None = None
        self._since = self._loop.time()
        self._unwritten = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    # --- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.write = self.transport.write
        self.is_closing = self.transport.is_closing
        self.flow = FlowControl(self.transport)
        if not self.server.admit(self):
            self.transport.abort()
            return
        self._peer = get_remote_addr(self.transport)
        self._address = get_local_addr(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        if self._active is not None:
            self._active.lose()
        for exchange in self._waiting:
            exchange.lose()
        self._waiting.clear()
        self.flow.resume_writing()
        if self._active is None:
            self.server.forget(self)

    def eof_received(self) -> None:
        """A client that closes its side has gone: returning None closes the connection."""

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self.flow.pause_reading()
        self._since = self._loop.time()

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        if not self._waiting:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        self._read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Not taken up, as HTTP allows; but the parser cannot go on behind it.
            self._deaf = True
            if self._latest is not None:
                self._latest.keep_alive = False
        except httptools.HttpParserError as problem:
            cause = problem.__context__
            self._refuse(
                cause if isinstance(cause, HttpError) else HttpError(400, "Invalid HTTP request received.", close=True)
            )
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > self.limits.max_head_bytes:
                    self._refuse(self._head_too_large())

    # --- parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._in_head = True
        self._head_bytes = 0
        self._num_chunks = 0
        self._since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        limits = self.limits
        headers = self._headers
        if self._head_bytes + self._read_bytes > limits.max_head_bytes:
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in headers)
            if size > limits.max_head_bytes:
                raise self._head_too_large()
        if len(headers) > limits.max_headers:
            raise HttpError(
                431, f"{len(headers)} request headers, at most {limits.max_headers} are allowed", close=True
            )
        if self.server.is_full(self):
            raise HttpError(503, f"Exceeds maximum number of connections ({limits.max_connections})", close=True)
        fields = dict(headers)
        parser = self._parser
        length = fields.get(b"content-length")
        chunked = b"transfer-encoding" in fields
        if parser.should_upgrade() and (chunked or length not in {None, b"0"}):
            raise HttpError(400, "Upgrade of a request with a body is not supported", close=True)
        version = parser.get_http_version()
        if version not in {"1.1", "1.0"}:
            raise HttpError(400, f"HTTP/{version} is not supported, use HTTP/1.1", close=True)
        raw_path, path, query = _split_url(self._url)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "server": self._address,
            "client": self._peer,
            "state": {},
        }
        exchange = HttpExchange(
            self,
            scope,
            fields,
            content_length=None if chunked else int(length or 0),
            keep_alive=parser.should_keep_alive() and version != "1.0" and not self.server.stopping,
        )
        scope[SCOPE_KEY] = exchange
        self._latest = exchange
        if self._active is None:
            self._start(exchange)
        else:
            self.flow.pause_reading()
            self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        exchange = self._latest
        if exchange is None or exchange.response_complete:
            self._discard(len(body))
            return
        self._since = self._loop.time()
        exchange.feed(body)

    def on_chunk_complete(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > self.limits.max_chunks + 1:  # the last chunk is empty
            raise HttpError(
                400,
                f"Chunked request body exceeds maximum of {self.limits.max_chunks} non-empty chunks",
                close=True,
            )

    def on_message_complete(self) -> None:
        if self._latest is not None:
            self._latest.end_body()

    # --- requests

    def _start(self, exchange: HttpExchange) -> None:
        self._active = exchange
        exchange.task = self._loop.create_task(exchange.run(self.server.app))

    def response_complete(self) -> None:
        """The active request is answered: go on to the next, or wait for one."""
        exchange = self._active
        if exchange is None:
            return
        self._active = None
        self._since = self._loop.time()
        if self.transport.is_closing():
            if self._deaf:
                self.server.forget(self)
            return
        if exchange.more_body or not exchange.keep_alive:
            self.close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        elif self._refusal is not None:
            self._tell(self._refusal)
        elif not self.flow.write_paused:
            self.flow.resume_reading()

    def receive_directly(self, exchange: HttpExchange, parts: Sequence[Buffer], length: int) -> memoryview:
        """Receive the rest of a body of `length` bytes into one buffer that begins with `parts`.

        The buffer is placed so that the tensors behind the JSON header are aligned.
        """
        memory = np.empty(length + ALIGNMENT, np.uint8)
        header = exchange.fields.get(b"inference-header-content-length", b"")
        ahead = int(header) if header.isdigit() and len(header) < 10 else 0
        start = -(memory.ctypes.data + ahead) % ALIGNMENT
        body: memoryview = memory.data[start : start + length]
        filled = 0
        for part in parts:
            body[filled : filled + len(part)] = part
            filled += len(part)
        self._direct = _DirectBody(self, exchange, body, filled)
        self._switch(self._direct)
        return body

    def direct_progress(self) -> None:
        self._since = self._loop.time()

    def direct_complete(self, exchange: HttpExchange) -> None:
        # The parser never saw the body, so that the next request needs a new one.
        self._parser = self._new_parser()
        self._direct = None
        self._switch(self)
        exchange.end_body()

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        self.transport.pause_reading()
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()

    # --- ends

    def close(self) -> None:
        """Close once the answers are written; a client that is still sending gets a while to read the last of them."""
        if self.transport.is_closing() or self._linger_until is not None:
            return
        exchange = self._latest
        sending = self._refusal is not None or (exchange is not None and exchange.more_body)
        self._deaf = True
        if not sending:
            self.transport.close()
            return
        self._linger_until = self._loop.time() + self.limits.linger_seconds
        if self._direct is not None:
            self._direct = None
            self._switch(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """The server stops: requests in flight end, then the connection; an idle one closes at once."""
        if self._active is None:
            self._deaf = True
            self.transport.close()
        else:
            self._active.keep_alive = False

    def cancel(self) -> None:
        """End what still runs, without an answer."""
        if self._active is not None and self._active.task is not None:
            self._active.task.cancel()
        self.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connection if it has been in its state for too long."""
        limits = self.limits
        if self._linger_until is not None:
            if now >= self._linger_until:
                self.transport.abort()
            return
        unwritten = self.transport.get_write_buffer_size()
        if unwritten:
            if unwritten != self._unwritten:
                self._unwritten, self._since = unwritten, now
            elif now - self._since > limits.write_seconds:
                self.transport.abort()
            return
        self._unwritten = 0
        waited = now - self._since
        active = self._active
        if active is None:
            if self._in_head:
                if waited > limits.head_seconds:
                    self._refuse(HttpError(408, "The request head did not arrive in time", close=True))
            elif waited > limits.idle_seconds:
                self._deaf = True
                self.transport.close()
        elif active.more_body and active.wants_body and waited > limits.body_seconds:
            active.refuse(HttpError(408, "The request body did not arrive in time", close=True))

    def _refuse(self, error: HttpError) -> None:
        """Take no more bytes as requests; the one they belong to, or the connection, is answered with `error`."""
        self._deaf = True
        self._refusal = error
        if self._latest is not None and self._latest.more_body and not self._in_head:
            self._latest.refuse(error)
        elif self._active is None:
            self._tell(error)

    def _tell(self, error: HttpError) -> None:
        status, headers, content, _ = answer_of(error)
        lines = [self.server.status_line(status)]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"Content-Length: %d\r\n\r\n" % len(content), content)))
        self.close()

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > 4 * self.limits.max_body:
            self.transport.abort()

    def _head_too_large(self) -> HttpError:
        return HttpError(431, f"The request head exceeds {self.limits.max_head_bytes} bytes", close=True)

    def _new_parser(self) -> Any:
        return httptools.HttpRequestParser(self)


class _DirectBody(asyncio.BufferedProtocol):
    """Receives the rest of one body into its buffer, in place of the connection."""

    def __init__(self, connection: HttpConnection, exchange: HttpExchange, body: memoryview, filled: int) -> None:
        self._connection = connection
        self._exchange = exchange
        self._rest = body[filled:]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        if self._rest:
            self._connection.direct_progress()
        else:
            self._connection.direct_complete(self._exchange)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


_ASGI = {"version": "3.0", "spec_version": "2.3"}


def _split_url(url: bytes) -> tuple[bytes, str, bytes]:
    """Raw path, decoded path and query. Raises what httptools raises for a malformed URL."""
    query = b""
    if not url.startswith(b"/") or b"?" in url or b"#" in url:
        parsed = httptools.parse_url(url)
        url, query = parsed.path or b"/", parsed.query or b""
    path = url.decode("ascii")
    return url, unquote(path) if "%" in path else path, query
