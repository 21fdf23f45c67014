"""Transposed convolution against float64, whatever stride, dilation and padding make of its phases."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.conv_transpose import TransposedConvolution, phases_of
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

TEMPLATE = TransposedConvolution()


def reference(x, weight, strides, padding, dilation, size):
    """Every input spreads over its window, in float64; `size` is the output's."""
    _, channels, kernel_h, kernel_w = weight.shape
    n, _, h, w = x.shape
    top, left, _, _ = padding
    space = [left_over + 64 for left_over in size]
    out = np.zeros((n, channels, *space))
    for i in range(kernel_h):
        for j in range(kernel_w):
            rows = slice(i * dilation[0], i * dilation[0] + (h - 1) * strides[0] + 1, strides[0])
            columns = slice(j * dilation[1], j * dilation[1] + (w - 1) * strides[1] + 1, strides[1])
            out[:, :, rows, columns] += np.einsum("nchw,co->nohw", x.astype(np.float64), weight[:, :, i, j])
    return out[:, :, top : top + size[0], left : left + size[1]]


def transposed(shape, channels, kernel, strides, padding, dilation, extra=(0, 0), epilogue=(), width=None):
    n, channels_in, *size = shape
    out = [
        (at - 1) * stride - before - after + (taps - 1) * step + 1 + more
        for at, stride, before, after, taps, step, more in zip(
            size, strides, padding[:2], padding[2:], kernel, dilation, extra, strict=True
        )
    ]
    inside, outside = width or width_of(channels_in), width or width_of(channels)
    output = blocked_shape((n, channels, *out), outside)
    types = [
        TensorType(blocked_shape(shape, inside), "float32"),
        TensorType((channels_in, channels, *kernel), "float32"),
    ]
    if epilogue:
        types.append(TensorType((1, output[1], 1, 1, outside), "float32"))
    attributes = {
        "dilation": tuple(dilation),
        "padding": tuple(padding),
        "strides": tuple(strides),
        "weights": (1,),
    }
    output_type = TensorType(output, "float32")
    return Workload("conv2d_transpose", tuple(types), output_type, tuple(sorted(attributes.items())), epilogue), out


def data_of(work, shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    rest = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in work.inputs[1:]]
    return x, [to_blocks(x, work.inputs[0].shape[4]), *rest]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2),
    channels=st.tuples(st.sampled_from([1, 3, 16, 20, 33]), st.sampled_from([1, 5, 16, 24])),
    size=st.tuples(st.integers(1, 7), st.integers(1, 17)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    extra=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    pick=st.integers(0, 99),
)
def test_any_size(batch, channels, size, kernel, strides, dilation, padding, extra, pick):
    shape = (batch, channels[0], *size)
    work, out = transposed(shape, channels[1], kernel, strides, padding, dilation, extra)
    if min(out) < 1:
        return
    x, inputs = data_of(work, shape)
    candidates = TEMPLATE.candidates(work, HOST)
    got = run(TEMPLATE, work, inputs, candidates[pick % len(candidates)])
    assert_close(to_plain(got, channels[1]), reference(x, inputs[1], strides, padding, dilation, out))


def test_bias_and_relu_ride_along():
    steps = (
        Step("add", (Operand("value", 0), Operand("input", 2))),
        Step("relu", (Operand("value", 1),)),
    )
    shape = (1, 24, 5, 9)
    work, out = transposed(shape, 20, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), epilogue=steps)
    x, inputs = data_of(work, shape)
    want = reference(x, inputs[1], (2, 2), (0, 0, 0, 0), (1, 1), out) + to_plain(inputs[2], 20)
    assert_close(to_plain(run(TEMPLATE, work, inputs), 20), np.maximum(want, 0))


def test_a_kernel_as_wide_as_its_stride_has_one_tap_a_phase():
    work, _ = transposed((1, 16, 4, 4), 16, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1))
    assert [(phase.taps, phase.shifts) for phase in phases_of(work, 0)] == [((0,), (0,)), ((1,), (0,))]


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("columns", [1, 3, 14, 80])
def test_candidates_fit_the_registers(target, columns):
    work, _ = transposed((1, 24, 3, columns), 48, (4, 4), (2, 2), (1, 1, 1, 1), (1, 1), width=target.lanes)
    candidates = TEMPLATE.candidates(work, target)
    assert 0 < len(candidates) <= 24
    for candidate in candidates:
        held = candidate["blocks"] * (candidate["columns"] + 2) + 1
        assert held <= target.num_vector_registers or (candidate["blocks"], candidate["columns"]) == (1, 1)


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vfmadd\d+ps.*%ymm"), (AVX512, r"vfmadd\d+ps.*%zmm"), (NEON, r"fmla\s+v.*\.4s")]
)
def test_code_uses_vectors(target, instruction):
    work, _ = transposed((1, 16, 3, 12), 4 * target.lanes, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), width=target.lanes)
    assembly = TEMPLATE.build(work, TEMPLATE.candidates(work, target)[0], target).assembly
    assert len(re.findall(instruction, assembly)) >= 8
