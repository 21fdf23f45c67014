"""`GET /metrics` as a plain ASGI application, for a port of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from hone.metrics.collector import Metrics
from hone.metrics.exposition import CONTENT_TYPE

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_Headers: TypeAlias = list[tuple[bytes, bytes]]


class MetricsEndpoint:
    """ASGI callable: GET and HEAD of `/metrics`; 405 for other methods, 404 elsewhere."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        elif scope["path"] != "/metrics":
            await _plain(send, 404, b"Not Found\n", [])
        elif scope["method"] not in ("GET", "HEAD"):
            await _plain(send, 405, b"Method Not Allowed\n", [(b"allow", b"GET, HEAD")])
        else:
            await self._metrics_text(send, body=scope["method"] == "GET")

    async def _metrics_text(self, send: Send, *, body: bool) -> None:
        headers: _Headers = [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if body:
            async for piece in self._metrics.stream():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _plain(send: Send, status: int, body: bytes, headers: _Headers) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
