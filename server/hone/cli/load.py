"""Load on a server: a closed loop (each client waits for its answer) and an open one (requests come when they come).

Requests are encoded before and answers only counted, so that what is measured is the server and the network. In the
open loop a latency counts from the moment at which the request was due, not from when a connection was free to send it:
otherwise a server that stalls would be asked less, and look better than it is ("coordinated omission", G. Tene).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import numpy as np

from hone.cli.client import Server
from hone.errors import HoneError, InvalidRequest
from hone.types import Array

_RECEIVE_BYTES = 1 << 16
_MAX_ARRIVALS = 10_000_000

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999))


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` None is the closed loop of `clients`; else requests at `rate` a second, at random times as of independent
    callers (a Poisson process), over at most `clients` connections."""

    clients: int
    rate: float | None = None

    @property
    def text(self) -> str:
        if self.rate is None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"{self.rate:g} requests/s"


@dataclass(slots=True)
class Measured:
    """`latencies_us` are of requests answered 200; `seconds` is the time in which all were sent and answered."""

    latencies_us: list[float] = field(default_factory=list)
    num_errors: int = 0
    first_error: str = ""
    seconds: float = 0.0

    def add(self, other: Measured) -> None:
        self.latencies_us += other.latencies_us
        self.num_errors += other.num_errors
        self.first_error = self.first_error or other.first_error
        self.seconds += other.seconds

    def summary(self) -> dict[str, float | int | None]:
        """Latencies in microseconds, quantiles by nearest rank: each is a latency that really occurred."""
        times = np.sort(np.asarray(self.latencies_us))
        number = len(times)
        told: dict[str, float | int | None] = {
            "num_requests": number,
            "num_errors": self.num_errors,
            "requests_per_second": number / self.seconds if self.seconds else 0.0,
            "mean_us": float(times.mean()) if number else None,
        }
        for name, share in QUANTILES:
            rank = max(0, int(np.ceil(share * number)) - 1)
            told[f"{name}_us"] = float(times[rank]) if number else None
        return {**told, "max_us": float(times[-1]) if number else None}


def measure(server: Server, request: bytes, load: Load, seconds: float, *, seed: int = 0) -> Measured:
    """Send `request`, a whole HTTP request, as `load` says. Raises HoneError where the server cannot be reached; what
    it refuses is counted."""
    if load.rate is not None:
        return _open_loop(server, request, load.clients, _arrivals(load.rate, seconds, seed))

    def due() -> Iterator[None]:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            yield None

    return _run_clients(server, request, load.clients, due)


def _arrivals(rate: float, seconds: float, seed: int) -> Array:
    """When requests are due, in seconds from the start."""
    if rate * seconds > _MAX_ARRIVALS:
        raise InvalidRequest(f"--rate {rate:g} for {seconds:g} s: expected at most {_MAX_ARRIVALS} requests")
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, max(1, round(rate * seconds)))
    times: Array = np.cumsum(gaps)
    return times


def _open_loop(server: Server, request: bytes, clients: int, arrivals: Array) -> Measured:
    turn = threading.Lock()
    numbers = iter(range(len(arrivals)))
    began = time.perf_counter()

    def due() -> Iterator[float]:
        while True:
            with turn:
                number = next(numbers, None)
            if number is None:
                return
            at = began + float(arrivals[number])
            wait = at - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            yield at

    return _run_clients(server, request, clients, due)


def _run_clients(server: Server, request: bytes, clients: int, due: Callable[[], Iterator[float | None]]) -> Measured:
    """Each client sends whenever its `due` yields: None counts from now, a time from then."""
    parts = [Measured() for _ in range(clients)]
    failures: list[Exception] = []

    def run(part: Measured) -> None:
        connection = Connection(server)
        try:
            for at in due():
                start = time.perf_counter() if at is None else at
                status, body = connection.exchange(request)
                if status == 200:
                    part.latencies_us.append((time.perf_counter() - start) * 1e6)
                else:
                    part.num_errors += 1
                    part.first_error = part.first_error or f"{status}: {body[:300].decode('utf-8', 'replace')}"
        except Exception as problem:  # told to the thread that waits, below
            failures.append(problem)
        finally:
            connection.close()

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=(part,), name="hone-bench", daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Measured()
    for part in parts:
        whole.add(part)
    whole.seconds = time.perf_counter() - began
    if failures:
        raise failures[0]
    return whole


class Connection:
    """A kept-alive connection on which the same bytes are sent again and again. Belongs to one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket: socket.socket | None = None
        self._answer = _Answer()

    def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. Raises HoneError where the connection fails."""
        if self._socket is None:
            self._socket = self._server.connect()
        answer = self._answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        try:
            self._socket.sendall(request)
            while not answer.complete:
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionError("the server closed the connection before the end of its answer")
                parser.feed_data(data)
            if not parser.should_keep_alive():
                self.close()
            return parser.get_status_code(), b"".join(answer.body)
        except OSError as problem:
            self.close()
            raise self._server.unreachable(problem) from problem
        except httptools.HttpParserError as problem:
            self.close()
            raise HoneError(f"{self._server.place} answered with something that is not HTTP: {problem}") from problem

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


class _Answer:
    """What httptools tells of one response."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


def encode_request(path: str, server: Server, document: bytes, payload: bytes) -> bytes:
    """A whole HTTP POST: the request's JSON, then its tensors. Raises HoneError for headers that cannot be sent."""
    headers: dict[str, Any] = {
        "Host": server.place,
        **server.headers,
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": len(document),
        "Content-Length": len(document) + len(payload),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + document + payload
