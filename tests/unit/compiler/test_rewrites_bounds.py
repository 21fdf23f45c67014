"""Indices that come from a request cannot point out of the tensor, valid ones pass unchanged; the guard tells."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites.bounds import UnboundedIndex, bound_indices
from tests.unit.compiler.graphs import assert_same, graph_of, model, run

DATA = np.arange(24, dtype=np.float32).reshape(4, 6)
UPDATES = np.full((2, 6), 100, np.float32)

GATHERS = {
    "Gather": ("Gather <axis = 1>", "[n]", "[a, b]", np.array([0, 5, -6, -1])),
    "GatherElements": ("GatherElements <axis = 0>", "[n, m]", "[a, b]", np.array([[0, 3, -4, -1, 2, 1]])),
    "GatherND": ("GatherND", "[n, 2]", "[a]", np.array([[0, 5], [-4, -6], [3, 0]])),
}


@pytest.mark.parametrize("operator, shape, result_shape, indices", GATHERS.values(), ids=GATHERS)
def test_gathers(operator, shape, result_shape, indices, tmp_path):
    proto = model(f"g (float[4, 6] x, int64{shape} at) => (float{result_shape} y) {{ y = {operator} (x, at) }}")
    inputs = {"x": DATA, "at": indices}
    graph = graph_of(proto, inputs, tmp_path)
    bound_indices(graph)
    bounded = graph.attached()
    *results, guard = run(bounded, inputs)
    assert guard == 1
    assert_same(results, run(proto, inputs))

    wild = inputs | {"at": np.where(indices == indices.max(), 10**12, indices - 10**12)}
    with pytest.raises(Exception, match="ind"):
        run(proto, wild)
    result, guard = run(bounded, wild)  # ONNX Runtime checks: every index is inside now
    assert guard == 0
    assert np.isin(result, DATA).all()


@pytest.mark.parametrize(
    "operator, shape, indices",
    [
        ("ScatterElements", "[n, m]", np.array([[0, 1, 2, 3, -1, -4], [1, 2, 3, 0, 0, 1]])),
        ("ScatterND", "[n, 1]", np.array([[3], [-4]])),
    ],
)
def test_scatters(operator, shape, indices, tmp_path):
    proto = model(
        f"g (float[4, 6] x, int64{shape} at, float[2, 6] u) => (float[a, b] y) {{ y = {operator} (x, at, u) }}"
    )
    inputs = {"x": DATA, "at": indices, "u": UPDATES}
    graph = graph_of(proto, inputs, tmp_path)
    bound_indices(graph)
    assert_same(run(graph.attached(), inputs)[:-1], run(proto, inputs))
    assert run(graph.attached(), inputs | {"at": indices * 10**12})[-1] == 0


def test_constant_indices_cost_nothing(tmp_path):
    proto = model("g (float[4, 6] x) => (float[a, b] y) { y = Gather (x, at) }", {"at": np.array([1, 2])})
    graph = graph_of(proto, {"x": DATA}, tmp_path)
    bound_indices(graph)
    assert [node.op_type for node in graph.nodes] == ["Gather"]


def test_regions_point_to_images_of_the_batch(tmp_path):
    proto = model(
        "g (float[2, 1, 6, 6] x, float[r, 4] rois, int64[r] image) => (float[a, b, c, d] y) {"
        " y = RoiAlign <output_height = 2, output_width = 2> (x, rois, image) }"
    )
    inputs = {
        "x": np.random.default_rng(1).random((2, 1, 6, 6), np.float32),
        "rois": np.array([[0, 0, 4, 4], [1, 1, 5, 5]], np.float32),
        "image": np.array([0, 1]),
    }
    graph = graph_of(proto, inputs, tmp_path)
    bound_indices(graph)
    assert_same(run(graph.attached(), inputs)[:-1], run(proto, inputs))
    last = run(proto, inputs | {"image": np.array([0, 1])})
    *held, guard = run(graph.attached(), inputs | {"image": np.array([-7, 99])})
    assert guard == 0
    assert_same(held, last)


def test_indices_that_cannot_be_held_are_refused(tmp_path):
    proto = model(
        "g (float[1, 1, 6, 6] x, float[1, 5] rois) => (float[a, b, c, d] y) {"
        " y = MaxRoiPool <pooled_shape = [2, 2]> (x, rois) }"
    )
    inputs = {"x": np.zeros((1, 1, 6, 6), np.float32), "rois": np.zeros((1, 5), np.float32)}
    with pytest.raises(UnboundedIndex, match="MaxRoiPool"):
        bound_indices(graph_of(proto, inputs, tmp_path))
