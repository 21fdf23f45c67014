"""Requests refused by the scheduler, cancelled by their client, or caught by the end of the server."""

import http.client
import queue
import signal
import socket
import subprocess

import grpc as grpc_library
import numpy as np
import pytest

from tests import models
from tests.protocol.grpc_client import GrpcClient, infer_request
from tests.protocol.http_client import HttpClient, encode_infer
from tests.protocol.raw_socket import connected, request
from tests.protocol.repository import PATIENT_QUEUE, counting
from tests.protocol.slow_requests import LONG, SHORT, Background, failures, occupy, pending, running, turns
from tests.protocol.wire import accepted, invalid, raw_input, refused
from tests.running import run_server, wait_until


@pytest.mark.row(42)
def test_queue_full(server, client):
    model = f"full_{client.protocol}"
    first = occupy(client, model)
    second = Background(client, model, turns(SHORT))
    wait_until(lambda: pending(server, model) == 1, "the second one waits")
    refused(client.infer(model, turns(SHORT)), 503, "UNAVAILABLE", "Exceeds maximum queue size")
    assert failures(server, model, "REJECTED") >= 1
    accepted(first.join())
    accepted(second.join())


@pytest.mark.row(43)
def test_queue_timeout_of_the_model(server, client):
    model = f"impatient_{client.protocol}"
    first = occupy(client, model)
    refused(client.infer(model, turns(SHORT)), 503, "UNAVAILABLE", "Request timeout expired")
    accepted(first.join())


@pytest.mark.row(43)
def test_queue_timeout_of_the_request(server, client):
    model = f"patient_{client.protocol}"
    first = occupy(client, model)
    answer = client.infer(model, turns(SHORT), parameters={"timeout": 1000})
    refused(answer, 503, "UNAVAILABLE", "Request timeout expired")
    accepted(first.join())


@pytest.mark.row(44)
def test_cancelled_over_http(server, http):
    model = "slow_http"
    accepted(http.infer(model, turns(SHORT)))
    body, headers = encode_infer(turns(LONG))
    before = failures(server, model, "CANCELED")
    connection = http_library_connection(server)
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    wait_until(lambda: running(http, model), "it runs")
    connection.close()
    wait_until(lambda: failures(server, model, "CANCELED") == before + 1, "the cancellation is counted")
    accepted(http.infer(model, turns(SHORT)))


def http_library_connection(server):
    return http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)


@pytest.mark.row(44)
@pytest.mark.parametrize("how", ["cancel", "deadline", "hang up"])
def test_cancelled_over_grpc(server, grpc, how):
    model = "slow_grpc"
    accepted(grpc.infer(model, turns(SHORT)))
    before = failures(server, model, "CANCELED")
    other = GrpcClient(server.grpc_port)
    call = other.stub.ModelInfer.future(
        infer_request(model, turns(LONG)), timeout=0.2 if how == "deadline" else None, wait_for_ready=True
    )
    if how != "deadline":
        wait_until(lambda: running(grpc, model), "it runs")
    if how == "cancel":
        call.cancel()
    elif how == "hang up":
        other.close()
    expected = "DEADLINE_EXCEEDED" if how == "deadline" else "CANCELLED"
    assert code_of(call) == expected
    wait_until(lambda: failures(server, model, "CANCELED") == before + 1, "the cancellation is counted")
    other.close()
    accepted(grpc.infer(model, turns(SHORT)))


def code_of(call):
    try:
        call.result(timeout=30)
    except grpc_library.FutureCancelledError:
        return "CANCELLED"
    except grpc_library.RpcError as problem:
        return problem.code().name
    return "OK"


def test_disconnects_do_not_hold_up_the_end(tmp_path):
    """Clients that went away while their requests ran leave nothing behind that the server would wait for."""
    models.write_model(tmp_path, "slow", counting(), config=PATIENT_QUEUE)
    with run_server(tmp_path, "--exit-timeout-secs=3600") as server:
        http = HttpClient(server.http_port)
        body, headers = encode_infer(turns(LONG))
        connection = http_library_connection(server)
        connection.request("POST", "/v2/models/slow/infer", body, headers)
        wait_until(lambda: running(http, "slow"), "it runs")
        connection.close()
        wait_until(lambda: failures(server, "slow", "CANCELED") == 1, "the cancellation is counted")
        http.close()
        server.process.send_signal(signal.SIGTERM)
        try:
            assert server.process.wait(20) == 0
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


@pytest.mark.row(45)
def test_server_stopping(tmp_path):
    """After SIGTERM what is in flight is answered, and what comes on open connections is refused."""
    models.write_model(tmp_path, "slow", counting(), config=PATIENT_QUEUE)
    with run_server(tmp_path) as server:
        http, grpc = HttpClient(server.http_port), GrpcClient(server.grpc_port)
        requests = queue.SimpleQueue()
        stream = grpc.stub.ModelStreamInfer(iter(requests.get, None))
        requests.put(infer_request("slow", turns(SHORT), id="before"))
        assert next(stream).infer_response.id == "before"
        inflight = Background(http, "slow", turns(LONG))
        wait_until(lambda: running(http, "slow"), "the long request runs")
        body, headers = encode_infer(turns(SHORT))
        half = request(
            body, *(f"{name}: {value}".encode() for name, value in headers.items()), path=b"/v2/models/slow/infer"
        )
        with connected(server.http_port) as connection:
            connection.send(half[:-4])
            # A request whose head is known has begun: wait until the server has it.
            wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 200, "the server answers")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(server.http_port), "the server stops listening")
            connection.send(half[-4:])
            reply = connection.reply()
            assert reply is not None and reply.status == 503, reply
            assert "Server is stopping" in reply.error
        with pytest.raises(grpc_library.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc_library.StatusCode.UNAVAILABLE
        assert "Server is stopping" in caught.value.details()
        requests.put(None)
        accepted(inflight.join())
        assert server.process.wait(60) == 0
        grpc.close()
        http.close()


def accepts(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def test_priority_that_is_no_level(client):
    given = [raw_input("IN", "FP32", np.zeros((1, 4)))]
    invalid(client.infer("levels", given, parameters={"priority": 3}), "priority 3", "levels")
