"""The floors answer what Triton's own client asks, so that their figures are of a server and not of an echo."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME, OUTPUT_NAME
from benchmarks.bench import bare_server

SERVERS = {
    "http_asgi": ("http", tritonclient.http),
    "http_fastapi": ("http", tritonclient.http),
    "grpc_aio": ("grpc", tritonclient.grpc),
}


@pytest.fixture(params=SERVERS, scope="module")
def served(request) -> Iterator[tuple]:
    protocol, library = SERVERS[request.param]
    with bare_server(request.param, protocol) as target, contextlib.ExitStack() as stack:
        client = library.InferenceServerClient(target.url(protocol))
        stack.callback(client.close)
        yield client, library


def infer(served, array, request_id=""):
    client, library = served
    tensor = library.InferInput(INPUT_NAME, list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return client.infer(MODEL_NAME, [tensor], request_id=request_id)


@pytest.mark.parametrize("num_elements", [1, 16, 150_528])
def test_answers_identity(served, num_elements):
    array = np.random.default_rng(0).random(num_elements, dtype=np.float32)
    result = infer(served, array)
    assert np.array_equal(result.as_numpy(OUTPUT_NAME), array)


def test_keeps_the_request_id(served):
    result = infer(served, np.zeros(4, np.float32), request_id="seventeen")
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "seventeen"


def test_is_ready_and_describes_its_model(served):
    client, _ = served
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL_NAME)
    metadata = client.get_model_metadata(MODEL_NAME)
    name = metadata["name"] if isinstance(metadata, dict) else metadata.name
    assert name == MODEL_NAME


def test_counts_its_requests(served):
    """perf_analyzer finds the version it measured by the growth of this count."""

    def count():
        statistics = served[0].get_inference_statistics(MODEL_NAME)
        if isinstance(statistics, dict):
            return statistics["model_stats"][0]["inference_stats"]["queue"]["count"]
        return statistics.model_stats[0].inference_stats.queue.count

    before = count()
    for _ in range(3):
        infer(served, np.zeros(4, np.float32))
    assert count() == before + 3
