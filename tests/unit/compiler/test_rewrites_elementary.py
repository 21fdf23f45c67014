"""Operators that TVM's importer lacks or gets wrong, written as others, give the same outputs."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

RNG = np.random.default_rng(21)
IMAGE = RNG.normal(size=(1, 8, 4, 6)).astype(np.float32)


def check(proto, inputs, tmp_path, *, tolerance=1e-5):
    graph = graph_of(proto, inputs, tmp_path)
    assert rewrite(graph)
    results = run(graph.attached(), inputs)
    num_outputs = len(results) - len(graph.guards)
    assert all(results[num_outputs:])
    assert_same(results[:num_outputs], run(proto, inputs), tolerance=tolerance)
    return graph


@pytest.mark.parametrize("positive, negative", [(1, 0), (0, 1), (0, 0)])
def test_is_inf_of_one_sign(positive, negative, tmp_path):
    proto = model(
        "g (float[n] x) => (bool[m] y) {"
        f" y = IsInf <detect_positive = {positive}, detect_negative = {negative}> (x) }}"
    )
    check(proto, {"x": np.array([1.0, np.inf, -np.inf, np.nan, 0.0], np.float32)}, tmp_path)


def test_is_inf_of_both_signs_is_left_alone(tmp_path):
    proto = model("g (float[n] x) => (bool[m] y) { y = IsInf (x) }")
    assert not rewrite(graph_of(proto, {"x": np.zeros(3, np.float32)}, tmp_path))


def test_the_mask_of_dropout(tmp_path):
    check(
        model("g (float[n, m] x) => (float[a, b] y, bool[c, d] z) { y, z = Dropout (x) }"), {"x": IMAGE[0, 0]}, tmp_path
    )


def test_dropout_in_training_is_left_alone(tmp_path):
    proto = model(
        "g (float[n, m] x) => (float[a, b] y) { y = Dropout (x, ratio, training) }",
        {"ratio": np.array(0.5, np.float32), "training": np.array(True)},
    )
    assert not rewrite(graph_of(proto, {"x": IMAGE[0, 0]}, tmp_path))


def test_eye_like(tmp_path):
    check(
        model("g (int32[n, m] x) => (float[a, b] y) { y = EyeLike <dtype = 1, k = 1> (x) }"),
        {"x": np.zeros((3, 5), np.int32)},
        tmp_path,
    )


@pytest.mark.parametrize("repeats", [[7, 6, 4, 2], [1, 1, 1, 3], [2, 1, 1, 1], [1, 1, 1, 1], [1, 5, 1, 2]])
def test_tile(repeats, tmp_path):
    proto = model(
        "g (float[a, b, c, d] x) => (float[e, f, g, h] y) { y = Tile (x, repeats) }",
        {"repeats": np.array(repeats, np.int64)},
    )
    graph = check(proto, {"x": IMAGE}, tmp_path, tolerance=0.0)
    assert "Tile" not in operators(graph)


def test_tile_to_nothing_is_left_alone(tmp_path):
    proto = model(
        "g (float[a, b] x) => (float[e, f] y) { y = Tile (x, repeats) }", {"repeats": np.array([0, 2], np.int64)}
    )
    assert not rewrite(graph_of(proto, {"x": IMAGE[0, 0]}, tmp_path))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("opset", [13, 18])
def test_lp_normalization(order, opset, tmp_path):
    x = IMAGE.copy()
    x[0, 0] = 0.0  # a vector of length zero
    proto = model(
        f"g (float[a, b, c, d] x) => (float[e, f, g, h] y) {{ y = LpNormalization <axis = 2, p = {order}> (x) }}",
        opset=opset,
    )
    check(proto, {"x": x}, tmp_path)


@pytest.mark.parametrize(
    "base, exponent", [("float", "int64"), ("int64", "int64"), ("int32", "float"), ("double", "float")]
)
def test_power_of_two_types(base, exponent, tmp_path):
    kinds = {"float": np.float32, "double": np.float64, "int32": np.int32, "int64": np.int64}
    proto = model(f"g ({base}[n] x, {exponent}[n2] p) => ({base}[m] y) {{ y = Pow (x, p) }}")
    inputs = {"x": np.array([2, 3, 7, 1], kinds[base]), "p": np.array([3, 2, 5, 0], kinds[exponent])}
    check(proto, inputs, tmp_path)


def test_power_of_one_type_is_left_alone(tmp_path):
    proto = model("g (float[n] x) => (float[m] y) { y = Pow (x, x) }")
    assert not rewrite(graph_of(proto, {"x": np.ones(3, np.float32)}, tmp_path))


@pytest.mark.parametrize(
    "attributes",
    [
        "output_shape = [10, 14], strides = [3, 2]",
        "output_shape = [8, 12], strides = [2, 2]",
        "output_shape = [7, 11], strides = [2, 2]",
        'auto_pad = "SAME_UPPER", strides = [2, 2]',
        'auto_pad = "SAME_LOWER", strides = [2, 2]',
        'auto_pad = "SAME_UPPER", strides = [3, 2], dilations = [2, 1]',
    ],
)
def test_conv_transpose_that_names_its_output_shape(attributes, tmp_path):
    proto = model(
        f"g (float[n, 8, h, w] x) => (float[a, b, c, d] y) {{ y = ConvTranspose <{attributes}> (x, weight) }}",
        {"weight": RNG.normal(size=(8, 3, 3, 3)).astype(np.float32)},
    )
    check(proto, {"x": IMAGE}, tmp_path)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["int64", "float"])
def test_one_hot(axis, kind, tmp_path):
    dtype = {"int64": np.int64, "float": np.float32}[kind]
    proto = model(
        f"g ({kind}[a, b] x) => (float[c, d, e] y) {{ y = OneHot <axis = {axis}> (x, depth, values) }}",
        {"depth": np.array([5], dtype), "values": np.array([-1.0, 3.0], np.float32)},
    )
    check(proto, {"x": np.array([[0, 4, 5], [-1, -5, -6]], dtype)}, tmp_path)


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_reverse_sequence(batch_axis, tmp_path):
    proto = model(
        "g (float[a, b, c, d] x, int64[n] lengths) => (float[e, f, g, h] y) {"
        f" y = ReverseSequence <batch_axis = {batch_axis}, time_axis = {1 - batch_axis}> (x, lengths) }}"
    )
    x = RNG.normal(size=(4, 4, 2, 3)).astype(np.float32)
    check(proto, {"x": x, "lengths": np.array([1, 4, 2, 3])}, tmp_path)


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_reduction_of_truth_values(operator, tmp_path):
    proto = model(
        f"g (bool[a, b] x) => (bool[c] y) {{ y = {operator} <keepdims = 0> (x, axes) }}",
        {"axes": np.array([1])},
        opset=20,
    )
    check(proto, {"x": np.array([[True, False], [True, True], [False, False]])}, tmp_path)


@pytest.mark.parametrize("kind", ["float", "float16", "double"])
def test_modulo_of_floating_point_numbers(kind, tmp_path):
    """Also of infinities and zeros of both signs."""
    numbers = np.array([5.5, -5.5, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.0, -3.0], np.float64)
    left, right = (grid.reshape(-1) for grid in np.meshgrid(numbers, numbers))
    dtype = {"float": np.float32, "float16": np.float16, "double": np.float64}[kind]
    proto = model(f"g ({kind}[n] x, {kind}[n] y) => ({kind}[m] z) {{ z = Mod (x, y) }}", opset=28)
    check(proto, {"x": left.astype(dtype), "y": right.astype(dtype)}, tmp_path)
