"""If, Loop and Scan become plain nodes where shapes and constants allow it, and give the same outputs."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import resolve_control_flow
from hone.compiler.rewrites.control_flow import MAX_ROUNDS
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

X = np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32)


def resolved(proto, inputs, tmp_path):
    graph = graph_of(proto, inputs, tmp_path)
    resolve_control_flow(graph)
    return graph


def check(proto, inputs, tmp_path):
    graph = resolved(proto, inputs, tmp_path)
    assert not operators(graph) & {"If", "Loop", "Scan"}
    assert_same(run(graph.attached(), inputs), run(proto, inputs))
    return graph


@pytest.mark.parametrize("rows", [1, 2])
def test_a_branch_chosen_by_a_shape(rows, tmp_path):
    proto = model(
        """g (float[n, 6] x) => (float[a, b] y) {
            shape = Shape (x)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            rows = Gather (shape, zero)
            single = Equal (rows, one)
            y = If (single) <
                then_branch = t () => (float[c, d] a) { a = Neg (x) },
                else_branch = e () => (float[e, f] b) { b = Exp (x) }
            >
        }"""
    )
    graph = check(proto, {"x": X[:rows]}, tmp_path)
    assert ("Neg" in operators(graph)) == (rows == 1)
    assert ("Exp" in operators(graph)) == (rows != 1)


@pytest.mark.parametrize("flag", [True, False])
def test_a_condition_from_an_input_computes_both_and_selects(flag, tmp_path):
    proto = model(
        """g (float[n, 6] x, bool flag) => (float[a, b] y, float[c, d] z) {
            y, z = If (flag) <
                then_branch = t () => (float[e, f] a, float[g, h] b) { a = Neg (x) b = Identity (x) },
                else_branch = u () => (float[i, j] c, float[k, l] d) { c = Exp (x) d = Sin (c) }
            >
        }"""
    )
    check(proto, {"x": X, "flag": np.array(flag)}, tmp_path)


@pytest.mark.parametrize("flag", [True, False])
def test_branches_within_branches(flag, tmp_path):
    proto = model(
        """g (float[n, 6] x, bool flag) => (float[a, b] y) {
            shape = Shape (x)
            zero = Constant <value_int = 0> ()
            two = Constant <value_int = 2> ()
            rows = Gather (shape, zero)
            pair = Equal (rows, two)
            y = If (flag) <
                then_branch = t () => (float[c, d] a) {
                    a = If (pair) <
                        then_branch = t2 () => (float[e, f] b) { b = Neg (x) },
                        else_branch = e2 () => (float[g, h] c) { c = Squeeze (x, zero) }
                    >
                },
                else_branch = u () => (float[i, j] d) { d = Exp (x) }
            >
        }"""
    )
    check(proto, {"x": X, "flag": np.array(flag)}, tmp_path)


def test_branches_of_different_shapes_are_left_alone(tmp_path):
    proto = model(
        """g (float[n, 6] x, bool flag) => (y) {
            axis = Constant <value_ints = [0]> ()
            y = If (flag) <
                then_branch = t () => (float[c, d] a) { a = Neg (x) },
                else_branch = u () => (float[e] b) { b = ReduceSum <keepdims = 0> (x, axis) }
            >
        }"""
    )
    assert "If" in operators(resolved(proto, {"x": X, "flag": np.array(True)}, tmp_path))


def test_a_branch_that_cannot_run_at_these_shapes_gives_nan(tmp_path):
    proto = model(
        """g (float[n, m] x, bool flag) => (float[a, b] y) {
            y = If (flag) <
                then_branch = t () => (float[c, d] a) { a = MatMul (x, w) },
                else_branch = u () => (float[e, f] b) { b = MatMul (x, v) }
            >
        }""",
        {"w": np.ones((6, 3), np.float32), "v": np.ones((5, 3), np.float32)},
    )
    graph = resolved(proto, {"x": X, "flag": np.array(True)}, tmp_path)
    assert "If" not in operators(graph)
    yes, no = ({"x": X, "flag": np.array(flag)} for flag in (True, False))
    assert_same(run(graph.attached(), yes), run(proto, yes))
    assert np.isnan(run(graph.attached(), no)[0]).all()
    with pytest.raises(Exception, match="MatMul"):
        run(proto, no)


def loop(rounds, *, condition="true", body_condition="next = Identity (going)"):
    return model(
        f"""g (float[n, 6] x) => (float[a, b] y, float[c, d, e] all) {{
            rounds = Constant <value = int64 {{{rounds}}}> ()
            first = Constant <value = bool {{{int(condition == "true")}}}> ()
            limit = Constant <value = int64 {{3}}> ()
            y, all = Loop (rounds, first, x) <
                body = b (int64 i, bool going, float[f, h] s) => (bool next, float[j, k] t, float[l, m] o) {{
                    number = Cast <to = 1> (i)
                    t = Add (s, number)
                    o = Mul (t, w)
                    {body_condition}
                }}
            >
        }}""",
        {"w": np.random.default_rng(2).normal(size=(1, 6)).astype(np.float32)},
    )


def test_a_loop_with_a_known_number_of_rounds(tmp_path):
    check(loop(4), {"x": X}, tmp_path)


def test_a_loop_that_ends_itself(tmp_path):
    graph = check(loop(10, body_condition="next = Less (i, limit)"), {"x": X}, tmp_path)
    assert sum(node.op_type == "Mul" for node in graph.nodes) == 4


def test_nodes_with_names_are_unrolled_too(tmp_path):
    proto = loop(3)
    body = proto.graph.node[-1].attribute[0].g
    for number, node in enumerate(body.node):
        node.name = f"step {number}"
    check(proto, {"x": X}, tmp_path)


def test_a_loop_longer_than_the_limit_is_left_alone(tmp_path):
    assert "Loop" in operators(resolved(loop(MAX_ROUNDS + 1), {"x": X}, tmp_path))


def test_a_loop_that_ends_by_values_is_left_alone(tmp_path):
    proto = loop(
        4,
        body_condition="""axes = Constant <value_ints = [0, 1]> ()
                    total = ReduceSum <keepdims = 0> (t, axes)
                    zero = Constant <value_float = 0.0> ()
                    next = Less (total, zero)""",
    )
    assert "Loop" in operators(resolved(proto, {"x": X}, tmp_path))


def test_an_endless_loop_is_left_alone(tmp_path):
    proto = model(
        """g (float[2, 6] x) => (float[a, b] y) {
            first = Constant <value = bool {1}> ()
            y = Loop (, first, x) <
                body = b (int64 i, bool going, float[f, h] s) => (bool next, float[j, k] t) {
                    t = Add (s, s)
                    next = Identity (going)
                }
            >
        }"""
    )
    assert "Loop" in operators(resolved(proto, {"x": X}, tmp_path))


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan(backwards, axis, tmp_path):
    size = X.shape[1 - axis]
    proto = model(
        f"""g (float[2, 6] x, float[{size}] start) => (float[a] last, float[b, c] all) {{
            last, all = Scan <
                num_scan_inputs = 1, scan_input_axes = [{axis}], scan_input_directions = [{backwards}],
                scan_output_axes = [{axis}], scan_output_directions = [{backwards}],
                body = b (float[{size}] s, float[{size}] item) => (float[{size}] t, float[{size}] o) {{
                    t = Add (s, item)
                    o = Mul (t, item)
                }}
            > (start, x)
        }}"""
    )
    check(proto, {"x": X, "start": np.ones(size, np.float32)}, tmp_path)


def test_a_recurrent_layer_inside_a_branch_is_reached(tmp_path):
    rng = np.random.default_rng(4)
    weights = {"w": rng.normal(size=(1, 12, 6)), "r": rng.normal(size=(1, 12, 3))}
    proto = model(
        """g (float[n, 2, 6] x, bool flag) => (float[a, b, c, d] y) {
            y = If (flag) <
                then_branch = t () => (float[e, f, g, h] a) { a = LSTM <hidden_size = 3> (x, w, r) },
                else_branch = u () => (float[i, j, k, l] c) { b = LSTM <hidden_size = 3> (x, w, r) c = Neg (b) }
            >
        }""",
        {name: value.astype(np.float32) for name, value in weights.items()},
    )
    inputs = {"x": rng.normal(size=(4, 2, 6)).astype(np.float32), "flag": np.array(False)}
    graph = check(proto, inputs, tmp_path)
    assert "LSTM" not in operators(graph)
