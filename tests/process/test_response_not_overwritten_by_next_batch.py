"""Batch buffers are reused; what a client reads is its own request's answer, however late it reads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx import helper

from tests import models
from tests.process.support import EVERYTHING, connect, infer_request, read_answer
from tests.running import RunningServer, run_server, wait_until

BATCHING = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }"
NUM_CLIENTS = 16
NUM_ROUNDS = 12


def views() -> bytes:
    """Outputs that an engine could give back as its input's memory: the same, another shape, and a copy."""
    nodes = [
        helper.make_node("Identity", ["IN"], ["SAME"]),
        helper.make_node("Unsqueeze", ["IN", "axes"], ["RESHAPED"]),
        helper.make_node("Neg", ["IN"], ["NEGATED"]),
    ]
    axes = helper.make_tensor("axes", models.ELEMENT_TYPES["INT64"], [1], [1])
    dims: models.Dims = ("batch", "n")
    reshaped: models.Dims = ("batch", 1, "n")
    outputs = {"SAME": ("FP32", dims), "RESHAPED": ("FP32", reshaped), "NEGATED": ("FP32", dims)}
    return models.model(nodes, {"IN": ("FP32", dims)}, outputs, [axes])


def payload(client: int, number: int) -> np.ndarray:
    """Different for every request, in every row."""
    rows = 1 + (client + number) % 3
    start = client * 1_000_000 + number * 10_000
    return np.arange(start, start + rows * 500, dtype=np.float32).reshape(rows, 500)


async def check(client: Any, library: Any, which: int) -> None:
    for number in range(NUM_ROUNDS):
        sent = payload(which, number)
        tensor = library.InferInput("IN", list(sent.shape), "FP32")
        tensor.set_data_from_numpy(sent)
        result = await client.infer("views", [tensor], request_id=f"{which}-{number}")
        response = result.get_response()
        assert (response["id"] if isinstance(response, dict) else response.id) == f"{which}-{number}"
        np.testing.assert_array_equal(result.as_numpy("SAME"), sent)
        np.testing.assert_array_equal(result.as_numpy("RESHAPED"), sent[:, np.newaxis])
        np.testing.assert_array_equal(result.as_numpy("NEGATED"), -sent)


def num_batched(server: RunningServer) -> int:
    stats = server.get("/v2/models/views/stats")[1]["model_stats"][0]
    return sum(entry["compute_infer"]["count"] for entry in stats["batch_stats"] if entry["batch_size"] > 3)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_many_clients_with_payloads_of_their_own(repository: Path, protocol: str) -> None:
    models.write_model(repository, "views", views(), config=BATCHING)
    with run_server(repository, *EVERYTHING) as server:
        if protocol == "http":
            async with triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}", conn_limit=32) as client:
                await asyncio.gather(*(check(client, triton_http, which) for which in range(NUM_CLIENTS)))
        else:
            async with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
                await asyncio.gather(*(check(client, triton_grpc, which) for which in range(NUM_CLIENTS)))
        assert num_batched(server) > 0, "requests of several clients did share batches"


def test_clients_that_read_late(repository: Path) -> None:
    """Answers far larger than the kernel's buffers wait in the server while later batches run."""
    models.write_model(repository, "views", views(), config=BATCHING)
    columns = 512 * 1024  # 2 MiB an output, three outputs an answer
    with run_server(repository, *EVERYTHING) as server:
        connections = [connect(server) for _ in range(8)]
        sent = [np.full(columns, number + 1, dtype=np.float32) for number in range(len(connections))]
        for connection, values in zip(connections, sent, strict=True):
            connection.sendall(infer_request("views", values.tobytes(), [1, columns]))
        wait_until(
            lambda: server.metric("nv_inference_request_success", model="views") == len(connections), "all have run"
        )
        with connect(server) as other:
            noise = np.full(columns, -1.0, dtype=np.float32)
            for _ in range(6):
                other.sendall(infer_request("views", noise.tobytes(), [1, columns]))
                assert read_answer(other).status == 200
        for connection, values in zip(connections, sent, strict=True):
            answer = read_answer(connection)
            assert answer.status == 200
            same, reshaped, negated = np.frombuffer(answer.tensor(), dtype=np.float32).reshape(3, columns)
            np.testing.assert_array_equal(same, values)
            np.testing.assert_array_equal(reshaped, values)
            np.testing.assert_array_equal(negated, -values)
            connection.close()
