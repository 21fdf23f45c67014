"""The attention template against float64: any sizes, layouts, masks, and what follows it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.attention import MAX_CANDIDATES, Attention
from hone.compiler.workload import Operand, Step, TensorType, Workload
from tests.unit.compiler.kernel_checks import AVX2, HOST, NEON, THREADS, random_inputs, run, tensors

TEMPLATE = Attention()


def attention(
    sizes, *, layouts=("bshd", "bshd", "bshd"), output="bshd", mask=None, scale=0.3, epilogue=(), extra=(), parts=3
):
    """`sizes`: batch, heads, queries, keys, depth, depth of values. Digits in layouts stand for one of `parts`."""
    batch, heads, queries, keys, depth, width = sizes

    def shape(layout, length, items):
        dims = {"b": batch, "h": heads, "s": length, "d": items}
        return tuple(dims.get(letter, parts) for letter in layout)

    shapes = [shape(layouts[0], queries, depth), shape(layouts[1], keys, depth), shape(layouts[2], keys, width)]
    return Workload(
        "attention",
        tensors(*shapes, *([] if mask is None else [mask]), *extra),
        TensorType(shape(output, queries, width), "float32"),
        (("layouts", tuple(layouts)), ("masked", mask is not None), ("output_layout", output), ("scale", scale)),
        tuple(epilogue),
    )


def expected(workload, inputs):
    def operand(array, layout):
        index = tuple(slice(None) if letter.isalpha() else int(letter) for letter in layout)
        letters = [letter for letter in layout if letter.isalpha()]
        array = array[index].astype(np.float64)
        if "b" not in letters:
            array, letters = array[None], ["b", *letters]
        return array.transpose([letters.index(letter) for letter in "bhsd"])

    query, key, value = (
        operand(array, layout) for array, layout in zip(inputs, workload.attribute("layouts"), strict=False)
    )
    scores = query @ key.transpose(0, 1, 3, 2) * workload.attribute("scale")
    if workload.attribute("masked"):
        scores = scores + inputs[3]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = weights / weights.sum(-1, keepdims=True) @ value
    layout = workload.attribute("output_layout")
    result = result if "b" in layout else result[0]
    letters = "bhsd" if "b" in layout else "hsd"
    return result.transpose([letters.index(letter) for letter in layout])


def check(workload, candidate=None, target=HOST):
    inputs = random_inputs(workload)
    np.testing.assert_allclose(
        run(TEMPLATE, workload, inputs, candidate, target), expected(workload, inputs), rtol=2e-5, atol=2e-6
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(
        st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 35),
        st.integers(1, 35),
    ),
    target=st.sampled_from([HOST, THREADS]),
)  # fmt: skip
def test_any_size(sizes, target):
    check(attention(sizes), target=target)


def test_every_candidate_computes_the_same():
    workload = attention((1, 2, 13, 37, 24, 40))
    for candidate in TEMPLATE.candidates(workload, HOST):
        check(workload, candidate)


@pytest.mark.parametrize(
    ("layouts", "output"),
    [
        (("bhsd", "bhsd", "bhsd"), "bhsd"),
        (("bshd", "bhds", "bhsd"), "bshd"),
        (("hsd", "hsd", "shd"), "hsd"),
        (("bs0hd", "bs1hd", "bs2hd"), "bshd"),
        (("0bhsd", "1bhsd", "2bhsd"), "bshd"),
    ],
)
def test_operands_are_read_where_they_lie(layouts, output):
    batch = 2 if "b" in output else 1
    check(attention((batch, 3, 5, 9, 8, 11), layouts=layouts, output=output), target=THREADS)


@pytest.mark.parametrize("mask", [(2, 1, 1, 19), (1, 3, 7, 19), (7, 19), (2, 3, 1, 1), (19,)], ids=str)
def test_masks_are_broadcast(mask):
    check(attention((2, 3, 7, 19, 8, 8), mask=mask))


def test_what_a_mask_excludes_does_not_count():
    workload = attention((1, 1, 3, 20, 8, 8), mask=(1, 1, 1, 20))
    inputs = random_inputs(workload)
    inputs[3][...] = 0
    inputs[3][..., 5:] = -np.inf
    got = run(TEMPLATE, workload, inputs)
    np.testing.assert_allclose(got, expected(workload, inputs), rtol=2e-5, atol=2e-6)
    inputs[3][...] = -np.inf
    assert np.isnan(run(TEMPLATE, workload, inputs)).all()  # no key is left: as in softmax


def test_nan_is_passed_on():
    workload = attention((1, 1, 2, 33, 8, 8))
    inputs = random_inputs(workload)
    inputs[0][0, 0, 0, 0] = np.nan
    got = run(TEMPLATE, workload, inputs)
    assert np.isnan(got[0, 0]).all()
    assert np.isfinite(got[0, 1]).all()


def test_large_scores_do_not_overflow():
    workload = attention((1, 1, 4, 30, 16, 8), scale=300.0)
    check(workload)


def test_epilogue():
    steps = (
        Step("add", (Operand("value", 0), Operand("input", 4))),
        Step("relu", (Operand("value", 1),)),
    )
    workload = attention((2, 3, 5, 9, 8, 20), mask=(9,), epilogue=steps, extra=((2, 5, 3, 20),))
    inputs = random_inputs(workload)
    np.testing.assert_allclose(
        run(TEMPLATE, workload, inputs), np.maximum(expected(workload, inputs) + inputs[4], 0), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("target", [HOST, AVX2, NEON], ids=["host", "avx2", "neon"])
@pytest.mark.parametrize("sizes", [(1, 12, 128, 128, 64, 64), (1, 6, 197, 197, 64, 64), (1, 1, 1, 1, 1, 1)])
def test_candidates_fit_the_registers(target, sizes):
    candidates = TEMPLATE.candidates(attention(sizes), target)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    for candidate in candidates:
        panels = max(1, (target.num_vector_registers - 1) // (candidate["rows"] + 1))
        assert (candidate["rows"] + 1) * panels + 1 <= target.num_vector_registers


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vfmadd\w+ps\s.*%ymm"), (NEON, r"fmla\s+v\d+\.4s")], ids=["avx2", "neon"]
)
def test_multiplies_and_adds_in_vectors(target, instruction):
    workload = attention((1, 4, 32, 32, 32, 32))
    assembly = TEMPLATE.build(workload, TEMPLATE.candidates(workload, target)[0], target).assembly
    assert len(re.findall(instruction, assembly)) >= 32
    assert "expf" not in assembly
