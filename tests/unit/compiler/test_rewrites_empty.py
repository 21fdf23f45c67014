"""Splits into nothing and extremes of nothing are what ONNX Runtime gives."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

X = np.random.default_rng(43).normal(size=(3, 6)).astype(np.float32)


def split(sizes, opset):
    names = [f"y{number}" for number in range(len(sizes))]
    outputs = ", ".join(f"float[a{name}, b{name}] {name}" for name in names)
    text = f"g (float[n, m] x) => ({outputs}) {{ {', '.join(names)} = Split <axis = 1> (x, sizes) }}"
    return model(text, {"sizes": np.array(sizes, np.int64)}, opset=opset)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("sizes", [[0, 6], [2, 0, 4], [0, 0, 5, 0, 1], [0, 6, 0]])
def test_split(sizes, opset, tmp_path):
    proto = split(sizes, opset)
    graph = graph_of(proto, {"x": X}, tmp_path)
    assert rewrite(graph)
    assert ("Split" in operators(graph)) == (sum(size > 0 for size in sizes) > 1)
    assert_same(run(graph.attached(), {"x": X}), run(proto, {"x": X}))
    assert not rewrite(graph)


def test_a_split_whose_parts_all_have_items_stays(tmp_path):
    assert not rewrite(graph_of(split([1, 5], 18), {"x": X}, tmp_path))


@pytest.mark.parametrize("parts", ["x, e", "e, x", "e, x, e, x", "e, x, e"])
def test_concat(parts, tmp_path):
    text = f"g (float[n, m] x) => (float[n, k] y) {{ y = Concat <axis = -1> ({parts}) }}"
    proto = model(text, {"e": np.zeros((3, 0), np.float32)}, opset=20)
    graph = graph_of(proto, {"x": X}, tmp_path)
    assert rewrite(graph)
    assert_same(run(graph.attached(), {"x": X}), run(proto, {"x": X}))
    assert not rewrite(graph)


@pytest.mark.parametrize("parts", ["x, x", "e, e"])
def test_a_concat_of_parts_that_are_alike_stays(parts, tmp_path):
    text = f"g (float[n, m] x) => (float[n, k] y) {{ y = Concat <axis = 1> ({parts}) }}"
    proto = model(text, {"e": np.zeros((3, 0), np.float32)}, opset=20)
    assert not rewrite(graph_of(proto, {"x": X}, tmp_path))


@pytest.mark.parametrize("kind", ["float", "float16", "double"])
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_extremes_of_nothing(operator, kind, tmp_path):
    text = f"g ({kind}[n, m] x) => ({kind}[n, 1] y) {{ y = {operator} (x, axes) }}"
    proto = model(text, {"axes": np.array([1], np.int64)}, opset=20)
    x = np.zeros((3, 0), {"float": np.float32, "float16": np.float16, "double": np.float64}[kind])
    graph = graph_of(proto, {"x": x}, tmp_path)
    assert rewrite(graph)
    assert operator not in operators(graph)
    assert_same(run(graph.attached(), {"x": x}), run(proto, {"x": x}))
