"""HTTP as bytes on a socket: what no client library would send."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from tests.running import DEADLINE_SECONDS

INFER = b"/v2/models/identity_fp32/infer"
DOCUMENT = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'


def request(body: bytes = DOCUMENT, *headers: bytes, path: bytes = INFER, length: int | None = None) -> bytes:
    """A whole request; `length` tells a lie about the body."""
    size = len(body) if length is None else length
    lines = [b"POST %s HTTP/1.1" % path, b"Host: localhost", b"Content-Length: %d" % size, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*chunks: bytes, headers: tuple[bytes, ...] = (), end: bytes = b"0\r\n\r\n") -> bytes:
    lines = [b"POST %s HTTP/1.1" % INFER, b"Host: localhost", b"Transfer-Encoding: chunked", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + end


class Reply:
    """One response, read whole."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert set(self.document) == {"error"}, self.document
        error: str = self.document["error"]
        return error

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


class RawConnection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
        self._received = b""

    def send(self, data: bytes) -> None:
        """Send; a server that has closed before the end is not an error here, its answer says why."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def reply(self) -> Reply | None:
        """The next response, None where the server closed instead."""
        while b"\r\n\r\n" not in self._received:
            if not self._more():
                assert not self._received, f"the server closed within a head: {self._received!r}"
                return None
        head, _, rest = self._received.partition(b"\r\n\r\n")
        status_line, _, fields = head.partition(b"\r\n")
        parsed = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
        headers = {name.lower(): value for name, value in parsed.items()}
        status = int(status_line.split()[1])
        length = int(headers.get("content-length", "0"))
        self._received = rest
        while len(self._received) < length:
            assert self._more(), "the server closed within a body"
        body, self._received = self._received[:length], self._received[length:]
        return Reply(status, headers, body)

    def closed(self) -> bool:
        """Whether the server closes the connection now, without another byte."""
        return not self._received and not self._more()

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)


@contextlib.contextmanager
def connected(port: int) -> Iterator[RawConnection]:
    connection = RawConnection(port)
    try:
        yield connection
    finally:
        connection.socket.close()


def ask(port: int, data: bytes) -> Reply:
    """The answer to one request on a connection of its own."""
    with connected(port) as connection:
        connection.send(data)
        reply = connection.reply()
        assert reply is not None, "the server closed the connection without an answer"
        return reply


def still_serves(port: int) -> None:
    """Assert that a good request is answered after whatever came before."""
    began = time.monotonic()
    reply = ask(port, request())
    assert reply.status == 200 and reply.document["outputs"][0]["data"] == [1.0, 2.0], reply
    assert time.monotonic() - began < DEADLINE_SECONDS
