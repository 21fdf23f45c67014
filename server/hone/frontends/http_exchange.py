"""One request and its answer, as handlers see them, over any ASGI server.

hone's own connections (http_connection.py) offer an `Exchange` that knows the whole request and writes an answer with
one call; `AsgiExchange` gives the same over plain ASGI messages. Handlers are written once, against the former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

from hone.frontends.http_errors import Disconnected, Headers, input_too_large
from hone.frontends.http_tensors import Buffer

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: Key of the scope under which hone's own connections put their exchange.
SCOPE_KEY = "hone.exchange"

#: A request that takes longer than this is watched for the client's going away.
WATCH_AFTER_SECONDS = 0.01


class Exchange(Protocol):
    #: Request headers by lower-case name; the last of a name counts.
    fields: Mapping[bytes, bytes]
    #: Whether the client has gone away.
    gone: bool
    #: The task that handles the request, where the exchange knows it.
    task: asyncio.Task[None] | None

    def whole_body(self) -> Buffer | None:
        """The body if it has arrived in full, so that small requests wait for nothing."""

    async def read_body(self) -> Buffer:
        """The whole body. Raises HttpError (too large, too slow), Disconnected."""

    def call_when_gone(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` once when the client goes away while its request runs; None takes it back."""

    async def answer(self, status: int, headers: Headers, body: Sequence[Buffer]) -> None:
        """Send the whole response; Content-Length is added. A client that is gone is no error."""


class AsgiExchange:
    """`Exchange` over plain ASGI messages."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        self.fields: Mapping[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        self.gone = False
        self.task: asyncio.Task[None] | None = None
        self._receive = receive
        self._send = send
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    def whole_body(self) -> Buffer | None:
        return None

    async def read_body(self) -> Buffer:
        length = self.fields.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit:
            raise input_too_large("request body", int(length), self._limit, close=True)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            size += len(part)
            if size > self._limit:
                raise input_too_large("request body", size, self._limit, close=True)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def call_when_gone(self, callback: Callable[[], object] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if callback is not None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._start_watch, callback)

    def _start_watch(self, callback: Callable[[], object]) -> None:
        self._timer = None
        self._watch = asyncio.ensure_future(self._wait_for_disconnect(callback))

    async def _wait_for_disconnect(self, callback: Callable[[], object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._watch = None
        self.gone = True
        callback()

    async def answer(self, status: int, headers: Headers, body: Sequence[Buffer]) -> None:
        length = (b"Content-Length", b"%d" % sum(map(len, body)))
        lowered = [(name.lower(), value) for name, value in (*headers, length)]
        await self._send({"type": "http.response.start", "status": status, "headers": lowered})
        await self._send({"type": "http.response.body", "body": b"".join(body)})
