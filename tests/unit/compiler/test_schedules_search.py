"""Searched schedules: found within a budget, kept as text, used under our own digest, refused where they do not fit."""

from __future__ import annotations

import json
import math
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import xgboost
from tvm import te, topi

from hone.compiler import metaschedule
from hone.compiler.build import BuildFailed, build_functions
from hone.compiler.choices import Choices
from hone.compiler.metaschedule import Progress, RemainingFunction, remaining_functions, search_on, search_schedule
from hone.compiler.onnx_import import import_model
from hone.compiler.phases.schedule import SEARCHED, apply_trace, function_digest, trace_text
from hone.compiler.pipeline import compile_model
from hone.compiler.proposals import Proposals
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from tests.unit.engines.tvm_artifacts import save_model

HOST = CpuTarget.detect(num_threads=1)


def product(rows=32, depth=24, columns=40, names=("x", "y")):
    x, y = (
        te.placeholder(shape, "float32", name=name)
        for shape, name in zip([(rows, depth), (depth, columns)], names, strict=True)
    )
    return te.create_prim_func([x, y, topi.nn.matmul(x, y)])


def remaining(func):
    return RemainingFunction(function_digest(func), "product", func, 1, 1.0)


def run(func, inputs, shape):
    out = tvm.runtime.tensor(np.full(shape, np.nan, np.float32))
    build_functions({"run": func}, HOST).function("run")(*(tvm.runtime.tensor(a) for a in inputs), out)
    return out.numpy()


@pytest.fixture(scope="module")
def searched():
    """A function that the plain schedule does badly, so that a short search must find better."""
    x = te.placeholder((96, 7, 96), "float32", name="x")
    func = te.create_prim_func([x, topi.sum(topi.transpose(x, (2, 1, 0)), axis=2)])
    heard = []
    result = search_schedule(remaining(func), HOST, 6.0, tell=lambda *told: heard.append(told))
    return func, result, heard


def test_a_search_reports_what_it_did(searched):
    _, result, heard = searched
    assert result.num_trials > 0
    assert result.trace is not None or result.reason
    assert [told[0] for told in heard] == sorted(told[0] for told in heard)
    assert heard[-1][0] == result.num_trials


def test_records_are_text_that_schedules_the_function_again():
    func = product()
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((32, 24)).astype(np.float32), rng.standard_normal((24, 40)).astype(np.float32)]
    for candidate in Proposals(func, HOST, seed=0).propose()[:3]:
        text = trace_text(candidate.sch)
        assert json.loads(text)
        scheduled = apply_trace(func, text)
        assert scheduled is not None
        np.testing.assert_allclose(run(scheduled, inputs, (32, 40)), inputs[0] @ inputs[1], rtol=1e-4, atol=1e-4)


def test_a_search_ends_in_time():
    started = time.monotonic()
    search_schedule(remaining(product(64, 64, 64)), HOST, 1.0)
    assert time.monotonic() - started < 30


def test_a_search_without_time_is_not_at_its_end():
    result = search_schedule(remaining(product(64, 64, 64)), HOST, 0.0)
    assert (result.num_trials, result.is_complete, result.progress) == (0, False, Progress())


class Bench:
    """Times are as a test says, by how many were timed before; the first is the plain schedule's."""

    def __init__(self, times, right=True):
        self.ahead, self.right = iter(times), right
        self.timed = []

    def times(self, funcs, until):
        self.timed += funcs
        return [next(self.ahead) for _ in funcs]

    def agrees(self, func, reference):
        if self.right is None:
            raise BuildFailed("a function", MemoryError())
        return self.right


def searched_with(bench, *, known=None, deadline=math.inf):
    """The result, and the proposals that it came from."""
    func, made = product(64, 64, 64), []
    known = known or Progress()

    def propose():
        made.append(Proposals(func, HOST, known.num_trials))
        return made[0]

    result = search_on(bench, func, plain_schedule(func, HOST).func, propose, deadline, known=known)
    return result, made[0] if made else None


