"""The HTTP server: a listening socket, its connections, and one look a second at their deadlines."""

from __future__ import annotations

import asyncio
import logging
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from hone.config import Settings
from hone.frontends.http_connection import ConnectionLimits, HttpConnection

logger = logging.getLogger(__name__)

#: Connections that may wait to be accepted.
BACKLOG = 4096
#: Connections over the limit that are kept long enough to be told so; beyond them they are cut.
_MAX_REFUSED = 256
_SWEEP_SECONDS = 1.0


class HttpServer:
    """Serves an ASGI application on the running event loop; signals are the application's business.

    `start` binds (port 0 takes a free one, see `port`) and returns at once; `stop` lets what is in flight finish.
    """

    def __init__(
        self, app: Any, host: str, port: int, *, settings: Settings, limits: ConnectionLimits | None = None
    ) -> None:
        self.app = app
        self.host = host
        self.port = port
        self.limits = limits or ConnectionLimits(settings.http_max_input_size, settings.http_max_connections)
        self.stopping = False
        self.default_headers: list[tuple[bytes, bytes]] = []
        self._status_lines: dict[int, bytes] = {}
        self._connections: set[HttpConnection] = set()
        self._refused: set[HttpConnection] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Raises OSError where the address cannot be bound."""
        loop = asyncio.get_running_loop()
        self._tick(loop)
        try:
            self._server = await loop.create_server(
                lambda: HttpConnection(self), self.host, self.port, backlog=BACKLOG, reuse_address=True
            )
        except OSError:
            self._end_ticks()
            raise
        names = [listener.getsockname() for listener in self._server.sockets]
        self.port = names[0][1]

    async def stop(self, deadline_seconds: float) -> None:
        """Accept no more, close idle connections, let requests in flight finish; cut what is left at the deadline."""
        self.stopping = True
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._all_gone.wait()
        except TimeoutError:
            logger.warning("%d HTTP connections did not end in time and are cut", len(self._connections))
            for connection in list(self._connections):
                connection.cancel()
            try:
                async with asyncio.timeout(_SWEEP_SECONDS):
                    await self._all_gone.wait()
            except TimeoutError:
                logger.error("%d HTTP requests did not end when cancelled", len(self._connections))
        self._end_ticks()
        await self._server.wait_closed()
        self._server = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # --- what connections ask

    def admit(self, connection: HttpConnection) -> bool:
        """Take a new connection in. One over the limit is refused at its first request; False cuts it at once."""
        if self.stopping or len(self._refused) >= _MAX_REFUSED:
            return False
        if len(self._connections) - len(self._refused) >= self.limits.max_connections:
            self._refused.add(connection)
        self._connections.add(connection)
        self._all_gone.clear()
        return True

    def is_full(self, connection: HttpConnection) -> bool:
        """Whether this connection is one too many."""
        return connection in self._refused

    def forget(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._refused.discard(connection)
        if not self._connections:
            self._all_gone.set()

    def status_line(self, status: int) -> bytes:
        """The status line and the Date header of an answer."""
        line = self._status_lines.get(status)
        if line is None:
            date = formatdate(time.time(), usegmt=True)
            line = f"HTTP/1.1 {status} {_phrase(status)}\r\nDate: {date}\r\n".encode("ascii")
            self._status_lines[status] = line
        return line

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._status_lines.clear()
        self.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode("ascii"))]
        now = loop.time()
        for connection in list(self._connections):
            connection.sweep(now)
        self._sweep = loop.call_later(_SWEEP_SECONDS, self._tick, loop)

    def _end_ticks(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
