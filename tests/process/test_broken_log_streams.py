"""Logs have nowhere to go: the disk is full, the reader is gone, or the stream was closed. The server serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import models
from tests.process.support import ROW, connect, read_answer
from tests.running import RunningServer, run_server, wait_until

NOISY = ("--model-control-mode=explicit", "--load-model=*", "--log-verbose=2")


def works(server: RunningServer) -> None:
    for _ in range(20):
        assert server.infer("m", ROW)[0] == 200
        assert server.infer("absent", ROW)[0] == 404
        assert server.post("/v2/repository/models/absent/load")[0] == 500


def test_a_full_disk(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with Path("/dev/full").open("wb") as full, run_server(repository, *NOISY, stderr=full) as server:
        works(server)
        assert server.stop(seconds=20) == 0


def test_a_reader_that_is_gone(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    reading, writing = os.pipe()
    try:
        with run_server(repository, *NOISY, stderr=writing) as server:
            works(server)
            os.close(reading)
            reading = -1
            works(server)
            assert server.stop(seconds=20) == 0
    finally:
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)


def test_a_reader_that_does_not_read(repository: Path) -> None:
    """A full pipe must not stop the event loop, nor the end."""
    models.write_model(repository, "m", models.identity())
    reading, writing = os.pipe()
    try:
        with run_server(repository, *NOISY, stderr=writing) as server, connect(server) as connection:
            for number in range(2000):  # far more lines than 64 KiB of pipe hold
                connection.sendall(b"GET /v2/models/absent%d HTTP/1.1\r\nHost: test\r\n\r\n" % number)
                assert read_answer(connection).status == 404
            works(server)
            assert server.stop(seconds=20) == 0
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    "redirection",
    ["2>&-", "1>&-", "0<&- 1>&- 2>&-", ">/dev/full", ">/dev/full 2>&1"],
    ids=["no stderr", "no stdout", "no streams", "stdout full", "both full"],
)
def test_streams_that_cannot_be_used_from_the_start(repository: Path, redirection: str) -> None:
    """A socket that gets the number of a closed stream must not be taken for the stream."""
    models.write_model(repository, "m", models.identity())
    port = free_port()
    flags = [f"--http-port={port}", "--grpc-port=0", "--metrics-port=0", "--model-repository", str(repository)]
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh"]
    command = [*shell, sys.executable, "-m", "hone", "serve", *flags, *NOISY]
    streams: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams) as process:  # type: ignore[call-overload]
        try:
            server = RunningServer(process, None)  # type: ignore[arg-type]
            server.http_port = port
            wait_until(answering(server), "ready")
            works(server)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            if process.poll() is None:
                process.kill()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def answering(server: RunningServer) -> Callable[[], bool]:
    def ready() -> bool:
        assert server.process.poll() is None, "the server ended"
        try:
            return server.get("/v2/health/ready")[0] == 200
        except ConnectionError:
            return False

    return ready
