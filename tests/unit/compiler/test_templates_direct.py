"""The direct convolution against float64: rows of images, merged pixels, single pixels, borders, partial tiles."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.direct import MAX_CANDIDATES, DirectConvolution, Places
from hone.compiler.templates.registry import templates_for
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

TEMPLATE = DirectConvolution()
VALUE = Operand("value", 0)
#: Hard swish of value + bias: values that several steps use.
HARD_SWISH = (
    Step("add", (VALUE, Operand("input", 2))),
    Step("add", (Operand("value", 1), Operand("constant", constant=3.0))),
    Step("clip", (Operand("value", 2), Operand("constant", constant=0.0), Operand("constant", constant=6.0))),
    Step("multiply", (Operand("value", 1), Operand("value", 3))),
)


def reference(x, weight, strides, padding, dilation):
    """Plain loops over the window in float64, NCHW."""
    top, left, bottom, right = padding
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    channels_out, _, kernel_h, kernel_w = weight.shape
    out_h, out_w = (
        (size - (kernel - 1) * step - 1) // stride + 1
        for size, kernel, step, stride in zip(x.shape[2:], (kernel_h, kernel_w), dilation, strides, strict=True)
    )
    out = np.zeros((x.shape[0], channels_out, out_h, out_w))
    for i in range(kernel_h):
        for j in range(kernel_w):
            rows = slice(i * dilation[0], i * dilation[0] + (out_h - 1) * strides[0] + 1, strides[0])
            columns = slice(j * dilation[1], j * dilation[1] + (out_w - 1) * strides[1] + 1, strides[1])
            out += np.einsum("nihw,oi->nohw", x[:, :, rows, columns], weight[:, :, i, j])
    return out


def convolution(
    channels_in, channels_out, size, kernel=(1, 1), strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), batch=1,
    *, plain=False, epilogue=(), extra=(), lanes=None,
):  # fmt: skip
    """The workload; `extra` are shapes of further inputs: "channel", "image" or "full"."""
    out = [
        (at + before + after - (k - 1) * d - 1) // s + 1
        for at, k, s, d, before, after in zip(
            size, kernel, strides, dilation, padding[:2], padding[2:], strict=True
        )
    ]  # fmt: skip
    outside = lanes or width_of(channels_out)
    data = (batch, channels_in, *size)
    output = blocked_shape((batch, channels_out, *out), outside)
    shapes = {
        "channel": (1, output[1], 1, 1, outside),
        "image": (batch, 1, *out, 1),
        "full": output,
    }
    types = [
        TensorType(data if plain else blocked_shape(data, lanes or width_of(channels_in)), "float32"),
        TensorType((channels_out, channels_in, *kernel), "float32"),
        *(TensorType(shapes[kind], "float32") for kind in extra),
    ]
    attributes = {"dilation": dilation, "groups": 1, "padding": padding, "strides": strides, "weights": (1,)}
    return Workload(
        "conv2d", tuple(types), TensorType(output, "float32"), tuple(sorted(attributes.items())), tuple(epilogue)
    )


def check(work, candidate=None, expected=lambda result, _: result, seed=0):
    """Run one candidate (the first) and compare with float64. `expected(result, inputs)` in the output's layout."""
    rng = np.random.default_rng(seed)
    weight = work.inputs[1]
    shape = (work.inputs[0].shape[0], weight.shape[1], *work.inputs[0].shape[2:4])
    x = rng.standard_normal(shape).astype(np.float32)
    data = to_blocks(x, work.inputs[0].shape[4]) if len(work.inputs[0].shape) == 5 else x
    inputs = [data, *(rng.standard_normal(tensor.shape).astype(np.float32) for tensor in work.inputs[1:])]
    result = reference(x, inputs[1], *(work.attribute(name) for name in ("strides", "padding", "dilation")))
    want = expected(to_blocks(result, work.output.shape[4]), inputs)
    got = run(TEMPLATE, work, inputs, candidate)
    channels = weight.shape[0]
    assert_close(to_plain(got, channels), to_plain(want, channels))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2),
    channels_in=st.sampled_from([1, 3, 16, 24, 40]),
    channels_out=st.sampled_from([16, 24, 48, 80]),
    size=st.tuples(st.integers(5, 17), st.integers(5, 17)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    plain=st.booleans(),
)
def test_any_size(batch, channels_in, channels_out, size, kernel, strides, padding, dilation, plain):
    if any((k - 1) * d >= at for k, d, at in zip(kernel, dilation, size, strict=True)):
        return
    check(convolution(channels_in, channels_out, size, kernel, strides, padding, dilation, batch, plain=plain))


@pytest.mark.parametrize(
    ("size", "batch", "kind"),
    [((7, 7), 2, "merged"), ((1, 1), 5, "batch"), ((1, 1), 1, "batch"), ((3, 20), 1, "merged")],
)
@pytest.mark.parametrize("channels", [(24, 40), (48, 112)])
def test_windows_of_one_pixel(size, batch, kind, channels):
    work = convolution(*channels, size, batch=batch)
    assert Places.of(work).kind == kind
    check(work)


def test_sums_that_are_put_aside_between_blocks_of_channels():
    work = convolution(88, 48, (7, 9))
    for depth in (16, 32, 88):
        check(work, Candidate.of(TEMPLATE.name, blocks=2, pixels=5, depth=depth))