def learnt_by(strategy):
    """Microseconds that the cost model was told, in order; 1e10 seconds for what does not build."""
    (group,) = strategy._model._inst.data.values()
    return group.costs * 1e6


def test_a_search_ends_when_so_many_were_no_better(monkeypatch):
    monkeypatch.setattr(metaschedule, "_PATIENCE", 20)
    result, _ = searched_with(Bench([100.0, *[120.0] * 1000]))
    assert (result.trace, result.is_complete, result.num_trials) == (None, True, 32)
    assert result.progress.num_no_better == 32


def test_a_search_ends_when_so_many_were_tried(monkeypatch):
    monkeypatch.setattr(metaschedule, "_NUM_TRIALS", 30)
    # Every one is better than the one before.
    result, _ = searched_with(Bench([1e6, *(1e5 * 0.9**at for at in range(32)), *[1e6, 1e3] * 3]))
    assert (result.is_complete, result.num_trials, result.progress.num_trials) == (True, 32, 32)
    assert result.trace is not None


def test_a_search_goes_on_where_another_one_stopped(monkeypatch):
    """With its count of trials, its best schedules, and a model that has learnt of them."""
    clock = [0.0]
    monkeypatch.setattr(metaschedule, "_NUM_TRIALS", 48)
    monkeypatch.setattr(metaschedule, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(Bench):
        def times(self, funcs, until):
            clock[0] += 10.0
            return super().times(funcs, until)

    first, _ = searched_with(Slow([1000.0, *range(101, 133), *[1000.0, 101.0] * 3]), deadline=25.0)
    assert (first.is_complete, first.num_trials) == (False, 32)
    records = first.progress.records
    assert [us for _, us in records] == list(range(101, 117)) and first.trace == records[0][0]
    bench = Bench([1000.0, 105.0, *[900.0] * 16, *[1000.0, 105.0] * 3])
    second, strategy = searched_with(bench, known=first.progress, deadline=math.inf)
    assert (second.is_complete, second.num_trials, second.progress.num_trials) == (True, 16, 48)
    # The best one is timed again beside today's plain schedule; it is not the best any more, and the next one wins.
    assert second.trace == records[1][0]
    assert dict(second.progress.records)[records[0][0]] == 105.0
    assert len(strategy._database) == 32
    np.testing.assert_allclose(learnt_by(strategy), [*range(101, 117), *[900.0] * 16], rtol=1e-5)


def test_what_the_machine_could_not_build_is_not_held_against_a_function(monkeypatch):
    monkeypatch.setattr(metaschedule, "_PATIENCE", 16)
    nothing, _ = searched_with(Bench([math.nan]))
    assert not nothing.is_complete and "the machine" in nothing.reason
    refused, _ = searched_with(Bench([math.inf]))
    assert refused.is_complete
    # Of the first round half could not be built: nothing is learnt of them, and they do not count as tried.
    result, strategy = searched_with(Bench([100.0, *[120.0, math.nan] * 8, *[math.inf] * 16]))
    assert (result.num_trials, result.num_failed, result.is_complete) == (24, 16, True)
    assert len(learnt_by(strategy)) == 24
    unchecked, _ = searched_with(Bench([100.0, *[50.0] * 32], right=None))
    assert (unchecked.trace, unchecked.is_complete) == (None, False)
    assert unchecked.progress.records
    wrong, _ = searched_with(Bench([100.0, 50.0, *[60.0] * 31], right=False))
    assert wrong.trace is None and wrong.progress.records[0][1] == 60.0


#: What MetaSchedule draws from.
_STEPS = [0, 16, 64, 512]


def unroll_steps(schedule):
    """How far the compiler is allowed to unroll."""
    found = re.search(r'"pragma_auto_unroll_max_step": (?:T.int64\()?(\d+)', str(schedule.mod))
    return int(found[1]) if found else 0


def test_proposals_are_ranked_by_what_xgboost_learns_from_measurements(monkeypatch):
    """The cost is made up and hangs on one thing. Trees find out on what, from a few rounds; chance does not."""
    # Before it has learnt, the model's answers are chance.
    monkeypatch.setattr(np.random, "uniform", np.random.default_rng(0).uniform)
    func = product(64, 64, 64)
    strategy, asked = Proposals(func, HOST, seed=0), []
    model = strategy._model._inst
    predict = model.predict

    def hear(context, candidates):
        scores = predict(context, candidates)
        asked.append(scores)
        return scores

    model.predict = hear
    for _ in range(3):
        candidates = strategy.propose()
        strategy.learn(candidates, [100.0 / (1 + _STEPS.index(unroll_steps(one.sch))) for one in candidates])
    assert isinstance(model.booster, xgboost.Booster)
    asked.clear()
    proposed = strategy.propose()
    assert sum(map(len, asked)) > 128, "the evolution asks the model of its whole population, in each generation"
    # Of what another search draws by chance.
    unseen = [one for seed in (7, 8) for one in Proposals(func, HOST, seed).propose()]
    steps = [unroll_steps(one.sch) for one in unseen]
    scores = predict(strategy._context, unseen)
    pairs = [(i, j) for i in range(len(unseen)) for j in range(len(unseen)) if steps[i] > steps[j]]
    assert len(pairs) > 100
    assert np.mean([scores[i] > scores[j] for i, j in pairs]) > 0.8, "chance has half of them right"
    # What is proposed has more of it than what is drawn.
    assert np.mean([unroll_steps(one.sch) for one in proposed]) > np.mean(steps)


def test_digests_are_of_the_work_and_not_of_names():
    assert function_digest(product()) == function_digest(product(names=("a", "weights")))
    assert len({function_digest(product()), function_digest(product(rows=33)), function_digest(product(depth=25))}) == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A reduction: no template takes it."""
    path = save_model(
        tmp_path_factory.mktemp("search") / "model.onnx",
        [("ReduceMax", ["a"], ["y"], {"axes": [1], "keepdims": 0})],
        {"a": ("float32", [32, 24, 40])},
        {"y": ("float32", [32, 40])},
    )
    return import_model(path, {})


def trace_for(func):
    """A legal record: the first loop of the reduction is cut in two."""
    schedule = tvm.s_tir.Schedule(func)
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    schedule.split(schedule.get_loops(block)[0], [None, 4])
    return trace_text(schedule)


def test_a_model_uses_the_records_of_its_functions(model):
    (function,) = remaining_functions(model, HOST)
    choices = Choices(schedules={function.digest: trace_for(function.func)})
    (used,) = [f for f in compile_model(model, HOST, choices).functions if f.num_calls]
    assert (used.digest, used.rule) == (function.digest, SEARCHED)
    (plain,) = [f for f in compile_model(model, HOST).functions if f.num_calls]
    assert plain.rule == "reduction"


@pytest.mark.parametrize("record", ["[]", "{}", '[[["GetSBlock", [], ["gone", "main"], ["b0"]]], []]', "7"])
def test_a_record_that_does_not_fit_is_not_used(model, record):
    (function,) = remaining_functions(model, HOST)
    compiled = compile_model(model, HOST, Choices(schedules={function.digest: record}))
    (used,) = [f for f in compiled.functions if f.num_calls]
    assert used.rule != SEARCHED


def test_what_remains_is_told_by_weight(tmp_path):
    path = save_model(
        tmp_path / "model.onnx",
        [
            ("ReduceMax", ["a"], ["p"], {"axes": [0], "keepdims": 0}),
            ("ReduceMax", ["p"], ["q"], {"axes": [1], "keepdims": 1}),
            ("Reshape", ["q", "s"], ["y"], {}),
        ],
        {"a": ("float32", [64, 8, 256])},
        {"y": ("float32", [1, 8])},
        {"s": np.array([1, 8], np.int64)},
    )
    found = remaining_functions(import_model(path, {}), HOST)
    assert len(found) == 2 and found[0].microseconds > found[1].microseconds
    assert [f.num_calls for f in found] == [1, 1]
