"""A server that loses its GPU answers on the CPU from then on, and asks to be restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.process.losing_server import FATAL
from tests.process.support import ROW
from tests.running import RunningServer, run_server

PROGRAM = (str(Path(__file__).with_name("losing_server.py")),)
CONFIG = "max_batch_size: 2 instance_group { count: 2 kind: KIND_GPU gpus: [ 0 ] }"
REASON = "unspecified launch failure (error 719): this process can use its GPUs no longer, a new one can"


def answer(server: RunningServer, model: str, first: float = 1.0) -> list[float]:
    status, told = server.infer(model, [[first, *ROW[0][1:]]])
    assert status == 200, told
    numbers: list[float] = told["outputs"][0]["data"]
    return numbers


def pinned(server: RunningServer) -> tuple[float, float]:
    total, used = (server.metric(f"nv_pinned_memory_pool_{what}_bytes") for what in ("total", "used"))
    return total, used


@pytest.mark.timeout(60)
def test_requests_are_answered_and_health_tells_the_reason(repository: Path) -> None:
    for name, factor in (("one", 2.0), ("two", 3.0)):
        models.write_model(repository, name, models.scale(factor), config=CONFIG)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with run_server(repository, program=PROGRAM, environment=environment) as server:
        assert answer(server, "one") == [2.0, 4.0, 6.0, 8.0]
        assert answer(server, "two") == [3.0, 6.0, 9.0, 12.0]
        assert [server.get(f"/v2/health/{what}")[0] for what in ("live", "ready")] == [200, 200]
        total, used = pinned(server)
        assert total >= used > 0
        assert answer(server, "one", FATAL) == [26.0, 4.0, 6.0, 8.0]
        for name, factor in (("one", 2.0), ("two", 3.0)):
            assert answer(server, name) == [factor * number for number in ROW[0]]
        assert server.get("/v2/health/live") == (503, {"live": False, "error": f"Server not live: {REASON}"})
        assert server.get("/v2/health/ready") == (503, {"ready": False, "error": f"Server not ready: {REASON}"})
        assert server.get("/v2/models/one/ready")[0] == 200
        assert server.stop() == 0
