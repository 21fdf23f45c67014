"""What the tests of the server's life share: flags, conditions to wait for, requests in the background, raw sockets."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import models
from tests.running import DEADLINE_SECONDS, RunningServer, wait_until

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.1")
EXPLICIT = ("--model-control-mode=explicit",)
EVERYTHING = (*EXPLICIT, "--load-model=*")

ROW = [[1.0, 2.0, 3.0, 4.0]]
#: Requests run one by one and wait in the batcher's queue, which the metrics show.
ONE_BY_ONE = "max_batch_size: 1 dynamic_batching { }"


def first_value(server: RunningServer, model: str, version: str = "") -> float | None:
    """What a model makes of 1.0; None while it does not answer."""
    status, answer = server.infer(model, ROW, version)
    return answer["outputs"][0]["data"][0] if status == 200 else None


def answers(server: RunningServer, model: str, value: float, version: str = "") -> bool:
    return first_value(server, model, version) == value


def is_serving(server: RunningServer, model: str) -> bool:
    return any(name == model and state == "READY" for (name, _), (state, _) in server.index().items())


def is_known(server: RunningServer, model: str) -> bool:
    return any(name == model for name, _ in server.index())


def num_loads(server: RunningServer, model: str, version: int = 1) -> int:
    """Times a version was loaded, by the log. The log is written a little later than things happen: `wait_until` it
    says what should have happened; what should not have cannot come after `let_polls_pass`."""
    return server.log.count(f"loaded {model} version {version} in ")


def let_polls_pass(server: RunningServer, repository: Path, name: str = "marker") -> None:
    """Wait until the poller has looked at the repository at least twice from now on.

    It takes a new model after two equal looks: so one is put there, and awaited.
    """
    models.write_model(repository, name, models.identity())
    wait_until(lambda: is_serving(server, name) and num_loads(server, name), f"poller loads '{name}'")


def infer_request(
    model: str, payload: bytes, shape: list[int], *, name: str = "IN", datatype: str = "FP32", extra: str = ""
) -> bytes:
    """A whole HTTP request for one inference, binary both ways."""
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(payload)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: test\r\n{extra}"
        f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + len(payload)}\r\n\r\n"
    )
    return lines.encode() + head + payload


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=DEADLINE_SECONDS)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    def tensor(self) -> bytes:
        """The bytes behind the JSON part."""
        return self.body[int(self.headers["inference-header-content-length"]) :]


def read_answer(connection: socket.socket) -> RawAnswer:
    """One HTTP answer with a Content-Length; raises ConnectionError where the peer closes before its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts, missing = [body], int(headers["content-length"]) - len(body)
    while missing > 0:
        parts.append(_receive(connection))
        missing -= len(parts[-1])
    return RawAnswer(int(first.split(" ")[1]), headers, b"".join(parts))


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError("the server closed the connection before the end of its answer")
    return data


@contextmanager
def occupied(server: RunningServer, model: str) -> Iterator[list[Future[tuple[int, Any]]]]:
    """Two requests in flight on a model of ONE_BY_ONE: one that runs, one that waits for it in the queue."""
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(server.infer, model, ROW) for _ in range(2)]
        wait_until(lambda: num_waiting(server, model) == 1, "one request runs and one waits")
        yield requests


def num_waiting(server: RunningServer, model: str) -> int:
    """Requests in the model's queue."""
    return int(server.metric("nv_inference_pending_request_count", model=model) or 0)


def num_failed(server: RunningServer, model: str, reason: str) -> int:
    return int(server.metric("nv_inference_request_failure", model=model, reason=reason) or 0)


def slow_model(repository: Path, name: str = "slow", iterations: int = 300_000) -> None:
    """A model whose requests run one by one and take about a microsecond an iteration."""
    models.write_model(repository, name, models.slow(iterations), config=ONE_BY_ONE)
