"""A request whose index is out of range gets ONNX Runtime's error also from a tuned model, which then serves on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests import models
from tests.process.test_tuning_end_to_end import DIMS, IMAGE, chain
from tests.running import RunningServer, run_server, wait_until

NUM_ROWS = 6


def embedding_chain() -> bytes:
    """A chain of element-wise operators (a sure gain), whose result has rows of a table added that inputs choose."""
    model = onnx.load_from_string(chain())
    graph = model.graph
    for node in graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = "chained" if name == "OUT" else name
    table = np.random.default_rng(3).standard_normal((NUM_ROWS, DIMS[-1])).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(table, "table"))
    graph.input.append(helper.make_tensor_value_info("IDS", models.ELEMENT_TYPES["INT64"], [1]))
    graph.node.append(helper.make_node("Gather", ["table", "IDS"], ["row"]))
    graph.node.append(helper.make_node("Add", ["chained", "row"], ["OUT"]))
    return model.SerializeToString()


def ask(server: RunningServer, index: int) -> tuple[int, Any]:
    inputs = [
        {"name": "IN", "datatype": "FP32", "shape": list(DIMS), "data": IMAGE.reshape(-1).tolist()},
        {"name": "IDS", "datatype": "INT64", "shape": [1], "data": [index]},
    ]
    return server.post("/v2/models/rows/infer", {"inputs": inputs})


def numbers(answer: Any) -> np.ndarray:
    return np.array(answer["outputs"][0]["data"], np.float32)


@pytest.mark.timeout(300)
def test_the_error_is_the_baselines_and_the_server_survives(tmp_path: Path) -> None:
    models.write_model(tmp_path / "models", "rows", embedding_chain())
    with run_server(tmp_path / "models", "--tuning=on", f"--kernels-cache={tmp_path / 'cache'}") as server:
        expected = {index: ask(server, index) for index in (0, NUM_ROWS - 1, -NUM_ROWS, NUM_ROWS, -NUM_ROWS - 1, 2**40)}
        assert [status for status, _ in expected.values()] == [200, 200, 200, 500, 500, 500]

        def tuned() -> dict[str, Any] | None:
            told = tuning_of(server)
            return told if told["state"] not in ("queued", "tuning") else None

        told = wait_until(tuned, "tuning ends", seconds=240)
        assert "tvm" in {bucket["engine"] for bucket in told["buckets"]}, server.log
        for index, (status, answer) in expected.items():
            found_status, found = ask(server, index)
            assert found_status == status, found
            if status == 200:
                np.testing.assert_allclose(numbers(found), numbers(answer), atol=1e-4)
            else:
                assert found == answer
        assert re.search(r'hone_declined_executions_total\{model="rows",version="1"\} 3', server.metrics())
        assert tuning_of(server)["state"] == "tuned", "nobody is blamed for what a client did"
        assert server.stop() == 0


def tuning_of(server: RunningServer) -> dict[str, Any]:
    status, told = server.get("/v2/models/rows/tuning")
    assert status == 200, told
    return told
