"""What ONNX Runtime answers with an error becomes a condition, the guard, of what is compiled."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.onnx_import import ImportedModel, Unsupported, import_model, make_importable
from hone.compiler.rewrites.bounds import bound_indices
from hone.compiler.rewrites.division import DividesByZero, guard_divisions
from hone.compiler.rewrites.guards import combine_guards
from tests.unit.compiler.graphs import assert_same, graph_of, model, run


def guarded(proto, inputs, folder):
    """The model with its guard as last output, for ONNX Runtime."""
    graph = graph_of(proto, inputs, folder)
    bound_indices(graph)
    guard_divisions(graph)
    combine_guards(graph)
    return graph.attached()


def holds(proto, inputs) -> bool:
    return bool(run(proto, inputs, optimize=False)[-1])


def errs(proto, inputs) -> bool:
    """Whether ONNX Runtime refuses these inputs of the model as it is."""
    try:
        run(proto, inputs)
    except Exception as problem:
        assert "Non-zero status" in str(problem)
        return True
    return False


@pytest.mark.parametrize("at", [[0, 5], [-6, -1], [6, 0], [-7, 0], [10**12, 0]])
def test_the_guard_fails_where_onnx_runtime_refuses_an_index(at, tmp_path):
    proto = model("g (float[6, 4] x, int64[n] at) => (float[a, b] y) { y = Gather (x, at) }")
    inputs = {"x": np.arange(24, dtype=np.float32).reshape(6, 4), "at": np.array(at)}
    compiled = guarded(proto, inputs, tmp_path)
    assert holds(compiled, inputs) is not errs(proto, inputs)
    if holds(compiled, inputs):
        assert_same(run(compiled, inputs, optimize=False)[:1], run(proto, inputs))


@pytest.mark.parametrize("operator", ["Div", "Mod", "Mod <fmod = 1>"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_divisions(operator, dtype, tmp_path):
    name = {"int32": "int32", "int64": "int64", "uint32": "uint32"}[np.dtype(dtype).name]
    proto = model(f"g ({name}[4] a, {name}[4] b) => ({name}[4] y) {{ y = {operator} (a, b) }}")
    least = np.iinfo(dtype).min
    inputs = {"a": np.array([7, 9, least, 5], dtype), "b": np.array([2, 3, 2, 1], dtype)}
    compiled = guarded(proto, inputs, tmp_path)
    assert holds(compiled, inputs)
    assert_same(run(compiled, inputs, optimize=False)[:1], run(proto, inputs))
    by_zero = inputs | {"b": np.array([1, 0, 2, 1], dtype)}
    assert errs(proto, by_zero)
    assert not holds(compiled, by_zero)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_least_integer_by_minus_one_wraps_and_is_no_fault(dtype, tmp_path):
    """ONNX Runtime itself dies of it with 64 bits: the compiled module must not be sent to it."""
    name = np.dtype(dtype).name
    least = np.iinfo(dtype).min
    inputs = {"a": np.array([least, 6], dtype), "b": np.array([-1, -1], dtype)}
    for operator, expected in (("Div", [least, -6]), ("Mod", [0, 0])):
        proto = model(f"g ({name}[2] a, {name}[2] b) => ({name}[2] y) {{ y = {operator} (a, b) }}")
        compiled = guarded(proto, inputs, tmp_path)
        assert holds(compiled, inputs)
        np.testing.assert_array_equal(run(compiled, inputs, optimize=False)[0], expected)


def imported(proto, inputs, folder) -> ImportedModel | Unsupported:
    graph_of(proto, inputs, folder)
    return import_model(folder / "model.onnx", {name: array.shape for name, array in inputs.items()})


@pytest.mark.parametrize(
    "text, weights, expected",
    [
        ("y = Div (x, c)", {"c": np.array([2, 3], np.int32)}, False),
        ("y = Div (x, c)", {"c": np.array([2, -1], np.int32)}, False),
        ("y = Div (x, x)", {}, True),
        ("y = Gather (x, c)", {"c": np.array([0, 1])}, False),
        ("y = Gather (c, x)", {"c": np.array([5, 6, 7], np.int32)}, True),
    ],
)
def test_only_what_a_run_can_get_wrong_is_guarded(text, weights, expected, tmp_path):
    result = imported(
        model(f"g (int32[2] x) => (int32[a] y) {{ {text} }}", weights), {"x": np.array([1, 2], np.int32)}, tmp_path
    )
    assert isinstance(result, ImportedModel)
    assert result.guarded is expected
    assert [spec.name for spec in result.outputs] == ["y"]


def test_floats_need_no_guard(tmp_path):
    result = imported(
        model("g (float[2] x) => (float[2] y) { y = Div (x, x) }"), {"x": np.ones(2, np.float32)}, tmp_path
    )
    assert isinstance(result, ImportedModel) and not result.guarded


def test_a_constant_zero_divisor_is_refused_by_name(tmp_path):
    proto = model("g (int32[2] x) => (int32[2] y) { y = Div (x, c) }", {"c": np.array([1, 0], np.int32)})
    with pytest.raises(DividesByZero, match="Div"):
        guard_divisions(graph_of(proto, {"x": np.ones(2, np.int32)}, tmp_path))


@pytest.mark.parametrize("lengths, fine", [([4, 3], True), ([0, 1], True), ([5, 1], False), ([-1, 1], False)])
@pytest.mark.parametrize(
    "text, dtype",
    [
        ("y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, n)", np.int64),
        ("y, h = GRU <hidden_size = 2> (x, w, r, , n)", np.int32),
    ],
)
def test_lengths_of_sequences(text, dtype, lengths, fine, tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.random((1, 6, 3), np.float32), "r": rng.random((1, 6, 2), np.float32)}
    name = np.dtype(dtype).name
    proto = model(f"g (float[4, 2, 3] x, {name}[2] n) => (float[a, b, c, d] y) {{ {text} }}", weights)
    if "Reverse" in text:
        proto = model(f"g (float[4, 2, 3] x, {name}[2] n) => (float[a, b, c] y) {{ {text} }}")
    inputs = {"x": rng.random((4, 2, 3), np.float32), "n": np.array(lengths, dtype)}
    assert errs(proto, inputs) is not fine
    graph = graph_of(proto, inputs, tmp_path)
    make_importable(graph)
    bound_indices(graph)
    combine_guards(graph)
    compiled = graph.attached()
    assert holds(compiled, inputs) is fine
    if fine:
        assert_same(run(compiled, inputs)[:1], run(proto, inputs))
