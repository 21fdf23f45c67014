"""The matrix product template against float64, with weights in panels."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.matmul import MAX_CANDIDATES, PackedMatmul
from hone.compiler.workload import Operand, Step, TensorType, Workload
from tests.unit.compiler.kernel_checks import AVX2, HOST, NEON, THREADS, UNARY_EPILOGUES, random_inputs, run, tensors

TEMPLATE = PackedMatmul()


def product(rows: tuple[int, ...], depth: int, columns: int, epilogue=(), extra=()) -> Workload:
    return Workload(
        "matmul",
        tensors((*rows, depth), (depth, columns), *extra),
        TensorType((*rows, columns), "float32"),
        (("weights", (1,)),),
        tuple(epilogue),
    )


def check(workload, candidate=None, after=lambda result, _: result, target=HOST):
    inputs = random_inputs(workload)
    got = run(TEMPLATE, workload, inputs, candidate, target)
    want = after(inputs[0].astype(np.float64) @ inputs[1].astype(np.float64), inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.sampled_from([(1,), (3,), (8,), (13,), (37,), (2, 5), (2, 3, 4)]),
    depth=st.integers(1, 100),
    columns=st.integers(1, 210),
    target=st.sampled_from([HOST, THREADS]),
)
def test_any_size(rows, depth, columns, target):
    check(product(rows, depth, columns), target=target)


def test_every_candidate_computes_the_same():
    workload = product((2, 21), 90, 100)
    for candidate in TEMPLATE.candidates(workload, HOST)[::3]:
        check(workload, candidate)


@pytest.mark.parametrize("depth", [8, 20, 36, 64])
def test_sums_in_blocks(depth):
    """Blocks that divide the depth, that leave a rest, and one block alone; tiles and groups that leave rests."""
    check(product((13,), 37, 50), Candidate.of(TEMPLATE.name, rows=4, panels=2, depth=depth), target=THREADS)


def test_many_rows_in_tasks():
    """So many rows that a task has only some of them."""
    workload = product((200,), 8, 8)
    small = replace(THREADS, l2_bytes=4096)
    check(workload, target=small)


@pytest.mark.parametrize("name", UNARY_EPILOGUES)
def test_epilogue(name):
    steps, expected = UNARY_EPILOGUES[name]
    check(product((5,), 16, 40, steps), after=lambda result, _: expected(result))


@pytest.mark.parametrize(
    "shape", [(7,), (1, 7), (2, 3, 7), (3, 7), (2, 3, 1), (2, 1, 7), (3, 1), (1,), ()], ids=lambda shape: f"{shape}"
)
def test_operands_are_broadcast(shape):
    steps = (Step("add", (Operand("value", 0), Operand("input", 2))), Step("relu", (Operand("value", 1),)))
    workload = product((2, 3), 16, 7, steps, (shape,))
    check(workload, after=lambda result, inputs: np.maximum(result + inputs[2], 0))


def test_residual_behind_activation():
    steps = (
        Step("add", (Operand("value", 0), Operand("input", 2))),
        Step("gelu", (Operand("value", 1),)),
        Step("add", (Operand("input", 3), Operand("value", 2))),
    )
    expected = UNARY_EPILOGUES["gelu"][1]
    check(
        product((2, 9), 16, 35, steps, ((35,), (2, 9, 35))),
        after=lambda result, inputs: inputs[3] + expected(result + inputs[2]),
        target=THREADS,
    )


@pytest.mark.parametrize("target", [HOST, AVX2, NEON], ids=["host", "avx2", "neon"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [((1,), 64, 1000), ((128,), 3072, 768), ((1, 197), 384, 384), ((7,), 64, 10), ((1,), 1, 1), ((40,), 120, 6625)],
)
def test_candidates_fit_the_registers(target, rows, depth, columns):
    candidates = TEMPLATE.candidates(product(rows, depth, columns), target)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    assert all(c["rows"] * c["panels"] + c["panels"] + 1 <= target.num_vector_registers for c in candidates)
    assert all(1 <= c["depth"] <= depth for c in candidates)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [(AVX2, r"vfmadd\w+ps\s.*%ymm"), (NEON, r"fmla\s+v\d+\.4s"), (HOST, r"vfmadd\w+ps\s.*%[xyz]mm|fmla\s+v\d+\.4s")],
    ids=["avx2", "neon", "host"],
)
def test_multiplies_and_adds_in_vectors(target, instruction):
    workload = product((128,), 768, 768)
    candidate = TEMPLATE.candidates(workload, target)[0]
    assembly = TEMPLATE.build(workload, candidate, target).assembly
    assert len(re.findall(instruction, assembly)) >= candidate["rows"] * candidate["panels"]


def test_sums_stay_in_registers():
    """The inner loop stores nothing."""
    workload = product((128,), 768, 768)
    assembly = TEMPLATE.build(workload, TEMPLATE.candidates(workload, AVX2)[0], AVX2).assembly
    loops = [part for part in re.split(r"^\.LBB\w+:", assembly, flags=re.M) if part.count("vfmadd") >= 8]
    assert loops
    assert all(not re.search(r"vmov[au]ps\s+%ymm\d+, .*\(", part.split("jne")[0]) for part in loops)


def test_what_does_not_match_is_refused():
    workload = product((4,), 32, 16)
    rows = TensorType((4, 31), "float32")
    assert TEMPLATE.matches(workload, HOST)
    assert not TEMPLATE.matches(replace(workload, inputs=(rows, workload.inputs[1])), HOST)
    assert not TEMPLATE.matches(replace(workload, attributes=()), HOST)  # its weight is not known at load
    assert not TEMPLATE.matches(replace(workload, output=TensorType((4, 16), "float16")), HOST)
