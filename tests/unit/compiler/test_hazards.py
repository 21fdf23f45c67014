"""Models that answer a bad request with an error must not be replaced by code that answers with a number, or dies."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from hone.compiler.onnx_import import ImportedModel, import_model
from tests import models


def hazards(tmp_path, content: bytes, shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    imported = import_model(path, shapes)
    return imported.hazards if isinstance(imported, ImportedModel) else (f"unsupported: {imported.reason}",)


def binary(operator: str, datatype: str, constant: list[int] | None = None, **attributes: int) -> bytes:
    inputs = {"A": (datatype, ("n", 4)), "B": (datatype, ("n", 4))}
    initializers = []
    if constant is not None:
        del inputs["B"]
        initializers = [helper.make_tensor("B", models.ELEMENT_TYPES[datatype], [len(constant)], constant)]
    node = helper.make_node(operator, ["A", "B"], ["OUT"], **attributes)
    return models.model([node], inputs, {"OUT": (datatype, ("n", 4))}, initializers)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_integer_division_by_what_requests_bring_is_a_hazard(tmp_path, operator, datatype):
    (hazard,) = hazards(tmp_path, binary(operator, datatype), {"A": (1, 4), "B": (1, 4)})
    assert operator in hazard
    for constant, safe in (([2, 3, 4, 5], True), ([2, 0, 4, 5], False), ([2, -1, 4, 5], False)):
        found = hazards(tmp_path, binary(operator, datatype, constant), {"A": (1, 4)})
        assert (found == ()) is safe, constant


def test_float_division_is_none(tmp_path):
    assert hazards(tmp_path, binary("Div", "FP32"), {"A": (1, 4), "B": (1, 4)}) == ()


@pytest.mark.parametrize(("operator", "dims"), [("Gather", (2,)), ("GatherElements", (2, 4)), ("GatherND", (2, 1))])
def test_indices_that_requests_bring_are_a_hazard(tmp_path, operator, dims):
    table = helper.make_tensor("TABLE", TensorProto.FLOAT, [6, 4], np.arange(24, dtype=np.float32))
    node = helper.make_node(operator, ["TABLE", "I"], ["OUT"])
    content = models.model([node], {"I": ("INT64", dims)}, {"OUT": ("FP32", (None, None))}, [table])
    (hazard,) = hazards(tmp_path, content, {"I": dims})
    assert operator in hazard


def test_constant_indices_are_none(tmp_path):
    indices = helper.make_tensor("I", TensorProto.INT64, [2], [0, 3])
    node = helper.make_node("Gather", ["IN", "I"], ["OUT"], axis=1)
    content = models.model([node], {"IN": ("FP32", ("n", 4))}, {"OUT": ("FP32", ("n", 2))}, [indices])
    assert hazards(tmp_path, content, {"IN": (1, 4)}) == ()
