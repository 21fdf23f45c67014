"""Loopback unless told otherwise; IPv6 where the machine has it; each front end can be left out."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as triton

from tests import models
from tests.process.support import EVERYTHING, answers
from tests.running import RunningServer, run_server, wait_until


def listening(server: RunningServer) -> set[str]:
    """Addresses; gRPC's sockets are IPv6 ones that are bound to a mapped IPv4 address."""
    connections = psutil.Process(server.process.pid).net_connections("inet")
    return {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_loopback_by_default(repository: Path) -> None:
    with run_server(repository) as server:
        assert listening(server) == {"127.0.0.1"}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    flags = ("--http-address=::1", "--grpc-address=::1", "--metrics-address=::1")
    with run_server(repository, *EVERYTHING, *flags, ready=False) as server:
        wait_until(lambda: "ready in" in server.log, "ready")
        assert listening(server) == {"::1"}
        assert f"http://[::1]:{server.http_port}" in server.log, "as it can be pasted"
        with socket.create_connection(("::1", server.http_port)) as connection:
            connection.sendall(b"GET /v2/models/m/ready HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        with triton.InferenceServerClient(f"[::1]:{server.grpc_port}") as client:
            assert client.is_model_ready("m")


def test_without_http(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING, "--allow-http=false", ready=False) as server:
        wait_until(lambda: "ready in" in server.log, "ready")
        assert not server.http_port
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            assert client.is_server_ready()
        assert server.metrics()


def test_without_grpc_and_metrics(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING, "--allow-grpc=false", "--allow-metrics=false") as server:
        assert answers(server, "m", 2.0)
        connections = psutil.Process(server.process.pid).net_connections("inet")
        ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        assert ports == {server.http_port}
