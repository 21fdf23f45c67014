"""Requests that choose a shape do not take more memory than the server is told to give: they fail, others do not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from tests import models
from tests.process.support import ROW, first_value
from tests.running import RunningServer, run_server

LIMIT_MIB = 96
MIB = 1 << 20
#: What the process may take beside: code that is loaded for the first requests, buffers of the front ends.
REST_MIB = 64


def filler() -> bytes:
    """LARGEST is the largest of as many ones as SIZE says."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["SIZE"], ["ones"], value=one),
        helper.make_node("ReduceMax", ["ones"], ["LARGEST"], keepdims=1),
    ]
    return models.model(nodes, {"SIZE": ("INT64", [1])}, {"LARGEST": ("FP32", [1])})


def repeater() -> bytes:
    """OUT is IN as many times as TIMES says."""
    nodes = [helper.make_node("Tile", ["IN", "TIMES"], ["OUT"])]
    return models.model(nodes, {"IN": ("FP32", ["n"]), "TIMES": ("INT64", [1])}, {"OUT": ("FP32", ["m"])})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("models")
    for name in ("filler", "fresh"):
        models.write_model(repository, name, filler())
    models.write_model(repository, "repeater", repeater())
    models.write_model(repository, "doubled", models.scale(2.0))
    with run_server(repository, "--tuning=off", f"--onnxruntime-memory-mib={LIMIT_MIB}") as started:
        yield started
        assert started.stop() == 0


def fill(server: RunningServer, num_bytes: int, model: str = "filler") -> tuple[int, dict]:
    size = {"name": "SIZE", "datatype": "INT64", "shape": [1], "data": [num_bytes // 4]}
    return server.post(f"/v2/models/{model}/infer", {"inputs": [size]})


def peak_bytes(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def assert_well(server: RunningServer, before: int) -> None:
    assert first_value(server, "doubled") == 2.0 * ROW[0][0]
    assert peak_bytes(server) < before + (LIMIT_MIB + REST_MIB) * MIB


@pytest.mark.parametrize("num_bytes", [100 * MIB, 1 << 30, 1 << 40, 1 << 62], ids=str)
def test_a_huge_shape_fails_its_request_alone(server: RunningServer, num_bytes: int) -> None:
    before = server.memory_bytes()
    for _ in range(3):
        status, answer = fill(server, num_bytes)
        assert status == 500, answer
        assert f"limit of {LIMIT_MIB} MiB" in answer["error"] or num_bytes == 1 << 62, answer
    assert fill(server, MIB)[0] == 200
    assert_well(server, before)


def test_outputs_count(server: RunningServer) -> None:
    before = server.memory_bytes()
    inputs = [
        {"name": "IN", "datatype": "FP32", "shape": [4], "data": ROW[0]},
        {"name": "TIMES", "datatype": "INT64", "shape": [1], "data": [1 << 28]},
    ]
    status, answer = server.post("/v2/models/repeater/infer", {"inputs": inputs})
    assert status == 500
    assert f"limit of {LIMIT_MIB} MiB" in answer["error"]
    inputs[1]["data"] = [2]
    status, answer = server.post("/v2/models/repeater/infer", {"inputs": inputs})
    assert status == 200
    assert answer["outputs"][0]["data"] == [*ROW[0], *ROW[0]]
    assert_well(server, before)


def test_what_fits_is_answered_whatever_came_before(server: RunningServer) -> None:
    """Pieces of other sizes that the arena kept are no hindrance, nor are plans made for the first values."""
    before = server.memory_bytes()
    for mib in (40, 20, 30, 90, 10, 60, 90, 25, 35, 90):
        status, answer = fill(server, mib * MIB, "fresh")
        assert status == 200, (mib, answer)
        assert answer["outputs"][0]["data"] == [1.0]
    assert_well(server, before)


def test_requests_at_the_same_time_share_the_limit(server: RunningServer) -> None:
    before = server.memory_bytes()
    with ThreadPoolExecutor(8) as pool:
        statuses = {status for status, _ in pool.map(lambda _: fill(server, 60 * MIB), range(32))}
    assert statuses <= {200, 500}
    assert fill(server, 60 * MIB)[0] == 200
    assert_well(server, before)
