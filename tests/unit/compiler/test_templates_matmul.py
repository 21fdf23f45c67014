"""The matrix product template against float64, with weights in panels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpu.matmul import MAX_CANDIDATES, PackedMatmul
from hone.compiler.workload import Operand, Step, TensorType, Workload

TEMPLATE = PackedMatmul()
HOST = CpuTarget.detect(num_threads=1)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))


def product(rows: tuple[int, ...], depth: int, columns: int, epilogue=(), extra=(), target=HOST) -> Workload:
    panel = TEMPLATE.panel(columns, target)
    assert panel
    shapes = [(*rows, depth), (columns // panel, depth, panel), *extra]
    return Workload(
        "matmul_packed",
        tuple(TensorType(shape, "float32") for shape in shapes),
        TensorType((*rows, columns), "float32"),
        (),
        tuple(epilogue),
    )


def check(workload, candidate=None, after=lambda result, _: result):
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in workload.inputs]
    kernel = TEMPLATE.build(workload, candidate or TEMPLATE.candidates(workload, HOST)[0], HOST)
    out = tvm.runtime.tensor(np.full(workload.output.shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in inputs), out)
    weight = inputs[1].astype(np.float64).transpose(1, 0, 2).reshape(workload.inputs[1].shape[1], -1)
    want = after(inputs[0].astype(np.float64) @ weight, inputs)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.sampled_from([(1,), (3,), (8,), (13,), (2, 5), (2, 3, 4)]),
    depth=st.sampled_from([1, 7, 32, 100]),
    columns=st.sampled_from([8, 10, 16, 24, 48, 100, 208]),
)
def test_any_size(rows, depth, columns):
    check(product(rows, depth, columns))


def test_every_candidate_computes_the_same():
    workload = product((12,), 32, 96)
    for candidate in TEMPLATE.candidates(workload, HOST)[::3]:
        check(workload, candidate)


def test_epilogue():
    bias = Step("add", (Operand("value", 0), Operand("input", 2)))
    relu = Step("relu", (Operand("value", 1),))
    check(
        product((2, 6), 16, 48, (bias, relu), ((48,),)), after=lambda result, inputs: np.maximum(result + inputs[2], 0)
    )


@pytest.mark.parametrize("target", [HOST, AVX2], ids=["host", "avx2"])
@pytest.mark.parametrize(("rows", "columns"), [((1,), 1000), ((128,), 768), ((1, 197), 384), ((7,), 10)])
def test_candidates_fit_the_registers(target, rows, columns):
    workload = product(rows, 64, columns, target=target)
    candidates = TEMPLATE.candidates(workload, target)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    assert all(c["rows"] * c["panels"] + c["panels"] + 1 <= target.num_vector_registers for c in candidates)


def test_a_width_that_makes_no_panels_is_left_alone():
    assert TEMPLATE.panel(509, HOST) == 0
    assert TEMPLATE.panel(1, HOST) == 0


def test_rows_that_do_not_match_are_refused():
    workload = product((4,), 32, 16)
    other = Workload("matmul_packed", (TensorType((4, 31), "float32"), workload.inputs[1]), workload.output)
    assert TEMPLATE.matches(workload, HOST)
    assert not TEMPLATE.matches(other, HOST)
