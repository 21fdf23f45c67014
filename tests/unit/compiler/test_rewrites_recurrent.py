"""LSTM, GRU and RNN unrolled give what ONNX Runtime's own operators give."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from hone.compiler.rewrites.recurrent import MAX_STEPS
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, SIZE, HIDDEN = 5, 3, 4, 6


def recurrent(kind, *, directions=1, steps=STEPS, attributes="", extra_inputs="", extra=None, constant=True):
    """A model with one such node, and inputs for it."""
    rng = np.random.default_rng(7)

    def weight(*shape):
        return rng.normal(0, 0.4, shape).astype(np.float32)

    gates = GATES[kind] * HIDDEN
    weights = {
        "w": weight(directions, gates, SIZE),
        "r": weight(directions, gates, HIDDEN),
        "b": weight(directions, 2 * gates),
        **(extra or {}),
    }
    inputs = {"x": weight(steps, BATCH, SIZE)}
    declared = f"float[{steps}, {BATCH}, {SIZE}] x"
    if not constant:
        declared += ", float[a, b, c] w, float[d, e, f] r, float[g, h] b"
        inputs |= {name: weights.pop(name) for name in ("w", "r", "b")}
    cell = ", y_c" if kind == "LSTM" else ""
    outputs = "float[s, d, n, h] y, float[d2, n2, h2] y_h" + (", float[d3, n3, h3] y_c" if cell else "")
    proto = model(
        f"g ({declared}) => ({outputs}) {{"
        f" y, y_h{cell} = {kind} <hidden_size = {HIDDEN} {attributes}> (x, w, r, b{extra_inputs}) }}",
        weights,
    )
    return proto, inputs


def check(proto, inputs, tmp_path):
    graph = graph_of(proto, inputs, tmp_path)
    wanted = run(proto, inputs)
    assert rewrite(graph)
    assert not operators(graph) & {"LSTM", "GRU", "RNN"}
    assert_same(run(graph.attached(), inputs), wanted)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("constant", [True, False], ids=["weights", "weights as inputs"])
def test_directions(kind, direction, constant, tmp_path):
    proto, inputs = recurrent(
        kind,
        directions=2 if direction == "bidirectional" else 1,
        attributes=f', direction = "{direction}"',
        constant=constant,
    )
    check(proto, inputs, tmp_path)


@pytest.mark.parametrize("kind", GATES)
def test_sequences_of_different_lengths(kind, tmp_path):
    lengths = {"lengths": np.array([5, 2, 3], np.int32)}
    check(
        *recurrent(
            kind, directions=2, attributes=', direction = "bidirectional"', extra_inputs=", lengths", extra=lengths
        ),
        tmp_path,
    )


@pytest.mark.parametrize("kind", GATES)
def test_initial_state(kind, tmp_path):
    rng = np.random.default_rng(3)
    states = {"h0": rng.normal(size=(1, BATCH, HIDDEN)).astype(np.float32)}
    names = ", , h0"
    if kind == "LSTM":
        states["c0"] = rng.normal(size=(1, BATCH, HIDDEN)).astype(np.float32)
        names += ", c0"
    check(*recurrent(kind, extra_inputs=names, extra=states), tmp_path)


def test_peepholes(tmp_path):
    peepholes = {"p": np.random.default_rng(5).normal(size=(1, 3 * HIDDEN)).astype(np.float32)}
    check(*recurrent("LSTM", extra_inputs=", , , , p", extra=peepholes), tmp_path)


@pytest.mark.parametrize("constant", [True, False], ids=["weights", "weights as inputs"])
def test_gru_that_resets_after_the_product(constant, tmp_path):
    check(*recurrent("GRU", attributes=", linear_before_reset = 1", constant=constant), tmp_path)


@pytest.mark.parametrize("kind", GATES)
def test_clipping(kind, tmp_path):
    check(*recurrent(kind, attributes=", clip = 0.2"), tmp_path)


def test_other_activations(tmp_path):
    check(*recurrent("LSTM", attributes=', activations = ["Sigmoid", "Relu", "Softsign"]'), tmp_path)


def test_one_step_gives_a_product_and_no_loop(tmp_path):
    check(*recurrent("LSTM", steps=1), tmp_path)


def test_a_long_sequence_is_left_alone(tmp_path):
    proto, inputs = recurrent("LSTM", steps=MAX_STEPS + 1)
    graph = graph_of(proto, inputs, tmp_path)
    assert not rewrite(graph)
    assert operators(graph) == {"LSTM"}


def test_an_activation_with_parameters_is_left_alone(tmp_path):
    proto, inputs = recurrent(
        "LSTM", attributes=', activations = ["HardSigmoid", "Tanh", "Tanh"], activation_alpha = [0.3]'
    )
    assert not rewrite(graph_of(proto, inputs, tmp_path))
