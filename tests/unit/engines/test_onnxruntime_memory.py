"""Sessions share one limit; what does not fit is an error, and all else as without it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.onnxruntime_memory import MemoryLimit
from hone.errors import EngineError
from hone.types import NUMPY_DTYPES
from tests import models

LIMIT_MIB = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def limit():
    """Sessions that are not told of it, those of other tests, are not concerned."""
    return MemoryLimit(LIMIT_MIB)


def load(folder, content, limit):
    path = folder / "model.onnx"
    path.write_bytes(content)
    return OnnxRuntimeEngine.load(path, SessionSettings(num_threads=1, memory=limit))


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
def test_what_fits_is_computed(limit, datatype, tmp_path):
    engine = load(tmp_path, models.identity(datatype, ("n", 3)), limit)
    array = np.array([[b"a", b"b", b"c"]], object) if datatype == "BYTES" else np.ones((5, 3), NUMPY_DTYPES[datatype])
    (out,) = engine.run({"IN": array}, ["OUT"])
    assert out.tolist() == array.tolist()


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_what_does_not_fit_is_an_error(limit, datatype, tmp_path):
    nodes = [helper.make_node("Tile", ["IN", "TIMES"], ["OUT"])]
    if datatype == "BF16":  # which Tile does not take
        nodes = [
            helper.make_node("Cast", ["IN"], ["wide"], to=1),
            helper.make_node("Tile", ["wide", "TIMES"], ["many"]),
            helper.make_node("Cast", ["many"], ["OUT"], to=16),
        ]
    inputs = {"IN": (datatype, ["n"]), "TIMES": ("INT64", [1])}
    engine = load(tmp_path, models.model(nodes, inputs, {"OUT": (datatype, ["m"])}), limit)
    given = {"IN": np.ones(MIB // 4, NUMPY_DTYPES[datatype]), "TIMES": np.array([100])}
    with pytest.raises(EngineError, match=f"more than the limit of {LIMIT_MIB} MiB"):
        engine.run(given, ["OUT"])
    given["TIMES"][0] = 3
    assert engine.run(given, ["OUT"])[0].shape == (3 * MIB // 4,)


def test_outputs_that_somebody_holds_count_and_are_given_back(limit, tmp_path):
    engine = load(tmp_path, models.identity("UINT8", ("n",)), limit)
    array = np.zeros(6 * MIB, np.uint8)
    held = [engine.run({"IN": array}, ["OUT"])[0] for _ in range(5)]  # nearly the whole limit, none of it wasted
    with pytest.raises(EngineError, match="out of memory"):
        engine.run({"IN": array}, ["OUT"])
    assert all(not out.any() for out in held)
    del held
    assert engine.run({"IN": np.zeros(30 * MIB, np.uint8)}, ["OUT"])[0].size == 30 * MIB


def test_values_of_runs_before_are_not_planned_for(limit, tmp_path):
    """The shapes of the inputs are the same, what the model makes of them is not."""
    nodes = [
        helper.make_node("ConstantOfShape", ["SIZE"], ["zeros"]),
        helper.make_node("ReduceMax", ["zeros"], ["LARGEST"], keepdims=1),
    ]
    engine = load(tmp_path, models.model(nodes, {"SIZE": ("INT64", [1])}, {"LARGEST": ("FP32", [1])}), limit)
    for mib in (20, 30, 20, 30):
        assert engine.run({"SIZE": np.array([mib * MIB // 4])}, ["LARGEST"])[0].tolist() == [0.0]


def test_other_errors_are_told_as_ever(limit, tmp_path):
    nodes = [helper.make_node("Gather", ["IN", "AT"], ["OUT"])]
    content = models.model(nodes, {"IN": ("FP32", ["n"]), "AT": ("INT64", ["m"])}, {"OUT": ("FP32", ["m"])})
    engine = load(tmp_path, content, limit)
    with pytest.raises(EngineError, match=r"onnxruntime: .*out of data bounds"):
        engine.run({"IN": np.zeros(3, np.float32), "AT": np.array([7])}, ["OUT"])
