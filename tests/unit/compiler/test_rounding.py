"""Layers that round their operands when told to: against rounding written out in numpy, and against real kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hone.compiler.onnx_import import import_model
from hone.compiler.pipeline import lowerable_layers
from hone.compiler.rounding import RoundedModel, round_to_bfloat16
from hone.types import NUMPY_DTYPES
from tests.unit.compiler.test_precision import AVX512, HOST, runs_here
from tests.unit.engines.tvm_artifacts import save_model

_SIZE = 24

pytestmark = pytest.mark.usefixtures("precompiled_headers")


@given(arrays.arrays(np.float32, 9, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
@settings(deadline=None)
def test_rounding_is_that_of_the_datatype(values):
    with np.errstate(over="ignore"):
        expected = values.astype(NUMPY_DTYPES["BF16"]).astype(np.float32)
    found = round_to_bfloat16(values)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
    np.testing.assert_array_equal(found[~np.isnan(values)], expected[~np.isnan(values)])


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(5)
    return [rng.standard_normal((_SIZE, _SIZE)).astype(np.float32) / 5 for _ in range(3)]


@pytest.fixture(scope="module")
def chain(tmp_path_factory, weights):
    """Three products, the first one's result read twice: by the second, and by what adds up the end."""
    nodes = [
        ("MatMul", ["x", "w0"], ["a"], {}),
        ("MatMul", ["a", "w1"], ["b"], {}),
        ("Relu", ["b"], ["c"], {}),
        ("MatMul", ["c", "w2"], ["d"], {}),
        ("Add", ["a", "d"], ["y"], {}),
    ]
    path = tmp_path_factory.mktemp("rounding") / "model.onnx"
    named = {f"w{i}": weight for i, weight in enumerate(weights)}
    return save_model(path, nodes, {"x": ("float32", [7, _SIZE])}, {"y": ("float32", [7, _SIZE])}, named)


@pytest.fixture(scope="module")
def rounded(chain):
    return RoundedModel(import_model(chain, {"x": (7, _SIZE)}), HOST)


def written_out(x, weights, lowered):
    def product(layer, data):
        weight = weights[layer]
        if layer in lowered:
            data, weight = round_to_bfloat16(data), round_to_bfloat16(weight)
        return data @ weight

    a = product(0, x)
    return a + product(2, np.maximum(product(1, a), 0))


@runs_here
@pytest.mark.parametrize("lowered", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2), ()], ids=str)
def test_only_the_layers_asked_for_round(rounded, weights, lowered):
    x = np.random.default_rng(1).standard_normal((7, _SIZE)).astype(np.float32)
    before = x.copy()
    [found] = rounded.run([x], lowered)
    np.testing.assert_allclose(found, written_out(x, weights, lowered), rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(x, before)
    if lowered:
        assert np.abs(found - written_out(x, weights, ())).max() > 1e-4


@runs_here
def test_layers_are_those_of_the_precision(chain, rounded):
    imported = import_model(chain, {"x": (7, _SIZE)})
    assert rounded.layers == lowerable_layers(imported, AVX512, "bf16")
    plain = 2 * 7 * _SIZE * _SIZE
    assert rounded.operations == [plain, plain + 7 * _SIZE, plain + 7 * _SIZE]  # a step behind each but the first
