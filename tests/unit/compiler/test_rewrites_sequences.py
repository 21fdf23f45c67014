"""CumProd, TensorScatter and Det, written as others, and shifts beyond the width, give what ONNX Runtime gives."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from hone.compiler.rewrites import rewrite
from hone.compiler.rewrites.division import hold_shifts
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run
from tests.unit.compiler.test_rewrites_elementary import check

RNG = np.random.default_rng(13)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("axis, size", [(0, 1), (0, 2), (1, 7), (-1, 8)])
def test_cumulative_product(reverse, exclusive, axis, size, tmp_path):
    shape = (size, 3) if axis == 0 else (3, size)
    proto = model(
        "g (int32[n, m] x) => (int32[k, l] y) {"
        f" y = CumProd <reverse = {reverse}, exclusive = {exclusive}> (x, axis) }}",
        {"axis": np.array(axis)},
        opset=26,
    )
    graph = check(proto, {"x": RNG.integers(-5, 6, shape).astype(np.int32)}, tmp_path)
    assert "CumProd" not in operators(graph)


@pytest.mark.parametrize("reverse", [0, 1])
def test_a_product_along_a_long_axis_brings_no_large_constants(reverse, tmp_path):
    proto = model(
        f"g (float[n, m] x) => (float[k, l] y) {{ y = CumProd <reverse = {reverse}, exclusive = 1> (x, axis) }}",
        {"axis": np.array(1)},
        opset=26,
    )
    graph = check(proto, {"x": RNG.uniform(0.9, 1.1, (64, 200)).astype(np.float32)}, tmp_path)
    assert not graph.weights
    assert sum(len(tensor.raw_data) for tensor in graph.model.graph.initializer) < 2000


@pytest.mark.parametrize("mode, begins", [("linear", [0, 3]), ("circular", [4, 1])])
@pytest.mark.parametrize("steps", [1, 2])
def test_steps_written_into_a_cache(mode, begins, steps, tmp_path):
    inputs = {
        "cache": RNG.normal(size=(2, 3, 5, 4)).astype(np.float32),
        "update": RNG.normal(size=(2, 3, steps, 4)).astype(np.float32),
        "begin": np.array(begins),
    }
    proto = model(
        "g (float[a, b, c, d] cache, float[e, f, h, i] update, int64[n] begin) => (float[j, k, l, m] y) {"
        f' y = TensorScatter <mode = "{mode}"> (cache, update, begin) }}',
        opset=24,
    )
    graph = check(proto, inputs, tmp_path)
    *_, guard = run(graph.attached(), dict(inputs, begin=np.array([0, 5])))
    assert not guard


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_determinant(size, tmp_path):
    proto = model("g (float[a, b, c] x) => (float[n] y) { y = Det (x) }")
    check(proto, {"x": RNG.normal(size=(5, size, size)).astype(np.float32)}, tmp_path, tolerance=1e-5)


def test_a_larger_determinant_is_left_alone(tmp_path):
    proto = model("g (float[a, b] x) => (float y) { y = Det (x) }")
    assert not rewrite(graph_of(proto, {"x": np.eye(5, dtype=np.float32)}, tmp_path))


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64])
@pytest.mark.parametrize("constant", [True, False])
def test_shifts_by_any_distance(direction, dtype, constant, tmp_path):
    name, width = np.dtype(dtype).name, np.dtype(dtype).itemsize * 8
    signed = np.dtype(dtype).kind == "i"
    distances = np.array([0, 1, width - 1, width, width + 1, 200, *([-1, -width] if signed else [])], dtype)
    values = np.full(distances.shape, -77 if signed else 77, dtype)
    proto = model(
        f"g ({name}[n] x{'' if constant else f', {name}[m] d'}) => ({name}[k] y) {{"
        f' y = BitShift <direction = "{direction}"> (x, d) }}',
        {"d": distances} if constant else {},
        opset=28 if signed else 17,
    )
    inputs = {"x": values} if constant else {"x": values, "d": distances}
    graph = graph_of(proto, inputs, tmp_path)
    before = operators(graph)
    hold_shifts(graph)
    assert operators(graph) > before
    fill = -1 if signed and direction == "RIGHT" else 0
    expected = [
        (int(value) << int(by) if direction == "LEFT" else int(value) >> int(by)) if 0 <= by < width else fill
        for value, by in zip(values, distances, strict=True)
    ]
    wrapped = np.array([value % 2**width for value in expected], f"u{width // 8}").view(dtype)
    # ONNX Runtime has no Where of these types; the graph is TVM's.
    assert_same(ReferenceEvaluator(graph.attached()).run(None, inputs), [wrapped])


def test_shifts_within_the_width_stay(tmp_path):
    proto = model(
        'g (uint8[n] x) => (uint8[k] y) { y = BitShift <direction = "LEFT"> (x, d) }', {"d": np.uint8([1, 7])}
    )
    graph = graph_of(proto, {"x": np.uint8([1, 2])}, tmp_path)
    hold_shifts(graph)
    assert operators(graph) == {"BitShift"}
