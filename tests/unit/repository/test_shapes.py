from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.protos import config_pb
from hone.repository import narrowed, to_client, to_engine
from hone.repository.shapes import runs
from hone.types import TensorSpec, num_elements


def tensor(dims, shape=None):
    made = config_pb.ModelInput(name="x", dims=dims)
    if shape is not None:
        made.reshape.SetInParent()
        made.reshape.shape.extend(shape)
    return made


@pytest.mark.parametrize(
    ("client", "dims", "reshape", "graph", "batching", "engine"),
    [
        ((8, 3), (3,), None, (-1, 3), True, (8, 3)),
        ((8, 1), (1,), (), (-1,), True, (8,)),
        ((2, 4, 9, 6), (2, 4, -1, 6), (8, -1, 1, 6), (8, -1, 1, 6), False, (8, 9, 1, 6)),
        ((5, 2, 4, 9, 7), (2, 4, -1, -1), (8, -1, -1), (-1, 8, -1, -1), True, (5, 8, 9, 7)),
        ((1,), (1,), None, (), False, ()),
        ((1, 1), (1, 1), None, (), False, ()),
    ],
)
def test_there_and_back(client, dims, reshape, graph, batching, engine):
    described = tensor(dims, reshape)
    assert to_engine(client, described, graph, batching=batching) == engine
    assert to_client(engine, described, batching=batching) == client


def test_runs():
    assert runs([2, 4, -1, 6]) == [8, 6]
    assert runs([-1]) == [1, 1]
    assert runs([]) == [1]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 5) | st.just(-1), min_size=1, max_size=5), st.data())
def test_a_reshape_keeps_the_elements(dims, data):
    """Any reshape that validation lets through: ones put in anywhere."""
    shape = list(dims)
    for _ in range(data.draw(st.integers(0, 2))):
        shape.insert(data.draw(st.integers(0, len(shape))), 1)
    client = tuple(data.draw(st.integers(1, 7)) if size == -1 else size for size in dims)
    described = tensor(dims, shape)
    engine = to_engine(client, described, tuple(shape), batching=False)
    assert num_elements(engine) == num_elements(client)
    assert to_client(engine, described, batching=False) == client


@pytest.mark.parametrize(
    ("batch", "tensor", "graph", "expected"),
    [
        (8, "dims: [4, 3]", (-1, -1, 3), (-1, 4, 3)),
        (0, "dims: [4]", (-1,), (4,)),
        (0, "dims: [4]", (4,), (4,)),
        (8, "dims: [-1, 2] reshape { shape: [2, -1] }", (-1, -1, -1), (-1, 2, -1)),
        (0, "dims: [1]", (), ()),
    ],
)
def test_the_configuration_fixes_what_the_graph_leaves_open(batch, tensor, graph, expected):
    text = f"max_batch_size: {batch} input {{ name: 'IN' data_type: TYPE_FP32 {tensor} }}"
    config = text_format.Parse(text, config_pb.ModelConfig())
    specs = (TensorSpec("IN", "FP32", graph), TensorSpec("OTHER", "FP32", (-1, 7)))
    assert [spec.shape for spec in narrowed(specs, config)] == [expected, (-1, 7)]
