"""A port that somebody else has: one clear line, exit code 1, and nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models


def serve(repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hone", "serve", "--model-repository", str(repository), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("taken", ["http", "grpc", "metrics"])
def test_one_line_names_the_port(repository: Path, taken: str) -> None:
    models.write_model(repository, "m", models.identity())
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        ports = {"http": "0", "grpc": "0", "metrics": "0", taken: str(port)}
        ended = serve(repository, *(f"--{name}-port={number}" for name, number in ports.items()))
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr or f"('127.0.0.1', {port})" in ended.stderr, ended.stderr
    assert "ddress already in use" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "ready in" not in ended.stdout
    problems = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert len(problems) == 1, problems


def test_an_address_that_is_not_here(repository: Path) -> None:
    ended = serve(repository, "--http-address=203.0.113.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    assert ended.returncode == 1
    assert "203.0.113.1" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_same_port_twice(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    ended = serve(repository, f"--http-port={port}", f"--grpc-port={port}", "--metrics-port=0")
    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stopped_server_frees_its_ports_at_once(repository: Path) -> None:
    """Connections that linger in TIME_WAIT do not keep the next server from starting."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        ports = (http.getsockname()[1], grpc.getsockname()[1])
    command = [sys.executable, "-m", "hone", "serve", "--model-repository", str(repository), "--allow-metrics=false"]
    command += [f"--http-port={ports[0]}", f"--grpc-port={ports[1]}"]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = next((line for line in process.stdout if "ready in" in line), None)
                assert line is not None, process.stderr.read() if process.stderr else ""
                with socket.create_connection(("127.0.0.1", ports[0])) as client:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(30) == 0
                    assert client.recv(1) == b"", "the server closed first: its side lingers"
            finally:
                if process.poll() is None:
                    process.kill()
