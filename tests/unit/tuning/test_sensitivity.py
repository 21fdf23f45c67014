"""Which layers are kept in float32: the search, on errors that add up as one says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.specialization import Signature
from hone.tuning.inputs import InputSet
from hone.tuning.sensitivity import OutputError, find_kept, find_smallest, measure_effects
from hone.tuning.trial import Evidence
from hone.types import TensorSpec


class Model:
    """Layers with errors of their own that add up by squares."""

    def __init__(self, effects, allowed=math.inf) -> None:
        self.effects = effects
        self.allowed = allowed
        self.asked: list[frozenset[int]] = []

    def __call__(self, kept: frozenset[int]) -> float | None:
        if len(self.asked) >= self.allowed:
            return None
        self.asked.append(kept)
        return self.truth(kept)

    def truth(self, kept) -> float:
        return math.hypot(*(effect for layer, effect in enumerate(self.effects) if layer not in kept))


def test_one_bad_layer_is_found_alone():
    model = Model([0.05] * 40 + [3.0] + [0.05] * 12)
    kept = find_kept(53, model)
    assert kept is not None
    assert kept.layers == {40}
    assert kept.error == model.truth({40})
    assert len(model.asked) < 20


def test_two_bad_layers_far_apart():
    effects = [0.01] * 64
    effects[3], effects[50] = 2.0, 5.0
    kept = find_kept(64, Model(effects))
    assert kept is not None
    assert kept.layers == {3, 50}


def test_nothing_is_kept_where_only_everything_would_do():
    assert find_kept(16, Model([2.0] * 16)) is None


def test_one_layer_alone_cannot_be_helped():
    assert find_kept(1, Model([2.0])) is None


@pytest.mark.parametrize("allowed", [0, 3, 8])
def test_without_time_for_a_first_answer_there_is_none(allowed):
    assert find_kept(64, Model([0.01] * 63 + [2.0], allowed)) is None


def test_without_time_to_give_back_the_stretch_stays():
    model = Model([0.01] * 63 + [2.0], 9)
    kept = find_kept(64, model)
    assert kept is not None
    assert kept.layers == set(range(56, 64))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 2.0), min_size=2, max_size=70))
def test_what_is_found_passes(effects):
    model = Model(effects)
    kept = find_kept(len(effects), model)
    if kept is not None:
        assert model.truth(kept.layers) == kept.error <= 1.0
        assert kept.layers < set(range(len(effects)))


class Engine:
    def __init__(self, outputs) -> None:
        self.outputs = outputs

    def run(self, inputs, names):
        return self.outputs


def test_errors_are_shares_of_what_is_allowed():
    specs = (TensorSpec("a", "FP32", (2,)), TensorSpec("n", "INT64", (2,)))
    expected = [np.array([1.0, 1.0], np.float32), np.array([3, 4])]
    evidence = Evidence((InputSet("made up", {}),), (expected,), None)
    error = OutputError(evidence, specs, Signature.of([]), "bf16", None)
    assert error(Engine(expected)) == 0.0
    assert error(Engine([np.array([1.02, 0.98], np.float32), expected[1]])) == pytest.approx(0.5, rel=1e-4)
    assert error(Engine([np.array([1.4, 0.6], np.float32), expected[1]])) == pytest.approx(10.0, rel=1e-4)
    assert error(Engine([np.array([1.0, np.nan], np.float32), expected[1]])) > 1e9
    assert error(Engine([expected[0], np.array([3, 5])])) == math.inf
    strict = OutputError(evidence, specs, Signature.of([]), "bf16", 0.01)
    assert strict(Engine([np.array([1.02, 0.98], np.float32), expected[1]])) == pytest.approx(2.0, rel=1e-4)


# --- layer by layer


def smallest(effects, costs=None, *, goal=1.0, allowed=math.inf):
    model = Model(effects, allowed)
    sensitivity = measure_effects(len(effects), model)
    assert sensitivity is not None
    return find_smallest(sensitivity, costs or [1.0] * len(effects), model, goal), model


def test_effects_are_those_of_layers_alone():
    sensitivity = measure_effects(3, Model([3.0, 0.0, 4.0]))
    assert sensitivity is not None
    assert (sensitivity.effects, sensitivity.whole) == ((3.0, 0.0, 4.0), 5.0)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_without_time_for_every_layer_nothing_is_told(allowed):
    assert measure_effects(3, Model([3.0, 0.0, 4.0], allowed)) is None


def test_the_fewest_are_kept():
    found, model = smallest([0.1, 0.6, 0.1, 0.9, 0.1, 0.6])
    assert found is not None
    assert found.layers == {3}
    assert found.error == model.truth({3})


def test_of_equal_harm_the_cheaper_is_kept():
    found, _ = smallest([0.8, 0.8], [1000.0, 10.0])
    assert found is not None
    assert found.layers == {1}


def test_what_need_not_be_kept_is_given_back():
    """Keeping the first, most harm for its cost, does not suffice; and with the second it is not needed."""
    found, _ = smallest([0.3, 0.9, 0.5], [1.0, 10.0, 9.0])
    assert found is not None
    assert found.layers == {1}


def test_what_is_too_far_off_alone_is_kept_whatever_it_costs():
    found, _ = smallest([0.5, 3.0], [1.0, 1e9])
    assert found is not None
    assert found.layers == {1}


def test_a_goal_below_what_is_allowed():
    effects = [0.5, 0.6, 0.5, 0.1]
    assert smallest(effects, goal=1.0)[0].layers == {1}
    assert smallest(effects, goal=0.5)[0].layers >= {1}
    assert smallest(effects, goal=0.5)[0].error <= 0.5


def test_only_everything_would_do():
    assert smallest([2.0, 2.0, 2.0])[0] is None
    assert smallest([2.0])[0] is None


def test_time_that_is_up_leaves_what_was_found():
    effects = [0.01] * 40 + [0.9, 0.9, 0.9]
    found, model = smallest(effects, allowed=len(effects) + 2)
    assert found is not None
    assert model.truth(found.layers) <= 1.0
    assert smallest(effects, allowed=len(effects) + 1)[0] is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(1.0, 1e9)), min_size=2, max_size=60), st.floats(0.3, 1.0))
def test_what_is_found_layer_by_layer_passes_and_none_of_it_is_too_many(layers, goal):
    effects, costs = [list(column) for column in zip(*layers, strict=True)]
    found, model = smallest(effects, costs, goal=goal)
    if found is None:
        assert all(effect > goal for effect in effects)  # no layer could be lowered, alone even
        return
    assert model.truth(found.layers) == found.error <= goal
    assert len(found.layers) < len(effects)
    assert len(model.asked) <= 1 + len(effects) + 8 + len(found.layers) + len(effects)
