"""Floor over HTTP: a raw ASGI application on uvicorn with uvloop and httptools, and nothing between it and the bytes.

``python -m benchmarks.bare.http_asgi`` serves one identity model on a free loopback port and prints that port.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from benchmarks.bare.uvicorn_floor import serve
from benchmarks.bare.v2 import IdentityModel

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class IdentityApp:
    def __init__(self) -> None:
        self._model = IdentityModel()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._infer(scope, receive, send)
        else:
            answer = self._model.get(scope["path"])
            await self._send_json(send, 404 if answer is None else 200, answer or {"error": "Not Found"})

    async def _infer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        head_size = None
        for name, value in scope["headers"]:
            if name == b"inference-header-content-length":
                head_size = int(value)
        if head_size is None:
            await self._send_json(send, 400, {"error": "this floor takes binary tensors only"})
            return
        message = await receive()
        body: bytes = message["body"]
        if message.get("more_body"):
            parts = [body]
            while message.get("more_body"):
                message = await receive()
                parts.append(message["body"])
            body = b"".join(parts)
        view = memoryview(body)
        tensor = view[head_size:]
        head = self._model.infer(view[:head_size], len(tensor))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"application/octet-stream"),
                    (b"inference-header-content-length", b"%d" % len(head)),
                    (b"content-length", b"%d" % (len(head) + len(tensor))),
                ],
            }
        )
        await send({"type": "http.response.body", "body": b"".join((head, tensor))})

    async def _send_json(self, send: Send, status: int, content: dict[str, Any]) -> None:
        body = orjson.dumps(content)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    serve(IdentityApp())
