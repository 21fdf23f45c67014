"""One client connection: HTTP/1.1 by httptools, requests to an ASGI application, answers in their order.

Large bodies are received straight into one buffer, aligned for their tensors. Everything that a hostile client can make
grow has a limit, and every state it can linger in a deadline, which `HttpServer` looks after once a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools
import numpy as np
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from hone.frontends.http_cycle import HttpExchange
from hone.frontends.http_errors import HttpError, answer_of
from hone.frontends.http_exchange import SCOPE_KEY
from hone.frontends.http_tensors import Buffer

if TYPE_CHECKING:
    from hone.frontends.http_server import HttpServer

#: Requests that may wait on one connection behind the one that runs; only reading on shows that a client went away.
MAX_PIPELINED = 32
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
        self._lost = False
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
        self._deaf = self._lost = True
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
        if len(self._waiting) < MAX_PIPELINED:
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
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_PIPELINED:
                self.flow.pause_reading()

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
            if self._lost:
                self.server.forget(self)
            return
        if exchange.more_body or not exchange.keep_alive:
            self.close()
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._refusal is not None:
            self._tell(self._refusal)
            return
        if not self.flow.write_paused and len(self._waiting) < MAX_PIPELINED:
            self.flow.resume_reading()

    def exchange_ended(self, exchange: HttpExchange) -> None:
        """Its handler has ended. If it still counts as active, nobody was answered: the client is gone, or must go."""
        if self._active is not exchange:
            return
        self._active = None
        if self._lost:
            self.server.forget(self)
        else:
            self.transport.abort()

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
