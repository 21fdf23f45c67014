"""The template for products of two activations, against float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.batched_matmul import MAX_CANDIDATES, BatchedMatmul
from hone.compiler.workload import Operand, Step, TensorType, Workload
from tests.unit.compiler.kernel_checks import AVX2, HOST, NEON, THREADS, UNARY_EPILOGUES, random_inputs, run, tensors

TEMPLATE = BatchedMatmul()


def product(x, y, epilogue=(), extra=()):
    leading = np.broadcast_shapes(x[:-2], y[:-2])
    return Workload(
        "matmul",
        tensors(x, y, *extra),
        TensorType((*leading, x[-2], y[-1]), "float32"),
        (("weights", ()),),
        tuple(epilogue),
    )


def check(workload, candidate=None, after=lambda result, _: result, target=HOST):
    inputs = random_inputs(workload)
    got = run(TEMPLATE, workload, inputs, candidate, target)
    want = after(inputs[0].astype(np.float64) @ inputs[1].astype(np.float64), inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 120)),
    target=st.sampled_from([HOST, THREADS]),
)
def test_any_size(leading, sizes, target):
    rows, depth, columns = sizes
    check(product((*leading, rows, depth), (*leading, depth, columns)), target=target)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((3, 5, 7), (7, 9)),
        ((5, 7), (3, 7, 9)),
        ((2, 1, 5, 7), (3, 7, 9)),
        ((2, 3, 5, 7), (2, 1, 7, 9)),
        ((1, 5, 7), (1, 7, 9)),
    ],
    ids=str,
)
def test_leading_dimensions_are_broadcast(x, y):
    check(product(x, y), target=THREADS)


def test_every_candidate_computes_the_same():
    workload = product((2, 19, 33), (2, 33, 100))
    candidates = TEMPLATE.candidates(workload, HOST)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    for candidate in candidates[::2]:
        check(workload, candidate)


@pytest.mark.parametrize("name", ["gelu", "hardswish"])
def test_epilogue(name):
    steps, expected = UNARY_EPILOGUES[name]
    check(product((3, 5, 16), (3, 16, 21), steps), after=lambda result, _: expected(result))


def test_residual():
    steps = (Step("add", (Operand("value", 0), Operand("input", 2))),)
    check(
        product((3, 5, 16), (3, 16, 21), steps, ((3, 5, 21),)),
        after=lambda result, inputs: result + inputs[2],
        target=THREADS,
    )


@pytest.mark.parametrize("target", [HOST, AVX2, NEON], ids=["host", "avx2", "neon"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(128, 64, 128), (1, 64, 1), (197, 64, 197), (7, 3, 20)])
def test_candidates_fit_the_registers(target, rows, depth, columns):
    candidates = TEMPLATE.candidates(product((2, rows, depth), (2, depth, columns)), target)
    assert candidates
    assert all(c["rows"] * c["panels"] + c["panels"] + 1 <= target.num_vector_registers for c in candidates)


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vfmadd\w+ps\s.*%ymm"), (NEON, r"fmla\s+v\d+\.4s")], ids=["avx2", "neon"]
)
def test_multiplies_and_adds_in_vectors(target, instruction):
    workload = product((4, 32, 32), (4, 32, 64))
    candidate = TEMPLATE.candidates(workload, target)[0]
    assembly = TEMPLATE.build(workload, candidate, target).assembly
    assert len(re.findall(instruction, assembly)) >= candidate["rows"] * candidate["panels"]


def test_weights_are_for_another_template():
    weight = Workload("matmul", tensors((5, 7), (7, 9)), TensorType((5, 9), "float32"), (("weights", (1,)),))
    assert not TEMPLATE.matches(weight, HOST)


def test_vectors_are_left_alone():
    vector = Workload("matmul", tensors((5, 7), (7,)), TensorType((5,), "float32"), (("weights", ()),))
    assert not TEMPLATE.matches(vector, HOST)