def test_every_candidate_computes_the_same():
    for work in (convolution(32, 112, (7, 7)), convolution(16, 48, (9, 9), (3, 3), (2, 2), (1, 1, 1, 1))):
        candidates = TEMPLATE.candidates(work, HOST)
        assert len(set(candidates)) == len(candidates) <= MAX_CANDIDATES
        for candidate in candidates[::5]:
            check(work, candidate)


def test_deep_ones_offer_blocks_that_fit_the_nearest_cache():
    depths = {candidate["depth"] for candidate in TEMPLATE.candidates(convolution(2048, 512, (7, 7)), HOST)}
    assert len(depths) > 1
    assert all(depth == 2048 or depth % width_of(2048) == 0 for depth in depths)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_epilogues_with_operands_of_some_dimensions(kernel):
    pad = (kernel[0] // 2,) * 4
    steps = (
        *HARD_SWISH,
        Step("multiply", (Operand("value", 4), Operand("input", 3))),
        Step("add", (Operand("value", 5), Operand("input", 4))),
    )

    def expected(result, inputs):
        biased = result + inputs[2]
        return biased * np.clip(biased + 3, 0, 6) * inputs[3] + inputs[4]

    extra = ("channel", "image", "full")
    check(convolution(16, 48, (5, 7), kernel, padding=pad, epilogue=steps, extra=extra, batch=2), expected=expected)


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("size", [1, 7, 13, 56])
def test_candidates_fit_the_registers(target, size):
    for work in (
        convolution(64, 64, (size, size), lanes=target.lanes),
        convolution(16, 48, (size, size), (3, 3), padding=(1, 1, 1, 1), lanes=target.lanes),
    ):
        candidates = TEMPLATE.candidates(work, target)
        assert candidates
        for candidate in candidates:
            assert candidate["blocks"] * (candidate["pixels"] + 1) + 1 <= target.num_vector_registers


@pytest.mark.parametrize(("blocks", "pixels"), [(3, 8), (2, 12), (4, 6)])
def test_sums_stay_in_registers(blocks, pixels):
    """The innermost loop stores nothing: every vector of a step is an operand of a multiply-add."""
    work = convolution(64, 16 * blocks, (8, 12), lanes=16)
    code = TEMPLATE.build(work, Candidate.of(TEMPLATE.name, blocks=blocks, pixels=pixels, depth=64), AVX512).assembly
    loops = [block for block in re.split(r"^\.LBB\w+:", code, flags=re.MULTILINE) if block.count("vfmadd") > 40]
    assert loops
    for block in loops:
        body = block[: block.index("\tj")] if "\tj" in block else block
        assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%rsp", body)


def test_no_image_is_copied_to_be_padded():
    work = convolution(16, 32, (9, 9), (3, 3), padding=(1, 1, 1, 1))
    code = TEMPLATE.build(work, TEMPLATE.candidates(work, HOST)[0], HOST).assembly
    assert "TVMBackendAllocWorkspace" not in code


@pytest.mark.parametrize(
    ("target", "pattern"),
    [(AVX512, r"vfmadd\w+ps.*%zmm"), (AVX2, r"vfmadd\w+ps.*%ymm"), (NEON, r"fmla\s+v\d+\.4s")],
    ids=["avx512", "avx2", "neon"],
)
def test_code_has_the_vectors_of_its_architecture(target, pattern):
    work = convolution(16, 32, (7, 7), lanes=target.lanes)
    code = TEMPLATE.build(work, TEMPLATE.candidates(work, target)[0], target).assembly
    assert len(re.findall(pattern, code)) >= 16


def test_large_work_is_parallel_and_small_work_is_not():
    many = CpuTarget.of_features("haswell", ("avx2", "fma"), num_threads=4)
    for work, expected in (
        (convolution(64, 64, (56, 56), lanes=8), True),
        (convolution(64, 64, (56, 56), (3, 3), padding=(1, 1, 1, 1), lanes=8), True),
        (convolution(8, 16, (8, 8), lanes=8), False),
    ):
        script = TEMPLATE.prim_func(work, TEMPLATE.candidates(work, many)[0], many).script()
        assert ("T.parallel" in script) == expected


def test_it_is_asked_for_what_it_can_do_only():
    work = convolution(32, 32, (7, 7))
    assert templates_for(work, HOST)[0].name == TEMPLATE.name
    grouped = tuple((name, 2 if name == "groups" else value) for name, value in work.attributes)
    assert not TEMPLATE.matches(Workload("conv2d", work.inputs, work.output, grouped), HOST)
    assert not TEMPLATE.matches(Workload("pool", work.inputs, work.output, work.attributes), HOST)


@pytest.mark.parametrize("plain", [True, False])
def test_wide_filters_are_loops(plain):
    """A spectrum's window of 256 samples: written out, every tile had thousands of steps, and TVM took minutes."""
    channels = 1 if plain else 16
    work = convolution(channels, 258, (1, 640), (1, 256), (1, 128), plain=plain)
    for candidate in TEMPLATE.candidates(work, HOST):
        assert TEMPLATE.prim_func(work, candidate, HOST).script().count("\n") < 2000
    check(work)


def test_a_wide_filters_edges_are_written_out_as_far_as_that_is_little():
    work = convolution(1, 32, (1, 64), (1, 20), padding=(0, 10, 0, 9), plain=True)
    assert TEMPLATE.candidates(work, HOST)
    check(work)
    assert not TEMPLATE.matches(convolution(16, 32, (1, 640), (1, 300), padding=(0, 150, 0, 149)), HOST)
