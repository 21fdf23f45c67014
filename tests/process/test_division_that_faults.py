"""A request that divides the least integer by -1 gets the wrapped quotient, and the server lives to tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from tests import models
from tests.running import run_server

LEAST = {"INT32": -(2**31), "INT64": -(2**63)}


@pytest.mark.parametrize("datatype", LEAST)
def test_the_server_survives_and_answers(tmp_path: Path, datatype: str) -> None:
    tensors = {name: (datatype, ["batch", "n"]) for name in "AB"}
    onnx_bytes = models.model([helper.make_node("Div", ["A", "B"], ["Q"])], tensors, {"Q": (datatype, ["batch", "n"])})
    models.write_model(tmp_path, "quotient", onnx_bytes)
    least = LEAST[datatype]
    with run_server(tmp_path, "--tuning=off") as server:

        def divide(a: list[int], b: list[int]) -> tuple[int, dict]:
            inputs = [
                {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}
                for name, data in (("A", a), ("B", b))
            ]
            return server.post("/v2/models/quotient/infer", {"inputs": inputs})

        status, answer = divide([least, least, 7, -7], [-1, 2, -1, 2])
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [least, least // 2, -7, -3]
        status, answer = divide([7], [0])
        assert status == 500
        assert "division by zero" in answer["error"].lower()
        assert divide([9], [-3])[1]["outputs"][0]["data"] == [-3]
        assert server.stop() == 0
