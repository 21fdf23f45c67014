"""The softmax template against float64: lengths below and beside a vector, infinities, NaN, an epilogue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.softmax import RowSoftmax
from hone.compiler.workload import Operand, Step, TensorType, Workload
from tests.unit.compiler.kernel_checks import AVX2, HOST, NEON, THREADS, random_inputs, run, tensors

TEMPLATE = RowSoftmax()


def softmax(shape, epilogue=(), extra=()):
    return Workload("softmax", tensors(shape, *extra), TensorType(shape, "float32"), (), tuple(epilogue))


def expected(x):
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    leading=st.lists(st.integers(1, 4), max_size=3),
    columns=st.integers(1, 150),
    target=st.sampled_from([HOST, THREADS]),
)
def test_any_size(leading, columns, target):
    workload = softmax((*leading, columns))
    inputs = random_inputs(workload)
    np.testing.assert_allclose(run(TEMPLATE, workload, inputs, None, target), expected(inputs[0]), rtol=3e-6)


def test_every_candidate_computes_the_same():
    workload = softmax((3, 301))
    inputs = random_inputs(workload)
    for candidate in TEMPLATE.candidates(workload, HOST):
        np.testing.assert_allclose(run(TEMPLATE, workload, inputs, candidate), expected(inputs[0]), rtol=3e-6)


@pytest.mark.parametrize("at", [0, 20, 37])
def test_special_values(at):
    workload = softmax((4, 38))
    (x,) = random_inputs(workload)
    x[0, at] = np.nan
    x[1, at] = np.inf
    x[2, at] = -np.inf
    x[3] *= 1e4
    got = run(TEMPLATE, workload, [x])
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, at])  # as inf - inf
    assert got[2, at] == 0
    np.testing.assert_allclose(got[2:], expected(x[2:]), rtol=1e-4, atol=1e-30)


def test_epilogue():
    workload = softmax((2, 3, 21), (Step("multiply", (Operand("value", 0), Operand("input", 1))),), ((3, 1),))
    inputs = random_inputs(workload)
    np.testing.assert_allclose(run(TEMPLATE, workload, inputs), expected(inputs[0]) * inputs[1], rtol=5e-6)


@pytest.mark.parametrize(
    ("target", "register"), [(AVX2, "%ymm"), (NEON, ".4s"), (HOST, "")], ids=["avx2", "neon", "host"]
)
def test_is_made_of_vectors(target, register):
    workload = softmax((8, 128))
    candidates = TEMPLATE.candidates(workload, target)
    assert candidates
    assembly = TEMPLATE.build(workload, candidates[0], target).assembly
    assert register in assembly
    assert "expf" not in assembly
