"""Clients that dawdle, or only hold connections, cost others nothing."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from tests import models
from tests.process.support import EVERYTHING, ROW, answers, connect, floats, infer_request, read_answer
from tests.running import run_server, wait_until

REQUEST = infer_request("m", floats(1, 2, 3, 4), [1, 4])


@pytest.fixture(autouse=True)
def many_descriptors() -> None:
    """A thousand sockets in the test's own process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


def test_half_sent_requests(repository: Path) -> None:
    """At every place where a request can stop half-way."""
    models.write_model(repository, "m", models.scale(2.0))
    places = (1, 20, REQUEST.index(b"\r\n\r\n"), REQUEST.index(b"\r\n\r\n") + 4, len(REQUEST) - 1)
    with run_server(repository, *EVERYTHING) as server:
        dawdlers = [(connect(server), places[number % len(places)]) for number in range(200)]
        for connection, place in dawdlers:
            connection.sendall(REQUEST[:place])
        for _ in range(20):
            assert answers(server, "m", 2.0)
        for connection, place in dawdlers:
            connection.sendall(REQUEST[place:])
        for connection, _ in dawdlers:
            assert read_answer(connection).status == 200, "and they are answered once they are done"
            connection.close()


def test_answers_that_are_not_read(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    models.write_model(repository, "large", models.scale(2.0, dims=("batch", "n")))
    large = infer_request("large", bytes(4 * 1024 * 1024), [1, 1024 * 1024])
    with run_server(repository, *EVERYTHING) as server:
        lazy = [connect(server) for _ in range(10)]
        for connection in lazy:
            connection.sendall(large)
        for _ in range(20):
            assert answers(server, "m", 2.0)
        for connection in lazy:
            assert len(read_answer(connection).tensor()) == 4 * 1024 * 1024
            connection.close()


def test_a_thousand_idle_connections(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        descriptors, threads = server.num_descriptors(), server.num_threads()
        idle = [connect(server) for _ in range(1000)]
        for connection in idle[::2]:
            connection.sendall(REQUEST)
        for connection in idle[::2]:
            assert read_answer(connection).status == 200
        wait_until(lambda: server.num_descriptors() > descriptors + 990, "all are accepted")
        assert server.num_threads() <= threads + 1, "connections have no threads"
        assert answers(server, "m", 2.0)
        for connection in idle:
            connection.close()
        wait_until(lambda: server.num_descriptors() < descriptors + 100, "their descriptors are given back")


def test_more_connections_than_allowed(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING, "--http-max-connections=10") as server:
        held: list[socket.socket] = []
        for _ in range(10):
            connection = connect(server)
            connection.sendall(REQUEST)
            assert read_answer(connection).status == 200
            held.append(connection)
        assert server.infer("m", ROW)[0] == 503, "one too many is told so"
        held.pop().close()
        wait_until(lambda: server.infer("m", ROW)[0] == 200, "a place that became free is given away")
        for connection in held:
            connection.sendall(REQUEST)
            assert read_answer(connection).status == 200
            connection.close()
        assert server.metrics(), "metrics have connections of their own"


def test_a_client_that_goes_away_in_the_middle_of_an_answer(repository: Path) -> None:
    models.write_model(repository, "large", models.scale(2.0, dims=("batch", "n")))
    models.write_model(repository, "m", models.scale(2.0))
    large = infer_request("large", bytes(4 * 1024 * 1024), [1, 1024 * 1024])
    with run_server(repository, *EVERYTHING) as server:
        descriptors = server.num_descriptors()
        for _ in range(20):
            with connect(server) as connection:
                connection.sendall(large)
                assert connection.recv(1000)
        assert answers(server, "m", 2.0)
        wait_until(lambda: server.num_descriptors() < descriptors + 5, "their descriptors are given back")
        assert "Traceback" not in server.log
