"""Winograd convolution: its matrices exactly, its kernels against float64, its candidates against the machine."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpu.linear import multiply
from hone.compiler.templates.cpu.winograd import MAX_CANDIDATES, WinogradConvolution
from hone.compiler.templates.cpu.winograd_matrices import POINTS, filtering
from hone.compiler.templates.packing import Packer, kernel_inputs
from hone.compiler.workload import Operand, Step, TensorType, Workload

TEMPLATE = WinogradConvolution()
HOST = CpuTarget.detect(num_threads=1)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
AVX512 = CpuTarget.of_features("skylake-avx512", ("avx2", "fma", "avx512f"))
NEON = CpuTarget.of_features("generic", ("neon",), triple="aarch64-linux-gnu")

VALUE = Operand("value", 0)
BIAS = Step("add", (VALUE, Operand("input", 2)))


def convolution(
    batch=1, channels_in=16, height=8, width=8, channels_out=32, pads=(1, 1, 1, 1), block=16, epilogue=(), extra=()
) -> Workload:
    """Channels that do not fill their last block are there in the activations, and not in the weight."""
    blocks_in, blocks_out = -(-channels_in // block), -(-channels_out // block)
    top, left, bottom, right = pads
    output = (batch, blocks_out, height + top + bottom - 2, width + left + right - 2, block)
    shapes = [(batch, blocks_in, height, width, block), (channels_out, channels_in, 3, 3)]
    shapes += [(1, blocks_out, 1, 1, block) if kind == "channel" else output for kind in extra]
    attributes = {"dilation": (1, 1), "groups": 1, "padding": pads, "strides": (1, 1), "weights": (1,)}
    return Workload(
        "conv2d",
        tuple(TensorType(shape, "float32") for shape in shapes),
        TensorType(output, "float32"),
        tuple(sorted(attributes.items())),
        tuple(epilogue),
    )


def with_attribute(workload: Workload, name: str, value) -> Workload:
    return replace(workload, attributes=tuple(sorted({**dict(workload.attributes), name: value}.items())))


def reference(workload: Workload, inputs) -> np.ndarray:
    """In float64, in the workload's layouts."""
    data, weight = (array.astype(np.float64) for array in inputs[:2])
    top, left, bottom, right = workload.attribute("padding")
    batch, blocks_out, out_h, out_w, block = workload.output.shape
    plain = data.transpose(0, 1, 4, 2, 3).reshape(batch, -1, *data.shape[2:4])[:, : weight.shape[1]]
    plain = np.pad(plain, ((0, 0), (0, 0), (top, bottom), (left, right)))
    out = np.zeros((batch, blocks_out * block, out_h, out_w))
    for y in range(3):
        for x in range(3):
            window = plain[:, :, y : y + out_h, x : x + out_w]
            out[:, : weight.shape[0]] += np.einsum("nihw,oi->nohw", window, weight[:, :, y, x])
    return out.reshape(batch, blocks_out, block, out_h, out_w).transpose(0, 1, 3, 4, 2)


def check(workload: Workload, candidate=None, expected=lambda result, _: result, target=HOST) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in workload.inputs]
    _, blocks_in, _, _, block = workload.inputs[0].shape
    unused = blocks_in * block - workload.inputs[1].shape[1]
    if unused:  # what fills up the last block is nobody's value
        inputs[0][:, -1, :, :, block - unused :] = np.nan
    candidate = candidate or TEMPLATE.candidates(workload, target)[0]
    kernel = TEMPLATE.build(workload, candidate, target)
    out = tvm.runtime.tensor(np.full(workload.output.shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in Packer(workload, inputs).pack(TEMPLATE, candidate, target)), out)
    want = expected(reference(workload, inputs), inputs)
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=5e-5 * np.sqrt(np.mean(want**2)) + 1e-6)


@pytest.mark.parametrize("outputs", POINTS)
def test_filtering_is_exact_in_fractions(outputs):
    matrices = filtering(outputs)
    data = [Fraction(3 * i * i - 7 * i + 1, 2) for i in range(matrices.size)]
    taps = [Fraction(2), Fraction(-5, 3), Fraction(7)]
    points = [
        sum(c * g for c, g in zip(left, taps, strict=True)) * sum(c * d for c, d in zip(right, data, strict=True))
        for left, right in zip(matrices.filter, matrices.input, strict=True)
    ]
    found = [sum(c * p for c, p in zip(row, points, strict=True)) for row in matrices.output]
    assert found == [sum(data[i + k] * taps[k] for k in range(3)) for i in range(outputs)]


@pytest.mark.parametrize("outputs", POINTS)
def test_its_coefficients_are_exact_in_float32(outputs):
    matrices = filtering(outputs)
    for row in (*matrices.input, *matrices.output):
        assert all(Fraction(float(np.float32(float(c)))) == c for c in row)


