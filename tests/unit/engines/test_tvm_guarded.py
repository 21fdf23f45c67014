"""A tuned engine declines what ONNX Runtime answers with an error; it survives it, and serves on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import InputsDeclined
from tests.unit.engines.tvm_artifacts import MANIFEST, baseline, compile_to, load, save_model

LEAST = np.iinfo(np.int32).min


@pytest.fixture(scope="module")
def runtime():
    return TvmRuntime.load(num_threads=1)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """Token ids into a table, and what comes of it is divided by other inputs."""
    folder = tmp_path_factory.mktemp("embedding")
    table = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    nodes = [
        ("Gather", ["table", "ids"], ["rows"], {}),
        ("ReduceMean", ["rows"], ["y"], {"axes": [1], "keepdims": 0}),
        ("Div", ["a", "b"], ["q"], {}),
        ("Mod", ["a", "b"], ["m"], {}),
    ]
    inputs = {"ids": ("int64", [2, 9]), "a": ("int32", [4]), "b": ("int32", [4])}
    outputs = {"y": ("float32", [2, 16]), "q": ("int32", [4]), "m": ("int32", [4])}
    return compile_to(folder / "artifact", save_model(folder / "model.onnx", nodes, inputs, outputs, {"table": table}))


def given(**changed):
    inputs = {
        "ids": np.random.default_rng(1).integers(-50, 50, (2, 9)),
        "a": np.array([7, -7, 100, LEAST], np.int32),
        "b": np.array([2, 3, -7, 5], np.int32),
    }
    return inputs | changed


def test_valid_inputs_are_answered_as_the_baseline_does(embedding, runtime):
    instance = load(embedding, runtime).instantiate()
    outputs = ["y", "q", "m"]
    inputs = given()
    for found, expected in zip(
        instance.run(inputs, outputs), baseline(embedding / "model.onnx", inputs, outputs), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [array.shape for array in instance.run(inputs, ["m", "y"])] == [(4,), (2, 16)]


@pytest.mark.parametrize("ids", [50, -51, 2**62, -(2**62)])
def test_an_index_out_of_range_is_declined(embedding, runtime, ids):
    instance = load(embedding, runtime).instantiate()
    bad = given(ids=np.where(np.arange(18).reshape(2, 9) == 13, ids, 3))
    with pytest.raises(Exception, match="indices"):
        baseline(embedding / "model.onnx", bad, ["y"])
    with pytest.raises(InputsDeclined):
        instance.run(bad, ["y"])
    instance.run(given(), ["y"])


def test_a_division_by_zero_is_declined(embedding, runtime):
    instance = load(embedding, runtime).instantiate()
    bad = given(b=np.array([1, 0, 1, 1], np.int32))
    with pytest.raises(Exception, match="zero"):
        baseline(embedding / "model.onnx", bad, ["q"])
    with pytest.raises(InputsDeclined):
        instance.run(bad, ["q", "m"])
    instance.run(given(), ["q"])


def test_the_least_integer_by_minus_one_is_answered(embedding, runtime):
    inputs = given(a=np.full(4, LEAST, np.int32), b=np.array([-1, 1, -1, 2], np.int32))
    q, m = load(embedding, runtime).instantiate().run(inputs, ["q", "m"])
    expected = baseline(embedding / "model.onnx", inputs, ["q", "m"])
    np.testing.assert_array_equal(q, expected[0])
    np.testing.assert_array_equal(m, expected[1])


def test_the_manifest_says_that_it_is_guarded(embedding):
    told = json.loads((embedding / MANIFEST).read_text(encoding="utf-8"))
    assert told["guarded"] is True
    assert [spec["name"] for spec in told["outputs"]] == ["y", "q", "m"]
