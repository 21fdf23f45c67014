"""SIGTERM: not ready, nothing new, what is in flight is answered, exit code 0; at the exit timeout it is cut."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests import models
from tests.process.support import (
    EVERYTHING,
    ROW,
    connect,
    floats,
    infer_request,
    num_waiting,
    occupied,
    read_answer,
    slow_model,
)
from tests.running import RunningServer, run_server, wait_until


def probe(server: RunningServer, path: str = "/v2/health/ready") -> int:
    """Status, or 0 where nobody listens."""
    try:
        return server.call("GET", path)[0]
    except (ConnectionError, http.client.HTTPException):
        return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_answered_and_new_ones_refused(repository: Path, number: int) -> None:
    slow_model(repository, iterations=700_000)
    with run_server(repository, *EVERYTHING) as server:
        idle = connect(server)
        idle.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: test\r\n\r\n")
        assert read_answer(idle).status == 200
        with occupied(server, "slow") as requests:
            server.process.send_signal(number)
            wait_until(lambda: probe(server) != 200, "no longer ready")
            assert not any(request.done() for request in requests), "not ready before the last answers"
            assert probe(server, "/v2/models/slow/ready") != 200
            assert idle.recv(1) == b"", "an idle connection is closed"
            assert [request.result()[0] for request in requests] == [200, 200]
        assert server.process.wait(60) == 0
        assert probe(server) == 0
        idle.close()


def test_grpc_calls_in_flight_are_answered_and_new_ones_refused(repository: Path) -> None:
    slow_model(repository, iterations=700_000)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow"):
        channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        tensor = triton.InferInput("IN", [1, 4], "FP32")
        tensor._raw_content = b"\0" * 16
        answers: list[object] = []
        client.async_infer("slow", [tensor], callback=lambda result, error: answers.append(error or result))
        wait_until(lambda: num_waiting(server, "slow") == 2, "the gRPC call is queued")
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as late:
                try:
                    return not late.is_server_ready()
                except InferenceServerException as problem:
                    # CANCELLED: it arrived at the very moment at which gRPC stopped taking calls.
                    assert problem.status() in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")
                    return True

        wait_until(refused, "new calls are refused")
        assert not answers, "refused before the last answers"
        wait_until(lambda: answers, "the call in flight is answered")
        assert isinstance(answers[0], triton.InferResult), answers
        client.close()
        channel.close()


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_an_idle_server_stops_at_once(repository: Path, mode: str) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, f"--model-control-mode={mode}", "--repository-poll-secs=600") as server:
        assert server.stop(seconds=20) == 0, server.log
        assert "Traceback" not in server.log
        assert "stopped" in server.log


def test_requests_that_take_too_long_are_cut_at_the_exit_timeout(repository: Path) -> None:
    slow_model(repository, iterations=2_000_000_000)
    with run_server(repository, *EVERYTHING, "--exit-timeout-secs=0.5") as server:
        running, waiting = connect(server), connect(server)
        for connection in (running, waiting):
            connection.sendall(infer_request("slow", floats(1, 2, 3, 4), [1, 4]))
        wait_until(lambda: num_waiting(server, "slow") == 1, "one runs, one waits")
        server.process.send_signal(signal.SIGTERM)
        for connection in (running, waiting):
            with contextlib.suppress(ConnectionError):  # cut: as good an answer
                assert read_answer(connection).status == 503
            connection.close()
        assert server.stop(seconds=20) == 0, server.log
        assert "Traceback" not in server.log


def test_a_signal_while_models_load_stops_the_server(repository: Path) -> None:
    for number in range(100):
        models.write_model(repository, f"m{number}", models.slow(1))
    with run_server(repository, "--model-load-thread-count=1", ready=False) as server:
        assert server.stop(seconds=30) == 0, server.log
        assert "Traceback" not in server.log


def test_a_second_signal_does_not_cut_the_answers(repository: Path) -> None:
    slow_model(repository, iterations=700_000)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow") as requests:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: probe(server) != 200, "no longer ready")
        server.process.send_signal(signal.SIGTERM)
        assert [request.result()[0] for request in requests] == [200, 200]
        assert server.process.wait(60) == 0


def test_a_second_interrupt_is_obeyed_at_once(repository: Path) -> None:
    """Somebody presses Ctrl-C again rather than wait for the last answers."""
    slow_model(repository, iterations=2_000_000_000)
    with run_server(repository, *EVERYTHING) as server, connect(server) as waiter, connect(server) as running:
        for connection in (running, waiter):
            connection.sendall(infer_request("slow", floats(1, 2, 3, 4), [1, 4]))
        wait_until(lambda: num_waiting(server, "slow") == 1, "one runs, one waits")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: probe(server) != 200, "no longer ready")
        assert server.process.poll() is None, "the first one lets requests finish"
        assert server.stop(signal.SIGINT, seconds=20) == 128 + signal.SIGINT


def test_a_half_sent_request_does_not_hold_up_the_end(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING, "--exit-timeout-secs=1") as server:
        with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
            connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\n{")
            server.infer("m", ROW)
            assert server.stop(seconds=30) == 0, server.log
        assert "Traceback" not in server.log
