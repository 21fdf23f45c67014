"""What a reload makes, it also takes away: memory, mappings, descriptors, threads and series stay level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from tests import models
from tests.process.support import EVERYTHING, answers, first_value
from tests.running import RunningServer, run_server, wait_until

NUM_WARM = 30
NUM_MEASURED = 100
WEIGHT_BYTES = 4 * 1024 * 1024


def weighty(factor: float) -> bytes:
    """OUT = factor * IN, with weights large enough that two leaked copies would show."""
    weights = np.zeros(WEIGHT_BYTES // 4, dtype=np.float32)
    weights[0] = factor
    return models.model(
        [helper.make_node("ReduceSum", ["weights"], ["factor"]), helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
        {"IN": ("FP32", ("batch", 4))},
        {"OUT": ("FP32", ("batch", 4))},
        [numpy_helper.from_array(weights, "weights")],
    )


def cycle(server: RunningServer, repository: Path, kind: str, number: int) -> None:
    factor = float(number % 2 + 2)
    models.write_model(repository, "m", weighty(factor))
    if kind == "unload":
        assert server.post("/v2/repository/models/m/unload")[0] == 200
        assert first_value(server, "m") is None
    assert server.post("/v2/repository/models/m/load")[0] == 200
    assert answers(server, "m", factor)


def counts(server: RunningServer) -> tuple[int, int, int]:
    return server.num_threads(), server.num_descriptors(), len(server.metrics().splitlines())


@pytest.mark.parametrize("kind", ["reload", "unload"])
def test_level(repository: Path, kind: str) -> None:
    models.write_model(repository, "m", weighty(2.0))
    # glibc gives memory back at once like this; how long it otherwise keeps some is not what is tested.
    environment = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with run_server(repository, *EVERYTHING, environment=environment) as server:
        for number in range(NUM_WARM):
            cycle(server, repository, kind, number)
        before, mappings = counts(server), server.num_mappings()
        memory = []
        for number in range(NUM_MEASURED):
            cycle(server, repository, kind, number)
            memory.append(server.memory_bytes())
        wait_until(lambda: counts(server) <= before, f"threads, descriptors and series as before: {before}", seconds=45)
        assert server.num_mappings() - mappings < NUM_MEASURED / 4, "no mapping a reload"
        half = np.array(memory[NUM_MEASURED // 2 :], dtype=float)
        slope = np.polyfit(np.arange(len(half)), half, 1)[0]
        print(f"{kind}: {slope / 1024:.1f} KiB a cycle; {memory[0] >> 20} MiB at first, {memory[-1] >> 20} MiB at last")
        assert slope < 64 * 1024, f"memory grows by {slope / 1024:.0f} KiB a {kind}"
