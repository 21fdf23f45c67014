"""Operators over windows, gathered by constant indices, give what ONNX Runtime gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hone.compiler.rewrites import patches, rewrite
from tests.unit.compiler.graphs import graph_of, model, operators, run
from tests.unit.compiler.test_rewrites_elementary import check

RNG = np.random.default_rng(8)


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape = [2, 2]",
        "kernel_shape = [3, 2], strides = [2, 1]",
        "kernel_shape = [3, 3], pads = [1, 1, 1, 1], storage_order = 1",
        "kernel_shape = [3, 3], pads = [1, 0, 1, 1], strides = [2, 2], ceil_mode = 1",
        'kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER"',
        'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_LOWER"',
        "kernel_shape = [2, 2], dilations = [2, 3]",
    ],
)
def test_max_pool_with_indices(attributes, tmp_path):
    image = RNG.permutation(2 * 3 * 7 * 6).reshape(2, 3, 7, 6).astype(np.float32) - 99
    proto = model(
        f"g (float[a, b, c, d] x) => (float[e, f, h, i] y, int64[j, k, l, m] z) {{ y, z = MaxPool <{attributes}> (x) }}"
    )
    graph = check(proto, {"x": image}, tmp_path)
    assert "MaxPool" not in operators(graph)


def test_equal_items_count_as_the_first(tmp_path):
    proto = model(
        "g (float[a, b, c] x) => (float[e, f, h] y, int64[j, k, l] z) { y, z = MaxPool <kernel_shape = [3]> (x) }"
    )
    check(proto, {"x": np.array([[[1, 1, 0, 1, 1, 0, 0, 0]]], np.float32)}, tmp_path)


@pytest.mark.parametrize("datatype", ["int8", "uint8"])
def test_max_pool_of_8_bits_with_padding(datatype, tmp_path):
    proto = model(
        f"g ({datatype}[a, b, c, d] x) => ({datatype}[e, f, h, i] y, int64[j, k, l, m] z) {{"
        " y, z = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) }"
    )
    least = np.iinfo(datatype).min
    graph = check(proto, {"x": (RNG.permutation(25).reshape(1, 1, 5, 5) + least).astype(datatype)}, tmp_path)
    # No item is less than padding then, and none of it is chosen: but the first that there is in each window.
    values, indices = run(graph.attached(), {"x": np.full((1, 1, 5, 5), least, datatype)})
    assert np.all(values == least)
    first = np.maximum(np.arange(5) - 1, 0)
    np.testing.assert_array_equal(indices[0, 0], first[:, None] * 5 + first[None, :])


def test_max_pool_of_windows_that_are_all_padding_is_left_alone(tmp_path):
    proto = model(
        "g (float[a, b, c] x) => (float[e, f, h] y, int64[j, k, l] z) {"
        " y, z = MaxPool <kernel_shape = [2], dilations = [5], pads = [1, 2]> (x) }"
    )
    assert not rewrite(graph_of(proto, {"x": np.zeros((1, 1, 3), np.float32)}, tmp_path))


def test_max_unpool_into_a_named_shape(tmp_path):
    proto = model(
        "g (float[a, b, c, d] x, int64[e, f, h, i] at) => (float[j, k, l, m] y) {"
        " y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, at, shape) }",
        {"shape": np.array([1, 1, 5, 5])},
    )
    inputs = {"x": np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2), "at": np.array([[[[5, 7], [13, 24]]]])}
    graph = check(proto, inputs, tmp_path)
    assert len(graph.guards) == 1
    held = dict(inputs, at=np.array([[[[5, 7], [13, -1]]]]))
    *_, guard = run(graph.attached(), held)
    assert not guard


def test_blocks_without_end_are_no_kernels(tmp_path, monkeypatch):
    proto = model(
        "g (float[a, b, c] x) => (float[d, e, f, h] y) { y = Col2Im (x, image, block) }",
        {"image": np.array([7, 8]), "block": np.array([3, 2])},
        opset=18,
    )
    inputs = {"x": np.zeros((1, 6, 35), np.float32)}
    monkeypatch.setattr(patches, "_MAX_TABLE_ITEMS", 36)
    assert rewrite(graph_of(proto, inputs, tmp_path))
    monkeypatch.setattr(patches, "_MAX_TABLE_ITEMS", 35)
    assert not rewrite(graph_of(proto, inputs, tmp_path))


@pytest.mark.parametrize("strides, dilations, pads", [*itertools.product([1, 2], [1, 2], [0, 1])])
def test_col2im(strides, dilations, pads, tmp_path):
    image, block = np.array([7, 8]), np.array([3, 2])
    counts = [(size + 2 * pads - dilations * (k - 1) - 1) // strides + 1 for size, k in zip(image, block, strict=True)]
    columns = RNG.normal(size=(2, 4 * 6, counts[0] * counts[1])).astype(np.float32)
    proto = model(
        "g (float[a, b, c] x) => (float[d, e, f, h] y) { y = Col2Im <"
        f"strides = {[strides] * 2}, dilations = {[dilations] * 2}, pads = {[pads] * 4}"
        "> (x, image, block) }",
        {"image": image, "block": block},
        opset=18,
    )
    check(proto, {"x": columns}, tmp_path)


@pytest.mark.parametrize("group, offset_group", [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("opset", [19, 22])
def test_deform_conv(group, offset_group, opset, tmp_path):
    inputs = {
        "x": RNG.normal(size=(2, 8, 6, 7)).astype(np.float32),
        "offset": RNG.normal(size=(2, offset_group * 12, 3, 7)).astype(np.float32) * 2,
        "mask": RNG.random((2, offset_group * 6, 3, 7)).astype(np.float32),
    }
    proto = model(
        "g (float[a, b, c, d] x, float[e, f, h, i] offset, float[j, k, l, m] mask) => (float[o, p, q, r] y) {"
        f" y = DeformConv <group = {group}, offset_group = {offset_group}, strides = [2, 1], pads = [1, 1, 1, 0],"
        " dilations = [1, 1]> (x, w, offset, bias, mask) }",
        {
            "w": RNG.normal(size=(4, 8 // group, 3, 2)).astype(np.float32),
            "bias": RNG.normal(size=4).astype(np.float32),
        },
        opset=opset,
    )
    check(proto, inputs, tmp_path, tolerance=1e-4)


def test_deform_conv_without_mask_and_bias(tmp_path):
    inputs = {
        "x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32),
        "offset": RNG.normal(size=(1, 8, 4, 4)).astype(np.float32),
    }
    proto = model(
        "g (float[a, b, c, d] x, float[e, f, h, i] offset) => (float[o, p, q, r] y) { y = DeformConv (x, w, offset) }",
        {"w": RNG.normal(size=(2, 3, 2, 2)).astype(np.float32)},
        opset=19,
    )
    check(proto, inputs, tmp_path, tolerance=1e-4)


def test_max_pool_without_indices_is_left_to_the_importer(tmp_path):
    proto = model("g (float[a, b, c, d] x) => (float[e, f, h, i] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }")
    assert not rewrite(graph_of(proto, {"x": np.zeros((1, 1, 4, 4), np.float32)}, tmp_path))
