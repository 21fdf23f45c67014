"""What a reload makes, it also takes away: memory, mappings, descriptors, threads and series stay level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from tests import models
from tests.process.support import EVERYTHING, answers, first_value
from tests.running import RunningServer, run_server, wait_until

#: Cycles before the first look: allocator and caches have their size by then.
NUM_WARM = 40


def model_of(factor: float, num_bytes: int) -> bytes:
    """OUT = factor * IN, with so many bytes of weights."""
    weights = np.zeros(num_bytes // 4, dtype=np.float32)
    weights[0] = factor
    return models.model(
        [helper.make_node("ReduceSum", ["weights"], ["factor"]), helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
        {"IN": ("FP32", ("batch", 4))},
        {"OUT": ("FP32", ("batch", 4))},
        [numpy_helper.from_array(weights, "weights")],
    )


def run_cycles(server: RunningServer, repository: Path, kind: str, contents: list[bytes], number: int) -> None:
    """Load one content and the other in turn; each is asked once, so that its threads and buffers exist."""
    for cycle in range(number):
        models.write_model(repository, "m", contents[cycle % 2])
        if kind == "unload":
            assert server.post("/v2/repository/models/m/unload")[0] == 200
            assert first_value(server, "m") is None
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", float(cycle % 2 + 2))


def counts(server: RunningServer) -> np.ndarray:
    """Threads, descriptors, mappings, lines of metrics."""
    lines = len(server.metrics().splitlines())
    return np.array([server.num_threads(), server.num_descriptors(), server.num_mappings(), lines])


@pytest.mark.parametrize("kind", ["reload", "unload"])
@pytest.mark.parametrize(
    ("weight_bytes", "num_cycles", "allowed_bytes"),
    [
        (64, 300, 6 * 2**20),  # finds 20 KiB a cycle: objects, sessions, buffers
        (8 * 2**20, 40, 64 * 2**20),  # finds weights that stay, one time in five
    ],
    ids=["small", "large"],
)
def test_level(repository: Path, kind: str, weight_bytes: int, num_cycles: int, allowed_bytes: int) -> None:
    contents = [model_of(factor, weight_bytes) for factor in (2.0, 3.0)]
    models.write_model(repository, "m", contents[0])
    with run_server(repository, *EVERYTHING) as server:
        run_cycles(server, repository, kind, contents, NUM_WARM)
        before, memory_before = counts(server), server.memory_bytes()
        run_cycles(server, repository, kind, contents, num_cycles)
        # A thread of the version that has just been retired may be on its way out.
        wait_until(lambda: np.all(counts(server) - before < num_cycles / 8), f"counts as before: {before}")
        growth = server.memory_bytes() - memory_before
        print(f"{kind}: {growth / 2**20:+.1f} MiB in {num_cycles} cycles, after {memory_before / 2**20:.0f} MiB")
        assert growth < allowed_bytes, f"{growth / num_cycles / 1024:.0f} KiB more with each {kind}"
