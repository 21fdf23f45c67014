"""Quantized operators in floating point give exactly ONNX Runtime's integers."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

RNG = np.random.default_rng(11)
KINDS = {"uint8": (0, 256), "int8": (-128, 128)}


def integers(kind, *shape):
    return RNG.integers(*KINDS[kind], shape).astype(kind)


def check(proto, inputs, tmp_path, kept=()):
    graph = graph_of(proto, inputs, tmp_path)
    assert rewrite(graph)
    assert not operators(graph) & {"ConvInteger", "QLinearConv", "QLinearMatMul"}
    assert_same(run(graph.attached(), inputs), run(proto, inputs))
    return graph


@pytest.mark.parametrize("weight_kind", ["uint8", "int8"])
def test_conv_integer(weight_kind, tmp_path):
    proto = model(
        "g (uint8[n, 4, 9, 9] x) => (int32[a, b, c, d] y) {"
        " y = ConvInteger <pads = [1, 0, 1, 0], strides = [2, 1], group = 2> (x, w, xz, wz) }",
        {
            "w": integers(weight_kind, 6, 2, 3, 3),
            "xz": np.array(131, np.uint8),
            "wz": np.array(7, weight_kind),
        },
    )
    check(proto, {"x": integers("uint8", 2, 4, 9, 9)}, tmp_path)


def num_convolutions(graph):
    return sum(node.op_type == "Conv" for node in graph.nodes)


def test_sums_too_large_for_float32_are_cut_into_parts(tmp_path):
    proto = model(
        "g (uint8[1, 512, 3, 3] x) => (int32[a, b, c, d] y) { y = ConvInteger (x, w) }",
        {"w": np.full((2, 512, 3, 3), 127, np.int8)},
    )
    x = np.full((1, 512, 3, 3), 255, np.uint8)
    x[0, 0, 0, 0] = 254  # an odd sum, which float32 would round
    assert num_convolutions(check(proto, {"x": x}, tmp_path)) == 9


def test_small_sums_need_one_convolution(tmp_path):
    proto = model(
        "g (uint8[1, 4, 5, 5] x) => (int32[a, b, c, d] y) { y = ConvInteger (x, w) }",
        {"w": integers("int8", 2, 4, 3, 3)},
    )
    assert num_convolutions(check(proto, {"x": integers("uint8", 1, 4, 5, 5)}, tmp_path)) == 1


def test_weights_from_an_input_are_left_alone(tmp_path):
    proto = model("g (uint8[1, 4, 5, 5] x, int8[2, 4, 3, 3] w) => (int32[a, b, c, d] y) { y = ConvInteger (x, w) }")
    inputs = {"x": integers("uint8", 1, 4, 5, 5), "w": integers("int8", 2, 4, 3, 3)}
    assert not rewrite(graph_of(proto, inputs, tmp_path))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_qlinear_conv(per_channel, biased, kind, tmp_path):
    scales = RNG.uniform(0.002, 0.02, 5 if per_channel else 1).astype(np.float32)
    weights = {
        "xs": np.array(0.04, np.float32),
        "xz": np.array(12, kind),
        "w": integers("int8", 5, 3, 3, 3),
        "ws": scales if per_channel else scales[0],
        "wz": np.zeros(5, np.int8) if per_channel else np.array(0, np.int8),
        "ys": np.array(0.11, np.float32),
        "yz": np.array(-3 if kind == "int8" else 120, kind),
    }
    if biased:
        weights["b"] = RNG.integers(-3000, 3000, 5).astype(np.int32)
    proto = model(
        f"g ({kind}[n, 3, 8, 8] x) => ({kind}[a, b, c, d] y) {{"
        f" y = QLinearConv <pads = [1, 1, 1, 1]> (x, xs, xz, w, ws, wz, ys, yz{', b' if biased else ''}) }}",
        weights,
    )
    check(proto, {"x": integers(kind, 2, 3, 8, 8)}, tmp_path)


@pytest.mark.parametrize("depth", [16, 700])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_qlinear_matmul(depth, per_column, kind, tmp_path):
    scales = RNG.uniform(0.002, 0.02, 7 if per_column else 1).astype(np.float32)
    weights = {
        "as": np.array(0.05, np.float32),
        "az": np.array(9, kind),
        "b": integers("int8", depth, 7),
        "bs": scales if per_column else scales[0],
        "bz": np.zeros(7, np.int8) if per_column else np.array(2, np.int8),
        "ys": np.array(0.2 * depth / 16, np.float32),
        "yz": np.array(1 if kind == "int8" else 128, kind),
    }
    proto = model(
        f"g ({kind}[n, {depth}] a) => ({kind}[c, d] y) {{ y = QLinearMatMul (a, as, az, b, bs, bz, ys, yz) }}", weights
    )
    check(proto, {"a": integers(kind, 4, depth)}, tmp_path)
