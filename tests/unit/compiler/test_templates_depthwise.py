"""Depthwise convolution against float64, its candidates against the machine, its code against the architecture."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.depthwise import DepthwiseConvolution
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
)  # fmt: skip

TEMPLATE = DepthwiseConvolution()
VALUE = Operand("value", 0)


def reference(x, weight, strides, padding, dilation):
    """Plain loops over the window, in float64."""
    top, left, bottom, right = padding
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    _, _, kernel_h, kernel_w = weight.shape
    out_h = (x.shape[2] - (kernel_h - 1) * dilation[0] - 1) // strides[0] + 1
    out_w = (x.shape[3] - (kernel_w - 1) * dilation[1] - 1) // strides[1] + 1
    out = np.zeros((*x.shape[:2], max(out_h, 0), max(out_w, 0)))
    for i in range(kernel_h):
        for j in range(kernel_w):
            rows = slice(i * dilation[0], i * dilation[0] + (out_h - 1) * strides[0] + 1, strides[0])
            columns = slice(j * dilation[1], j * dilation[1] + (out_w - 1) * strides[1] + 1, strides[1])
            out += x[:, :, rows, columns] * weight[None, :, 0, i, j, None, None]
    return out


def depthwise(shape, kernel, strides, padding, dilation, epilogue=(), extra=(), width=None):
    channels = shape[1]
    width = width or width_of(channels)
    out = [
        (size + before + after - (taps - 1) * step - 1) // stride + 1
        for size, before, after, taps, step, stride in zip(
            shape[2:], padding[:2], padding[2:], kernel, dilation, strides, strict=True
        )
    ]
    output = blocked_shape((shape[0], channels, *out), width)
    types = [TensorType(blocked_shape(shape, width), "float32"), TensorType((channels, 1, *kernel), "float32")]
    types += [TensorType(output if kind == "full" else (1, output[1], 1, 1, width), "float32") for kind in extra]
    attributes = {
        "dilation": tuple(dilation), "groups": channels, "padding": tuple(padding), "strides": tuple(strides),
        "weights": (1,),
    }  # fmt: skip
    return Workload(
        "depthwise_conv2d", tuple(types), TensorType(output, "float32"), tuple(sorted(attributes.items())), epilogue
    )


def data_of(work, shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    rest = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in work.inputs[1:]]
    return x, [to_blocks(x, work.output.shape[4]), *rest]


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2),
    channels=st.sampled_from([1, 3, 8, 16, 24, 40]),
    size=st.tuples(st.integers(1, 13), st.integers(1, 19)),
    kernel=st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([1, 2, 3, 5, 7])),
    strides=pairs,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 4)] * 4),
    pick=st.integers(0, 99),
)
def test_any_size(batch, channels, size, kernel, strides, dilation, padding, pick):
    shape = (batch, channels, *size)
    work = depthwise(shape, kernel, strides, padding, dilation)
    if min(work.output.shape) < 1:
        return
    x, inputs = data_of(work, shape)
    candidates = TEMPLATE.candidates(work, HOST)
    got = run(TEMPLATE, work, inputs, candidates[pick % len(candidates)])
    assert_close(to_plain(got, channels), reference(x, inputs[1], strides, padding, dilation))


def test_every_candidate_computes_the_same():
    shape = (1, 24, 9, 21)
    work = depthwise(shape, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    x, inputs = data_of(work, shape)
    candidates = TEMPLATE.candidates(work, HOST)
    assert len(set(candidates)) == len(candidates)
    want = reference(x, inputs[1], (1, 1), (1, 1, 1, 1), (1, 1))
    for candidate in candidates[::3]:
        assert_close(to_plain(run(TEMPLATE, work, inputs, candidate), 24), want)


def test_epilogue_with_bias_residual_and_hard_swish():
    constant = {value: Operand("constant", constant=value) for value in (0.0, 3.0, 6.0)}
    steps = (
        Step("add", (VALUE, Operand("input", 2))),
        Step("add", (Operand("value", 1), Operand("input", 3))),
        Step("add", (Operand("value", 2), constant[3.0])),
        Step("clip", (Operand("value", 3), constant[0.0], constant[6.0])),
        Step("multiply", (Operand("value", 2), Operand("value", 4))),
        Step("divide", (Operand("value", 5), constant[6.0])),
    )
    shape = (2, 20, 6, 11)
    work = depthwise(shape, (5, 5), (2, 1), (2, 2, 2, 2), (1, 1), steps, ("channel", "full"))
    x, inputs = data_of(work, shape)
    inside = reference(x, inputs[1], (2, 1), (2, 2, 2, 2), (1, 1)) + to_plain(inputs[2], 20) + to_plain(inputs[3], 20)
    assert_close(to_plain(run(TEMPLATE, work, inputs), 20), inside * np.clip(inside + 3, 0, 6) / 6)


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("columns", [1, 2, 7, 14, 56, 113])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_candidates_fit_the_registers(target, columns, kernel):
    pad = kernel // 2
    work = depthwise((1, 72, 9, columns), (kernel, kernel), (1, 1), (pad,) * 4, (1, 1), width=target.lanes)
    assert TEMPLATE.matches(work, target)
    candidates = TEMPLATE.candidates(work, target)
    assert 0 < len(candidates) <= 40
    for candidate in candidates:
        assert candidate["columns"] == 1 or candidate["columns"] + 2 <= target.num_vector_registers


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vfmadd\d+ps.*%ymm"), (AVX512, r"vfmadd\d+ps.*%zmm"), (NEON, r"fmla\s+v.*\.4s")]
)
def test_code_uses_vectors(target, instruction):
    import re

    work = depthwise((1, 4 * target.lanes, 9, 21), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), width=target.lanes)
    assembly = TEMPLATE.build(work, TEMPLATE.candidates(work, target)[0], target).assembly
    assert len(re.findall(instruction, assembly)) >= 9


def test_what_mixes_channels_is_not_matched():
    work = depthwise((1, 16, 5, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    wider = TensorType((1, 2 * work.output.shape[1], *work.output.shape[2:]), "float32")
    assert not TEMPLATE.matches(Workload(work.op, work.inputs, wider, work.attributes), HOST)
    assert not TEMPLATE.matches(Workload("conv2d", work.inputs, work.output, work.attributes), HOST)
