"""Grouped convolution against float64: groups smaller and larger than a block, and across blocks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.grouped import GroupedConvolution, groups_of
from hone.compiler.workload import Operand, Step, TensorType, Workload
from tests.unit.compiler.blocked import (
    AVX2,
    AVX512,
    HOST,
    NEON,
    assert_close,
    blocked_shape,
    run,
    to_blocks,
    to_plain,
    width_of,
)

TEMPLATE = GroupedConvolution()


def reference(x, weight, groups, stride, pad):
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    channels_out, ins, kernel, _ = weight.shape
    outs = channels_out // groups
    out_h, out_w = ((size - kernel) // stride + 1 for size in x.shape[2:])
    out = np.zeros((x.shape[0], channels_out, out_h, out_w))
    for group in range(groups):
        mine = x[:, group * ins : (group + 1) * ins]
        for i in range(kernel):
            for j in range(kernel):
                rows = slice(i, i + (out_h - 1) * stride + 1, stride)
                columns = slice(j, j + (out_w - 1) * stride + 1, stride)
                taps = weight[group * outs : (group + 1) * outs, :, i, j]
                out[:, group * outs : (group + 1) * outs] += np.einsum("nihw,oi->nohw", mine[:, :, rows, columns], taps)
    return out


def grouped(groups, ins, outs, size, kernel=3, stride=1, pad=1, batch=1, epilogue=(), width=None):
    shape = (batch, groups * ins, *size)
    inside, outside = width or width_of(groups * ins), width or width_of(groups * outs)
    out = [(at + 2 * pad - kernel) // stride + 1 for at in size]
    output = blocked_shape((batch, groups * outs, *out), outside)
    types = [
        TensorType(blocked_shape(shape, inside), "float32"),
        TensorType((groups * outs, ins, kernel, kernel), "float32"),
    ]
    if epilogue:
        types.append(TensorType((1, output[1], 1, 1, outside), "float32"))
    attributes = {
        "dilation": (1, 1),
        "groups": groups,
        "padding": (pad,) * 4,
        "strides": (stride, stride),
        "weights": (1,),
    }
    work = Workload(
        "conv2d", tuple(types), TensorType(output, "float32"), tuple(sorted(attributes.items())), tuple(epilogue)
    )
    return work, shape


def data_of(work, shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    rest = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in work.inputs[1:]]
    return x, [to_blocks(x, work.inputs[0].shape[4]), *rest]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2),
    groups=st.integers(2, 9),
    ins=st.sampled_from([1, 2, 3, 4, 8, 16, 20]),
    outs=st.sampled_from([1, 2, 4, 5, 16, 24, 32]),
    size=st.tuples(st.integers(1, 7), st.integers(1, 17)),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.integers(1, 2),
    pad=st.integers(0, 3),
    pick=st.integers(0, 99),
)
def test_any_size(batch, groups, ins, outs, size, kernel, stride, pad, pick):
    if kernel > min(size) + 2 * pad:
        return
    work, shape = grouped(groups, ins, outs, size, kernel, stride, pad, batch)
    x, inputs = data_of(work, shape)
    candidates = TEMPLATE.candidates(work, HOST)
    got = run(TEMPLATE, work, inputs, candidates[pick % len(candidates)])
    assert_close(to_plain(got, groups * outs), reference(x, inputs[1], groups, stride, pad))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ins=st.sampled_from([16, 20, 48]),
    outs=st.sampled_from([16, 33, 64, 96]),
    size=st.tuples(st.integers(3, 9), st.integers(3, 41)),
    kernel=st.sampled_from([3, 5]),
    stride=st.integers(1, 2),
    pad=st.integers(1, 2),
    pick=st.integers(0, 99),
)
def test_one_group_with_borders_and_rows_of_any_length(ins, outs, size, kernel, stride, pad, pick):
    if kernel > min(size) + 2 * pad:
        return
    work, shape = grouped(1, ins, outs, size, kernel, stride, pad)
    x, inputs = data_of(work, shape)
    candidates = TEMPLATE.candidates(work, HOST)
    got = run(TEMPLATE, work, inputs, candidates[pick % len(candidates)])
    assert_close(to_plain(got, outs), reference(x, inputs[1], 1, stride, pad))


def test_a_single_group_is_left_to_the_direct_template():
    work, _ = grouped(1, 16, 16, (8, 39))
    assert not TEMPLATE.matches(work, HOST)
    assert TEMPLATE.matches(grouped(2, 16, 16, (8, 39))[0], HOST)


def test_bias_and_relu_ride_along():
    steps = (Step("add", (Operand("value", 0), Operand("input", 2))), Step("relu", (Operand("value", 1),)))
    work, shape = grouped(4, 5, 6, (5, 9), epilogue=steps)
    x, inputs = data_of(work, shape)
    want = reference(x, inputs[1], 4, 1, 1) + to_plain(inputs[2], 24)
    assert_close(to_plain(run(TEMPLATE, work, inputs), 24), np.maximum(want, 0))


@pytest.mark.parametrize(
    ("groups", "ins", "outs", "run"), [(32, 4, 4, 16), (2, 64, 64, 64), (8, 1, 2, 8), (4, 24, 24, 48)]
)
def test_a_block_reads_the_channels_of_its_groups(groups, ins, outs, run):
    work, _ = grouped(groups, ins, outs, (5, 5), width=16)
    assert groups_of(work).run == run


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("outs", [4, 16, 96])
def test_candidates_fit_the_registers(target, outs):
    work, _ = grouped(4, 8, outs, (5, 28), width=target.lanes)
    candidates = TEMPLATE.candidates(work, target)
    assert 0 < len(candidates) <= 24
    for candidate in candidates:
        held = candidate["blocks"] * (candidate["columns"] + 2) + 1
        assert held <= target.num_vector_registers or (candidate["blocks"], candidate["columns"]) == (1, 1)
        assert outs % (candidate["blocks"] * target.lanes) == 0 or candidate["blocks"] == 1


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vfmadd\d+ps.*%ymm"), (AVX512, r"vfmadd\d+ps.*%zmm"), (NEON, r"fmla\s+v.*\.4s")]
)
def test_code_uses_vectors(target, instruction):
    work, _ = grouped(2, target.lanes, target.lanes, (5, 12), width=target.lanes)
    assembly = TEMPLATE.build(work, TEMPLATE.candidates(work, target)[0], target).assembly
    assert len(re.findall(instruction, assembly)) >= 8
