"""Poolings, and values stacked along channels: against numpy, with poison in what fills blocks up."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.templates.cpu.pooling import GlobalPooling, Pooling
from hone.compiler.templates.cpu.stack import StackedChannels, runs_of
from hone.compiler.templates.cpu.upsample import LinearUpsampling
from hone.compiler.workload import Operand, Step
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
    workload,
)

POOLING, GLOBAL, STACKED, LINEAR = Pooling(), GlobalPooling(), StackedChannels(), LinearUpsampling()
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def windows(x, fill, window, strides, padding, dilation, out):
    """[taps, N, C, OH, OW] of what each output looks at, `fill` outside of the image."""
    top, left, bottom, right = padding
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom + 9), (left, right + 9)), constant_values=fill)
    taken = []
    for i in range(window[0]):
        for j in range(window[1]):
            rows = slice(i * dilation[0], i * dilation[0] + (out[0] - 1) * strides[0] + 1, strides[0])
            columns = slice(j * dilation[1], j * dilation[1] + (out[1] - 1) * strides[1] + 1, strides[1])
            taken.append(x[:, :, rows, columns])
    return np.stack(taken)


@QUICK
@given(
    kind=st.sampled_from(["max", "mean"]),
    counts_padding=st.integers(0, 1),
    channels=st.sampled_from([1, 8, 16, 20]),
    size=st.tuples(st.integers(3, 9), st.integers(3, 19)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 1)] * 4),
    pick=st.integers(0, 9),
)
def test_poolings_of_any_size(kind, counts_padding, channels, size, window, strides, padding, pick):
    padding = tuple(min(pad, window[at % 2] - 1) for at, pad in enumerate(padding))
    out = [
        (size[at] + padding[at] + padding[at + 2] - window[at]) // strides[at] + 1 for at in (0, 1)
    ]  # every window then has a pixel of the image
    x = values((2, channels, *size))
    width = width_of(channels)
    work = workload(
        "pool2d", [to_blocks(x, width)], blocked_shape((2, channels, *out), width),
        kind=kind, counts_padding=counts_padding, window=window, strides=strides, padding=padding, dilation=(1, 1),
    )  # fmt: skip
    candidates = POOLING.candidates(work, HOST)
    got = run(POOLING, work, [to_blocks(x, width)], candidates[pick % len(candidates)])
    fill = -np.inf if kind == "max" else (0.0 if counts_padding else np.nan)
    taps = windows(x, fill, window, strides, padding, (1, 1), out)
    assert_close(to_plain(got, channels), taps.max(axis=0) if kind == "max" else np.nanmean(taps, axis=0))


@QUICK
@given(
    kind=st.sampled_from(["mean", "sum", "max", "min"]),
    channels=st.sampled_from([1, 8, 24]),
    size=st.tuples(st.integers(1, 6), st.integers(1, 21)),
    pick=st.integers(0, 9),
)
def test_poolings_over_whole_images(kind, channels, size, pick):
    x, width = values((2, channels, *size)), width_of(channels)
    blocks = to_blocks(x, width)
    double = (Step("multiply", (Operand("value", 0), Operand("constant", constant=2.0))),)
    work = workload("global_pool", [blocks], blocked_shape((2, channels, 1, 1), width), double, kind=kind)
    candidates = GLOBAL.candidates(work, HOST)
    got = run(GLOBAL, work, [blocks], candidates[pick % len(candidates)])
    assert_close(to_plain(got, channels), 2 * getattr(x.astype(np.float64), kind)(axis=(2, 3), keepdims=True))


@QUICK
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([1, 3, 8, 12, 16, 24, 40]), st.sampled_from([1, 2, 4])), min_size=1, max_size=4
    ),
    size=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    pick=st.integers(0, 2),
)
def test_parts_of_any_channels_stack(parts, size, pick):
    plain = [values((2, channels, 4 * size[0] // factor, 4 * size[1] // factor), at)
             for at, (channels, factor) in enumerate(parts)]  # fmt: skip
    total = sum(channels for channels, _ in parts)
    inputs = [to_blocks(x, width_of(x.shape[1])) for x in plain]
    work = workload(
        "stack_channels", inputs, blocked_shape((2, total, 4 * size[0], 4 * size[1]), width_of(total)),
        channels=tuple(channels for channels, _ in parts), factors=tuple(factor for _, factor in parts),
    )  # fmt: skip
    got = run(STACKED, work, inputs, STACKED.candidates(work, HOST)[pick])
    want = [x.repeat(factor, 2).repeat(factor, 3) for x, (_, factor) in zip(plain, parts, strict=True)]
    np.testing.assert_array_equal(to_plain(got, total), np.concatenate(want, axis=1))


def linear(x, axis, factor, half_pixel):
    """Along one axis, by the definition: neighbours of the output's place, the border's beyond the border."""
    size = x.shape[axis]
    places = np.arange(size * factor)
    at = (places + 0.5) / factor - 0.5 if half_pixel else places / factor
    low = np.floor(at).astype(int)
    share = (at - low).reshape([-1 if other == axis else 1 for other in range(x.ndim)])
    left, right = (x.take(np.clip(low + step, 0, size - 1), axis=axis) for step in (0, 1))
    return left * (1 - share) + right * share


@QUICK
@given(
    channels=st.sampled_from([1, 8, 20]),
    size=st.tuples(st.integers(1, 5), st.integers(1, 11)),
    factors=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    half_pixel=st.integers(0, 1),
    pick=st.integers(0, 9),
)
def test_linear_resizes_of_any_size(channels, size, factors, half_pixel, pick):
    x, width = values((2, channels, *size)), width_of(channels)
    blocks, out = to_blocks(x, width), (2, channels, size[0] * factors[0], size[1] * factors[1])
    work = workload("upsample_linear", [blocks], blocked_shape(out, width), factors=factors, half_pixel=half_pixel)
    assert LINEAR.matches(work, HOST)
    candidates = LINEAR.candidates(work, HOST)
    got = run(LINEAR, work, [blocks], candidates[pick % len(candidates)])
    want = linear(linear(x.astype(np.float64), 2, factors[0], half_pixel), 3, factors[1], half_pixel)
    assert_close(to_plain(got, channels), want)


def test_parts_that_end_with_a_block_are_copied_whole():
    width = width_of(64)
    inputs = [to_blocks(values((1, 2 * width, 4, 4)), width), to_blocks(values((1, width, 4, 4)), width)]
    work = workload(
        "stack_channels", inputs, (1, 3, 4, 4, width), channels=(2 * width, width), factors=(1, 1)
    )  # fmt: skip
    assert [[run.length for run in runs_of(work, block)] for block in range(3)] == [[width]] * 3


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
def test_every_target_has_candidates(target):
    width = target.lanes
    x = np.zeros((1, 3, 5, 1, width), np.float32)
    pool = workload(
        "pool2d", [x], (1, 3, 3, 1, width),
        kind="max", counts_padding=0, window=(3, 1), strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1),
    )  # fmt: skip
    whole = workload("global_pool", [x], (1, 3, 1, 1, width), kind="mean")
    stacked = workload("stack_channels", [x, x], (1, 6, 5, 1, width), channels=(3 * width,) * 2, factors=(1, 1))
    for template, work in ((POOLING, pool), (GLOBAL, whole), (STACKED, stacked)):
        assert template.matches(work, target)
        assert template.candidates(work, target)


@pytest.mark.parametrize(
    ("target", "instruction"), [(AVX2, r"vmaxps.*%ymm"), (AVX512, r"vmaxps.*%zmm"), (NEON, r"(fmax|fmaxnm|fcmgt)\s+v")]
)
def test_code_uses_vectors(target, instruction):
    x = np.zeros((1, 3, 9, 17, target.lanes), np.float32)
    work = workload(
        "pool2d", [x], (1, 3, 7, 15, target.lanes),
        kind="max", counts_padding=0, window=(3, 3), strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1),
    )  # fmt: skip
    assembly = POOLING.build(work, POOLING.candidates(work, target)[0], target).assembly
    assert len(re.findall(instruction, assembly)) >= 9