@pytest.mark.parametrize("outputs", POINTS)
def test_products_with_its_matrices_share_sums_and_stay_the_same(outputs):
    class Value(float):
        """Takes TVM's constants as numbers."""

        def __mul__(self, other):
            return Value(float(self) * float(getattr(other, "value", other)))

        def __add__(self, other):
            return Value(float(self) + float(other))

        def __sub__(self, other):
            return Value(float(self) - float(other))

    matrices = filtering(outputs)
    for matrix in (matrices.input, matrices.output):
        values = [Value(i * i - 3.5) for i in range(len(matrix[0]))]
        wanted = np.array(matrix, np.float64) @ np.array(values, np.float64)
        np.testing.assert_allclose([float(v) for v in multiply(matrix, values)], wanted, rtol=1e-12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 3),
    channels_in=st.sampled_from([16, 17, 32, 40]),
    channels_out=st.sampled_from([16, 20, 48, 64]),
    height=st.integers(4, 15),
    width=st.integers(4, 15),
    pads=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 0), (2, 2, 2, 2)]),
    block=st.sampled_from([8, 16]),
    which=st.integers(0, 99),
)
def test_any_size(batch, channels_in, channels_out, height, width, pads, block, which):
    workload = convolution(batch, channels_in, height, width, channels_out, pads, block)
    candidates = TEMPLATE.candidates(workload, HOST)
    check(workload, candidates[which % len(candidates)])


def test_every_kind_of_candidate_computes_the_same():
    workload = convolution(
        batch=2, channels_in=32, height=11, width=9, channels_out=48, epilogue=(BIAS,), extra=("channel",)
    )
    kinds = {(c["outputs"], c["fused"]): c for c in TEMPLATE.candidates(workload, HOST)}
    assert {outputs for outputs, _ in kinds} == set(POINTS)
    assert {fused for _, fused in kinds} == {0, 1}
    for candidate in kinds.values():
        check(workload, candidate, lambda result, inputs: result + inputs[2])


def test_threads_compute_the_same():
    two = CpuTarget.detect(num_threads=2)
    workload = convolution(channels_in=64, height=28, width=28, channels_out=64)
    for fused in (0, 1):
        candidate = next(c for c in TEMPLATE.candidates(workload, two) if c["fused"] == fused)
        assert "T.parallel" in TEMPLATE.prim_func(workload, candidate, two).script()
        check(workload, candidate, target=two)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize(
    ("steps", "extra", "expected"),
    [
        ((BIAS, Step("relu", (Operand("value", 1),))), ("channel",), lambda r, i: np.maximum(r + i[2], 0)),
        (
            (BIAS, Step("add", (Operand("value", 1), Operand("input", 3))), Step("relu", (Operand("value", 2),))),
            ("channel", "full"),
            lambda r, i: np.maximum(r + i[2] + i[3], 0),
        ),
        ((Step("silu", (VALUE,)),), (), lambda r, _: r / (1 + np.exp(-r))),
        ((Step("subtract", (Operand("input", 2), VALUE)),), ("full",), lambda r, i: i[2] - r),
    ],
)
def test_epilogues(size, steps, extra, expected):
    check(convolution(height=size, width=size, epilogue=steps, extra=extra), expected=expected)


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("size", [4, 7, 14, 56])
@pytest.mark.parametrize("channels", [(16, 16), (64, 64), (40, 72), (192, 1280)])
def test_candidates_fit_the_registers(target, size, channels):
    workload = convolution(1, channels[0], size, size, channels[1], block=target.lanes)
    candidates = TEMPLATE.candidates(workload, target)
    assert 1 <= len(candidates) == len(set(candidates)) <= MAX_CANDIDATES
    for candidate in candidates:
        assert candidate["blocks"] * (candidate["tile_rows"] + 1) + 1 <= target.num_vector_registers
        assert workload.output.shape[1] % candidate["blocks"] == 0


def test_it_takes_what_it_can_do_only():
    workload = convolution()
    assert TEMPLATE.matches(workload, HOST)
    for name, value in (("strides", (2, 2)), ("dilation", (2, 2)), ("groups", 2), ("weights", ())):
        assert not TEMPLATE.matches(with_attribute(workload, name, value), HOST)
    five = replace(workload, inputs=(workload.inputs[0], TensorType((32, 16, 5, 5), "float32")))
    few = replace(workload, inputs=(workload.inputs[0], TensorType((32, 3, 3, 3), "float32")))
    assert not TEMPLATE.matches(five, HOST)
    assert not TEMPLATE.matches(few, HOST)


def test_weights_are_transformed_at_load():
    workload = convolution(channels_in=32, channels_out=64)
    for candidate in TEMPLATE.candidates(workload, HOST):
        points = (candidate["outputs"] + 2) ** 2
        packed = kernel_inputs(TEMPLATE, workload, candidate, HOST)[1]
        assert packed.num_elements == 64 * 32 * points


@pytest.mark.parametrize(
    ("target", "pattern"),
    [(AVX512, r"vfmadd\w+ps.*%zmm"), (AVX2, r"vfmadd\w+ps.*%ymm"), (NEON, r"fmla\s+v\d+\.4s")],
    ids=["avx512", "avx2", "neon"],
)
def test_code_has_the_vectors_of_its_architecture(target, pattern):
    workload = convolution(block=target.lanes)
    candidate = TEMPLATE.candidates(workload, target)[0]
    found = re.findall(pattern, TEMPLATE.build(workload, candidate, target).assembly)
    assert len(found) >= candidate["blocks"] * candidate["tile_rows"]
