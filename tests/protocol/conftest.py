"""One server for the session, and one client fixture with two implementations.

A module that needs a server of another kind overrides `server`; `client`, `http` and `grpc` follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.protocol.grpc_client import GrpcClient
from tests.protocol.http_client import HttpClient
from tests.protocol.repository import write_repository
from tests.protocol.wire import Client
from tests.running import RunningServer, run_server


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(*numbers): rows of the protocol's error table that a test covers")


@pytest.fixture(scope="session")
def main_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    return root


@pytest.fixture(scope="session")
def main_server(main_repository: Path) -> Iterator[RunningServer]:
    # A broken model is among them, so that strict readiness would never come.
    with run_server(main_repository, "--strict-readiness=false") as running:
        yield running


@pytest.fixture(scope="module")
def server(main_server: RunningServer) -> RunningServer:
    return main_server


@pytest.fixture
def http(server: RunningServer) -> Iterator[HttpClient]:
    connected = HttpClient(server.http_port)
    yield connected
    connected.close()


@pytest.fixture
def grpc(server: RunningServer) -> Iterator[GrpcClient]:
    connected = GrpcClient(server.grpc_port)
    yield connected
    connected.close()


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Client:
    """The protocol under test: the same requests by either, on a real port."""
    chosen: Client = request.getfixturevalue(request.param)
    return chosen
