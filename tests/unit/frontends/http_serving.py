"""A served HTTP front end in a thread of its own, and plain clients that show every byte."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from hone.config import Settings
from hone.frontends.http import HttpApp, build_http_app
from hone.frontends.http_connection import ConnectionLimits
from hone.frontends.http_server import HttpServer
from tests.unit.frontends.http_fakes import FakeService

PATIENCE_SECONDS = 20


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of an error, which must have the one form that clients read."""
        assert self.status != 200
        assert self.headers["content-type"] == "application/json"
        document = self.json()
        assert isinstance(document["error"], str)
        assert document["error"]
        return document["error"]


@dataclass
class Served:
    service: FakeService
    app: HttpApp
    server: HttpServer
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return self.server.port

    def run(self, coroutine: Any) -> Any:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_SECONDS)

    def on_loop(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return self.run(call())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.on_loop(condition):
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def send(self, data: bytes) -> bytes:
        """Send bytes as they are, and read until the server closes."""
        with self.connect() as client:
            client.sendall(data)
            return read_to_end(client)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, fields, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, document: Any = None, headers: dict[str, str] | None = None) -> Reply:
        body = document if isinstance(document, (bytes, str)) or document is None else json.dumps(document)
        return self.ask("POST", path, body, headers)

    def infer(self, model: str, document: Any, tensors: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
        header = document if isinstance(document, bytes) else json.dumps(document).encode()
        fields = {"Inference-Header-Content-Length": str(len(header)), **(headers or {})}
        return self.post(f"/v2/models/{model}/infer", header + tensors, fields)


def read_to_end(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass  # what was received before still counts
    return b"".join(parts)


def read_reply(client: socket.socket) -> Reply:
    """Read exactly one response that has a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1)
        assert part, f"closed after {data!r}"
        data += part
    head = data.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in head[1:] if line)}
    body = b""
    while len(body) < int(headers["content-length"]):
        part = client.recv(int(headers["content-length"]) - len(body))
        assert part, "closed within a body"
        body += part
    return Reply(int(head[0].split()[1]), headers, body)


def replies(data: bytes) -> list[Reply]:
    """All responses in what a connection sent until its end."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
        length = int(headers["content-length"])
        found.append(Reply(int(lines[0].split()[1]), headers, rest[:length]))
        data = rest[length:]
    return found


@contextmanager
def serving(
    service: FakeService | None = None,
    *,
    settings: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Iterator[Served]:
    """Serve until the block ends; the server must then stop cleanly."""
    service = service or FakeService()
    configured = Settings(**(settings or {}))
    loop = loop_factory()
    app = build_http_app(service, configured)

    async def start() -> HttpServer:
        bounds = ConnectionLimits(
            **{
                "max_body": configured.http_max_input_size,
                "max_connections": configured.http_max_connections,
                **(limits or {}),
            }
        )
        server = HttpServer(app, "127.0.0.1", 0, settings=configured, limits=bounds)
        await server.start()
        return server

    thread = threading.Thread(target=loop.run_forever, name="http-under-test")
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_SECONDS)
        served = Served(service, app, server, loop)
        try:
            yield served
        finally:
            served.run(server.stop(1.0))
        assert server.num_connections == 0
        assert service.num_leases == 0
    finally:
        app.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        loop.close()
