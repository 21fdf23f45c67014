"""Servers that answer as a test wants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], int]]:
    """Starts a server that gives these bytes to whoever connects, and returns its port."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


class ModelServer:
    """The HTTP of a server with one model `m` (input IN of four numbers, batching). `calls` are the engines that each
    stretch of inference requests asked for ("" for none), and actions, in their order."""

    def __init__(self) -> None:
        self.state, self.is_tuned, self.refuse = "tuned", True, 0
        self.datatype = "FP32"
        self.choice = "offered"
        """Of the engine by requests: "offered", "ignored" as by older servers, or "locked" behind a key."""
        self.calls: list[str] = []
        self.requests: list[bytes] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None: ...

            def do_GET(self) -> None:
                self._answer(*outer.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(*outer.post(self.path, body))

            def _answer(self, status: int, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        if path.endswith("/tuning"):
            return 200, self.status()
        if path.endswith("/config"):
            return 200, {"max_batch_size": 8}
        if path == "/v2/models/m":
            inputs = [{"name": "IN", "datatype": self.datatype, "shape": [-1, 4]}]
            return 200, {"name": "m", "inputs": inputs, "outputs": []}
        return 404, {"error": f"{path} is not found"}

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if path.endswith("/infer"):
            document, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
            engine = document["parameters"].get("hone_engine", "")
            with self._lock:
                self.requests.append(body)
                if self.calls[-1:] != [engine]:
                    self.calls.append(engine)
                if self.refuse and len(self.requests) > self.refuse:
                    return 400, {"error": "no"}
            return self._infer(engine, document["inputs"][0]["shape"][0])
        action = json.loads(body)["action"]
        self.calls.append(action)
        self.is_tuned = action in ("start", "pause")
        self.state = {"start": "tuned", "pause": "paused"}.get(action, "baseline")
        return 200, self.status()

    def _infer(self, engine: str, rows: int) -> tuple[int, Any]:
        if not engine or self.choice == "ignored":
            return 200, {"outputs": []}
        if self.choice == "locked":
            return 403, {"error": "This API is restricted, expecting header 'tuner'"}
        if engine == "tuned" and not (self.is_tuned and rows == 1):
            return 503, {"error": "no tuned engine runs it"}
        return 200, {"parameters": {"hone_engine": "tvm" if engine == "tuned" else "onnxruntime"}, "outputs": []}

    def status(self) -> dict[str, Any]:
        bucket = {
            "signature": "IN:FP32[1,4]",
            "engine": "tvm" if self.is_tuned else "onnxruntime",
            "baseline_ms": 1.0,
            "tuned_ms": 0.5,
            "speedup": 2.0,
            "max_error": 0.0,
            "provisional": False,
            "outcome": "passed",
            "reason": "",
        }
        return {
            "model": "m", "version": "1", "state": self.state, "progress": 1.0, "reason": "",
            "buckets": [bucket], "history": [],
        }  # fmt: skip


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    server = ModelServer()
    yield server
    server.stop()
