"""A closed loop of one client that sends the same bytes again and again: for requests perf_analyzer cannot make.

Its JSON mode sends one number whatever the shape. Bodies are encoded before, and answers not decoded, so that the time
is the server's and the network's.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Mapping

import numpy as np
import orjson

from benchmarks.bare.v2 import INPUT_NAME, OUTPUT_NAME
from benchmarks.perf_analyzer import Result
from benchmarks.processes import BenchmarkError, Child


def encode_identity(num_elements: int, *, json_tensors: bool) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request to an identity model with random numbers."""
    array = np.random.default_rng(0).random(num_elements, dtype=np.float32)
    tensor: dict[str, object] = {"name": INPUT_NAME, "shape": [num_elements], "datatype": "FP32"}
    outputs = [{"name": OUTPUT_NAME, "parameters": {"binary_data": not json_tensors}}]
    if json_tensors:
        tensor["data"] = array
        body = orjson.dumps({"inputs": [tensor], "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
        return body, {"Content-Type": "application/json"}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = orjson.dumps({"inputs": [tensor], "outputs": outputs})
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return head + array.tobytes(), headers


def closed_loop(
    port: int, path: str, body: bytes, headers: Mapping[str, str], *, seconds: float, server: Child
) -> Result:
    """POST `body` for `seconds` after a short warm-up. Raises BenchmarkError on any answer but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post() -> float:
        began = time.perf_counter()
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        answer = response.read()
        took = time.perf_counter() - began
        if response.status != 200:
            raise BenchmarkError(f"POST {path}: expected 200, found {response.status}: {answer[:500]!r}")
        return took

    with contextlib.closing(connection):
        for _ in range(5):
            post()
        began, cpu = time.perf_counter(), server.cpu_seconds()
        durations = []
        while time.perf_counter() - began < seconds:
            durations.append(post())
        took = time.perf_counter() - began
        cpu = server.cpu_seconds() - cpu
    p50, p90, p99 = (float(value) * 1e6 for value in np.percentile(durations, (50, 90, 99)))
    return Result(len(durations) / took, p50, p90, p99, cpu / len(durations) * 1e6)
