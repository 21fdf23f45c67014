"""Searched schedules: found within a budget, kept as text, used under our own digest, refused where they do not fit."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import tvm
from tvm import te, topi

from hone.compiler.build import build_functions
from hone.compiler.choices import Choices
from hone.compiler.metaschedule import Proposals, RemainingFunction, remaining_functions, search_schedule
from hone.compiler.onnx_import import import_model
from hone.compiler.phases.schedule import SEARCHED, apply_trace, function_digest, trace_text
from hone.compiler.pipeline import compile_model
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
