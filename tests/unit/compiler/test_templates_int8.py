"""The int8 kernels against exact integers: sums have no rounding, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp.dot import MAX_CANDIDATES
from hone.compiler.templates.cpp.int8 import FEATURES, Int8Convolution, Int8Matmul
from hone.compiler.workload import Operand, Step, TensorType
from tests.unit.compiler.dot_workloads import ADD, VALUE, convolution, matmul, run

HOST = CpuTarget.detect(num_threads=1)
TWO_THREADS = CpuTarget.of_features(HOST.mcpu, HOST.features, num_threads=2)
AVX512 = CpuTarget.of_features("cascadelake", FEATURES)
MATMUL, CONVOLUTION = Int8Matmul(), Int8Convolution()
SCALE = 0.03

pytestmark = pytest.mark.usefixtures("precompiled_headers")
runs_here = pytest.mark.skipif(not set(FEATURES) <= set(HOST.features), reason="this CPU has no AVX-512 VNNI")
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def quantized(workload, low, *, per_channel):
    """The workload with int8 weights; the scales come behind the other inputs."""
    data, weight, *others = workload.inputs
    outputs = weight.shape[0] if len(weight.shape) == 4 else weight.shape[1]
    scales = [TensorType((outputs,), "float32")] if per_channel else []
    told = {"w_scale_at": 2 + len(others)} if per_channel else {"w_scale": 0.01}
    attributes = {**dict(workload.attributes), "precision": "int8", "x_scale": SCALE, "x_low": low, **told}
    inputs = (data, TensorType(weight.shape, "int8"), *others, *scales)
    return replace(workload, inputs=inputs, attributes=tuple(sorted(attributes.items())))


def template_of(workload):
    return MATMUL if workload.op == "matmul" else CONVOLUTION


def check(workload, after=lambda result, _: result, which=0, target=HOST):
    rng = np.random.default_rng(0)
    attributes = dict(workload.attributes)
    low = attributes["x_low"]
    whole = rng.integers(low, low + 256, workload.inputs[0].shape)
    x = (whole * np.float32(SCALE)).astype(np.float32)
    weight = rng.integers(-128, 128, workload.inputs[1].shape).astype(np.int8)
    others = [rng.uniform(0.005, 0.02, tensor.shape).astype(np.float32) for tensor in workload.inputs[2:]]
    inputs = [x, weight, *others]
    candidates = template_of(workload).candidates(workload, target)
    got = run(template_of(workload), workload, inputs, candidates[which % len(candidates)], target)
    sums = exact(workload, whole, weight)
    at = attributes.get("w_scale_at")
    scales = np.float64(0.01) if at is None else inputs[at].astype(np.float64)
    if at is not None and workload.op == "conv2d":
        scales = scales.reshape(1, workload.output.shape[1], 1, 1, -1)
    want = after(sums * np.float64(np.float32(SCALE)) * scales, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def exact(workload, whole, weight):
    """The integer sums. Numbers this small are exact in bfloat16 too, which `products` rounds to."""
    from tests.unit.compiler.dot_workloads import products

    return products(workload, [whole.astype(np.float32), weight.astype(np.float32)])


@runs_here
@QUICK
@given(
    rows=st.sampled_from([(1,), (13,), (2, 5), (40,)]),
    depth=st.sampled_from([1, 2, 3, 7, 16, 33, 100]),
    columns=st.sampled_from([1, 10, 16, 17, 48, 200]),
    low=st.sampled_from([0, -128, -255, -7]),
    per_channel=st.booleans(),
    which=st.integers(0, MAX_CANDIDATES - 1),
)
def test_matrix_products_of_any_size(rows, depth, columns, low, per_channel, which):
    check(quantized(matmul(rows, depth, columns), low, per_channel=per_channel), which=which)


@runs_here
@QUICK
@given(
    batch=st.integers(1, 2),
    channels_in=st.sampled_from([8, 16, 24, 48]),
    channels_out=st.sampled_from([8, 16, 24, 40, 64]),
    size=st.tuples(st.integers(4, 12), st.integers(4, 17)),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 3), (1, 7)]),
    strides=st.sampled_from([(1, 1), (2, 2), (3, 1)]),
    padding=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 3)]),
    low=st.sampled_from([0, -128, -100]),
    plain=st.booleans(),
    per_channel=st.booleans(),
    which=st.integers(0, MAX_CANDIDATES - 1),
)
def test_convolutions_of_any_size(
    batch, channels_in, channels_out, size, kernel, strides, padding, low, plain, per_channel, which
):
    assume(kernel[0] <= size[0] and kernel[1] <= size[1])
    width_in = 0 if plain else 16 if channels_in % 16 == 0 else 8
    workload = convolution(
        batch, channels_in + (3 if plain else 0), size, channels_out, kernel, strides, padding,
        width_in=width_in, width=16 if channels_out % 16 == 0 else 8,
    )  # fmt: skip
    check(quantized(workload, low, per_channel=per_channel), which=which)


@runs_here
@pytest.mark.parametrize("split", [0, 1])
def test_threads_share_the_work(split):
    workload = quantized(convolution(2, 64, (28, 28), 96), -128, per_channel=True)
    candidates = CONVOLUTION.candidates(workload, TWO_THREADS)
    which = next(at for at, candidate in enumerate(candidates) if candidate["split"] == split)
    check(workload, which=which, target=TWO_THREADS)


@runs_here
def test_an_epilogue_that_rounds_to_the_next_layers_scale():
    steps = (
        ADD,
        Step("relu", (Operand("value", 1),)),
        Step("divide", (Operand("value", 2), Operand("constant", constant=0.25))),
        Step("round", (Operand("value", 3),)),
        Step("clip", (Operand("value", 4), Operand("constant", constant=0.0), Operand("constant", constant=255.0))),
        Step("multiply", (Operand("value", 5), Operand("constant", constant=0.25))),
    )

    def after(result, inputs):
        return np.clip(np.rint(np.maximum(result + inputs[2], 0) / 0.25), 0, 255) * 0.25

    check(quantized(matmul((6,), 40, 33, steps, ((33,),)), -128, per_channel=True), after)


@runs_here
def test_data_that_is_no_multiple_is_rounded_and_saturated():
    workload = quantized(matmul((4,), 4, 16), -128, per_channel=False)
    x = np.array([[1e9], [-1e9], [0.4 * SCALE], [2.6 * SCALE]], np.float32).repeat(4, axis=1)
    got = run(MATMUL, workload, [x, np.ones((4, 16), np.int8)])
    np.testing.assert_allclose(got[:, 0], np.array([127, -128, 0, 3]) * 4 * SCALE * 0.01, rtol=1e-5)


@pytest.mark.parametrize(
    "workload",
    [matmul((1,), 768, 1000), matmul((7,), 10, 3), convolution(1, 64, (56, 56), 64), convolution(1, 512, (7, 7), 512)],
    ids=str,
)
def test_candidates_fit_the_registers(workload):
    workload = quantized(workload, -128, per_channel=True)
    assert template_of(workload).matches(workload, AVX512)
    candidates = template_of(workload).candidates(workload, AVX512)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    for candidate in candidates:
        sums = candidate["rows"] * candidate["columns"] * candidate["vectors"]
        assert sums + candidate["vectors"] + 1 <= AVX512.num_vector_registers


def test_code_multiplies_four_at_a_time():
    workload = quantized(convolution(1, 64, (56, 56), 64), -128, per_channel=True)
    code = CONVOLUTION.build(workload, CONVOLUTION.candidates(workload, AVX512)[0], AVX512).assembly
    assert code.count("vpdpbusd") >= 24
    assert "bf16" not in code


def test_what_is_not_its_kind_is_left_alone():
    good = quantized(matmul((4,), 8, 16), -128, per_channel=True)
    assert MATMUL.matches(good, AVX512)
    assert not MATMUL.matches(good, CpuTarget.of_features("skylake-avx512", FEATURES[:4]))
    assert not MATMUL.matches(replace(good, inputs=(*good.inputs[:2], TensorType((8,), "float32"))), AVX512)
    assert not MATMUL.matches(quantized(matmul((4,), 8, 16), 3, per_channel=False), AVX512)
    assert not MATMUL.matches(matmul((4,), 8, 16, (Step("relu", (VALUE,)),)), AVX512)
    padded = quantized(convolution(1, 16, (4, 4), 40), -128, per_channel=True)
    assert not CONVOLUTION.matches(padded, AVX512)
