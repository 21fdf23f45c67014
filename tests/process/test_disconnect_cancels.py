"""A client that leaves takes its request along: what waits never runs, and no neighbour in the batch notices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from tests import models
from tests.process.support import (
    EVERYTHING,
    ROW,
    answers,
    connect,
    floats,
    infer_request,
    num_failed,
    num_waiting,
    occupied,
    slow_model,
)
from tests.running import run_server, wait_until

REQUEST = infer_request("slow", floats(1, 2, 3, 4), [1, 4])


def test_http_request_in_the_queue(repository: Path) -> None:
    slow_model(repository)
    with run_server(repository, *EVERYTHING) as server:
        with occupied(server, "slow") as requests:
            leaver = connect(server)
            leaver.sendall(REQUEST)
            wait_until(lambda: num_waiting(server, "slow") == 2, "a third request waits")
            leaver.close()
            wait_until(lambda: num_failed(server, "slow", "CANCELED") == 1, "it is cancelled")
            assert num_waiting(server, "slow") <= 1, "and no longer waits"
            assert [request.result()[0] for request in requests] == [200, 200]
        assert answers(server, "slow", 1.0)
        assert server.metric("nv_inference_exec_count", model="slow") == 3.0, "it never ran"
        assert server.metric("nv_inference_request_success", model="slow") == 3.0
        assert num_waiting(server, "slow") == 0
        assert "Traceback" not in server.log


def test_http_requests_that_run_and_that_wait(repository: Path) -> None:
    slow_model(repository)
    with run_server(repository, *EVERYTHING) as server:
        leavers = [connect(server) for _ in range(2)]
        for leaver in leavers:
            leaver.sendall(REQUEST)
        wait_until(lambda: num_waiting(server, "slow") == 1, "one runs, one waits")
        for leaver in leavers:
            leaver.close()
        wait_until(lambda: num_failed(server, "slow", "CANCELED") == 2, "both count as cancelled")
        assert answers(server, "slow", 1.0), "the instance is free again afterwards"
        # One run where the first left before its thread had begun with it.
        assert server.metric("nv_inference_exec_count", model="slow") in (1.0, 2.0), "the one that waited never ran"
        assert num_waiting(server, "slow") == 0


def test_http_request_whose_body_is_not_complete(repository: Path) -> None:
    slow_model(repository)
    with run_server(repository, *EVERYTHING) as server:
        leaver = connect(server)
        leaver.sendall(REQUEST[:-4])
        leaver.close()
        assert answers(server, "slow", 1.0)
        assert server.metric("nv_inference_exec_count", model="slow") == 1.0
        assert "Traceback" not in server.log


def test_many_leave_at_once(repository: Path) -> None:
    slow_model(repository)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow") as requests:
        leavers = [connect(server) for _ in range(50)]
        for leaver in leavers:
            leaver.sendall(REQUEST)
        wait_until(lambda: num_waiting(server, "slow") >= 50, "all wait")
        for leaver in leavers:
            leaver.close()
        wait_until(lambda: num_failed(server, "slow", "CANCELED") == 50, "all are cancelled")
        assert [request.result()[0] for request in requests] == [200, 200]
        wait_until(lambda: num_waiting(server, "slow") == 0, "nothing waits")
        assert server.metric("nv_inference_exec_count", model="slow") == 2.0


def test_grpc_request_in_the_queue(repository: Path) -> None:
    slow_model(repository)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow") as requests:
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            tensor = triton.InferInput("IN", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
            told: list[Any] = []
            ended = threading.Event()

            def callback(result: object, error: object) -> None:
                told.append(error or result)
                ended.set()

            call = client.async_infer("slow", [tensor], callback)
            wait_until(lambda: num_waiting(server, "slow") == 2, "a third request waits")
            call.cancel()
            wait_until(lambda: num_failed(server, "slow", "CANCELED") == 1, "it is cancelled")
            assert ended.wait(30)
            assert "CANCELLED" in str(told[0].status())
        assert [request.result()[0] for request in requests] == [200, 200]
        assert server.metric("nv_inference_exec_count", model="slow") == 2.0, "it never ran"
        assert "Traceback" not in server.log


def test_grpc_deadline_in_the_queue(repository: Path) -> None:
    slow_model(repository, iterations=700_000)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow") as requests:
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            tensor = triton.InferInput("IN", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
            told: list[Any] = []
            client.async_infer("slow", [tensor], lambda result, error: told.append(error or result), client_timeout=0.2)
            wait_until(lambda: told, "the client gives up")
            assert "DEADLINE_EXCEEDED" in str(told[0].status())
            wait_until(lambda: num_failed(server, "slow", "CANCELED") == 1, "its request is cancelled")
        assert [request.result()[0] for request in requests] == [200, 200]
        assert server.metric("nv_inference_exec_count", model="slow") == 2.0, "it never ran"


def test_a_batch_goes_on_without_the_one_that_left(repository: Path) -> None:
    config = "max_batch_size: 8 dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 60000000 }"
    models.write_model(repository, "m", models.scale(2.0), config=config)
    with run_server(repository, *EVERYTHING) as server:
        stays, leaves = connect(server), connect(server)
        stays.sendall(infer_request("m", floats(1, 1, 1, 1), [1, 4]))
        leaves.sendall(infer_request("m", floats(9, 9, 9, 9), [1, 4]))
        wait_until(lambda: num_waiting(server, "m") == 2, "both wait for a third")
        leaves.close()
        wait_until(lambda: num_waiting(server, "m") == 1, "one has left")
        status, answer = server.infer("m", [*ROW, *ROW])
        assert (status, answer["outputs"][0]["data"][0]) == (200, 2.0)
        assert stays.recv(12) == b"HTTP/1.1 200"
        stays.close()
        assert server.metric("nv_inference_exec_count", model="m") == 1.0
        assert server.metric("nv_inference_count", model="m") == 3.0, "the one that left filled no row"
