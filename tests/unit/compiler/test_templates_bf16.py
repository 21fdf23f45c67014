"""The bfloat16 kernels against float64 of the same rounded operands: what differs is the order of sums alone."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hone.compiler.build import BuildFailed
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpp.bf16 import (
    AMX_FEATURES,
    FEATURES,
    MAX_CANDIDATES,
    Bf16Convolution,
    Bf16Matmul,
    missing_features,
)
from hone.compiler.workload import Operand, Step
from tests.unit.compiler.dot_workloads import ADD, VALUE, arrays_of, convolution, matmul, products, run, tensor_of

HOST = CpuTarget.detect(num_threads=1)
TWO_THREADS = CpuTarget.of_features(HOST.mcpu, HOST.features, num_threads=2)
AVX512 = CpuTarget.of_features("cooperlake", FEATURES)
AMX = CpuTarget.of_features("sapphirerapids", (*FEATURES, *AMX_FEATURES), num_threads=2)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
MATMUL, CONVOLUTION = Bf16Matmul(), Bf16Convolution()

pytestmark = pytest.mark.usefixtures("precompiled_headers")
runs_here = pytest.mark.skipif(bool(missing_features(HOST)), reason=f"this CPU has no {missing_features(HOST)}")
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def template_of(workload):
    return MATMUL if workload.op == "matmul" else CONVOLUTION


def check(workload, after=lambda result, inputs: result, candidate=None, target=HOST):
    inputs = arrays_of(workload)
    got = run(template_of(workload), workload, inputs, candidate, target)
    want = after(products(workload, inputs), [array.astype(np.float64) for array in inputs])
    rounding = 2**-8 if workload.output.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(got, want, rtol=rounding, atol=2e-5 * max(1.0, np.abs(want).max()))


@runs_here
@QUICK
@given(
    rows=st.sampled_from([(1,), (3,), (13,), (2, 5), (2, 3, 4), (40,)]),
    depth=st.sampled_from([1, 2, 7, 16, 31, 33, 100]),
    columns=st.sampled_from([1, 7, 10, 16, 17, 48, 100, 200]),
    x=st.sampled_from(["float32", "bfloat16"]),
    out=st.sampled_from(["float32", "bfloat16"]),
    which=st.integers(0, MAX_CANDIDATES - 1),
)
def test_matrix_products_of_any_size(rows, depth, columns, x, out, which):
    workload = matmul(rows, depth, columns, x=x, out=out)
    candidates = MATMUL.candidates(workload, HOST)
    check(workload, candidate=candidates[which % len(candidates)])


@runs_here
@QUICK
@given(
    batch=st.integers(1, 2),
    channels_in=st.sampled_from([8, 16, 24, 48]),
    channels_out=st.sampled_from([8, 16, 24, 40, 64]),
    size=st.tuples(st.integers(4, 12), st.integers(4, 17)),
    kernel=st.sampled_from([(1, 1), (3, 3), (2, 2), (5, 3), (1, 7)]),
    strides=st.sampled_from([(1, 1), (2, 2), (1, 2), (3, 1)]),
    padding=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 3)]),
    dilation=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    x=st.sampled_from(["float32", "bfloat16"]),
    out=st.sampled_from(["float32", "bfloat16"]),
    plain=st.booleans(),
    which=st.integers(0, MAX_CANDIDATES - 1),
)
def test_convolutions_of_any_size(
    batch, channels_in, channels_out, size, kernel, strides, padding, dilation, x, out, plain, which
):
    assume((kernel[0] - 1) * dilation[0] < size[0] and (kernel[1] - 1) * dilation[1] < size[1])
    width_in = 0 if plain else 16 if channels_in % 16 == 0 else 8
    workload = convolution(
        batch, channels_in + (3 if plain else 0), size, channels_out, kernel, strides, padding, dilation,
        width_in=width_in, width=16 if channels_out % 16 == 0 else 8, x="float32" if plain else x, out=out,
    )  # fmt: skip
    candidates = CONVOLUTION.candidates(workload, HOST)
    check(workload, candidate=candidates[which % len(candidates)])


@pytest.mark.parametrize(("workload", "split"), [(matmul((1,), 2048, 1000), 1), (convolution(1, 64, (56, 56), 16), 0)])
def test_no_candidate_leaves_a_thread_without_work(workload, split):
    """On a busy machine it would look as fast as one that shares the work."""
    candidates = template_of(workload).candidates(workload, TWO_THREADS)
    assert {candidate["split"] for candidate in candidates} == {split}


@runs_here
@pytest.mark.parametrize("split", [0, 1], ids=["rows", "channels"])
@pytest.mark.parametrize(
    "workload",
    [
        matmul((200,), 300, 400, (ADD,), ((400,),)),
        matmul((1,), 2048, 1000),
        convolution(2, 64, (28, 28), 96),
        convolution(1, 256, (14, 14), 128, (1, 1), padding=(0, 0, 0, 0)),
        convolution(1, 3, (64, 64), 32, (7, 7), (2, 2), (3, 3, 3, 3), width_in=0),
    ],
    ids=str,
)
def test_threads_share_the_work(workload, split):
    candidates = [c for c in template_of(workload).candidates(workload, TWO_THREADS) if c["split"] == split]
    if not candidates:
        assert split == 0, f"no candidate shares {workload} by channels"
        assert workload.output.shape[:-1] == (1,), f"no candidate shares {workload} by rows"
        return  # one row: a thread would have nothing to do
    bias = bool(workload.epilogue)
    after = (lambda result, inputs: result + inputs[2]) if bias else (lambda result, _: result)
    check(workload, after, candidate=candidates[0], target=TWO_THREADS)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf)
UNARY = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "erf": erf,
    "exp": np.exp,
    "abs": np.abs,
    "negative": np.negative,
}


@runs_here
@pytest.mark.parametrize("op", UNARY)
def test_activations(op):
    check(matmul((6,), 5, 40, (Step(op, (VALUE,)),)), lambda result, _: UNARY[op](result))


@runs_here
def test_activations_of_what_is_no_number():
    """NaN and infinities in, the operator's answer out."""
    for op, function in UNARY.items():
        workload = matmul((4,), 1, 16, (Step(op, (VALUE,)),))
        inputs = [np.array([[np.nan], [np.inf], [-np.inf], [0.0]], np.float32), np.ones((1, 16), np.float32)]
        with np.errstate(all="ignore"):
            want = function(np.repeat(inputs[0].astype(np.float64), 16, axis=1))
        got = run(MATMUL, workload, inputs)
        if op == "silu":  # -inf times 0
            want[2] = got[2]
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=op)


@runs_here
@pytest.mark.parametrize(
    ("step", "extra", "expected"),
    [
        (ADD, "channel", lambda r, i: r + i[2]),
        (ADD, "image_channel", lambda r, i: r + i[2]),
        (Step("multiply", (VALUE, Operand("input", 2))), "channel", lambda r, i: r * i[2]),
        (Step("subtract", (Operand("input", 2), VALUE)), "residual", lambda r, i: i[2] - r),
        (ADD, "bf16_residual", lambda r, i: r + i[2]),
        (Step("divide", (VALUE, Operand("input", 2))), "one", lambda r, i: r / i[2]),
        (Step("maximum", (VALUE, Operand("input", 2))), "residual", lambda r, i: np.maximum(r, i[2])),
        (Step("minimum", (VALUE, Operand("input", 2))), "residual", lambda r, i: np.minimum(r, i[2])),
    ],
)
@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("kernel", [1, 3])
def test_operands(step, extra, expected, width, kernel):
    padding = (kernel // 2,) * 4
    workload = convolution(2, 16, (5, 6), 3 * width, (kernel, kernel), padding=padding, width=width,
                           epilogue=(step,), extra=(extra,))  # fmt: skip
    check(workload, expected)


@runs_here
def test_steps_in_a_row():
    steps = (
        ADD,
        Step("leakyrelu", (Operand("value", 1), Operand("constant", constant=0.1))),
        Step("clip", (Operand("value", 2), Operand("constant", constant=-0.5), Operand("constant", constant=4.0))),
        Step("sqrt", (Operand("constant", constant=2.25),)),
        Step("multiply", (Operand("value", 3), Operand("value", 4))),
        Step("add", (Operand("value", 5), Operand("input", 3))),
    )

    def expected(result, inputs):
        biased = result + inputs[2]
        return np.clip(np.where(biased > 0, biased, 0.1 * biased), -0.5, 4.0) * 1.5 + inputs[3]

    check(matmul((2, 3), 20, 33, steps, ((33,), (2, 3, 33))), expected)


@runs_here
@pytest.mark.parametrize("shape", [(5, 20), (1, 5, 20), (2, 1, 1), (2, 5, 1), (1,)])
def test_operands_of_a_product_broadcast(shape):
    check(matmul((2, 5), 8, 20, (ADD,), (shape,)), lambda result, inputs: result + inputs[2])


def test_an_operand_that_goes_by_no_rule_is_not_taken():
    assert not MATMUL.matches(matmul((2, 3, 4), 8, 16, (ADD,), ((2, 1, 4, 16),)), AVX512)
    assert MATMUL.matches(matmul((2, 3, 4), 8, 16, (ADD,), ((4, 16),)), AVX512)


def test_channels_that_were_padded_to_whole_blocks():
    workload = convolution(1, 20, (4, 4), 40, width_in=16, width=16)
    assert workload.output.shape[1] == 3
    if missing_features(HOST):
        pytest.skip(f"this CPU has no {missing_features(HOST)}")
    check(workload)


@pytest.mark.parametrize("target", [AVX512, AMX], ids=["avx512", "amx"])
@pytest.mark.parametrize(
    "workload",
    [
        matmul((1,), 768, 1000),
        matmul((7,), 10, 3),
        matmul((128,), 768, 3072),
        convolution(1, 64, (56, 56), 64),
        convolution(1, 512, (7, 7), 512),
        convolution(1, 3, (224, 224), 64, (7, 7), (2, 2), (3, 3, 3, 3), width_in=0),
    ],
    ids=str,
)
def test_candidates_fit_the_registers(workload, target):
    candidates = template_of(workload).candidates(workload, target)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates:
        if not dict(candidate.parameters).get("amx"):
            tile = candidate["rows"] * candidate["columns"] * candidate["vectors"]
            assert tile + candidate["vectors"] + 1 <= target.num_vector_registers


def test_code_multiplies_pairs_and_spills_nothing():
    workload = convolution(1, 64, (56, 56), 64)
    kernel = CONVOLUTION.build(workload, CONVOLUTION.candidates(workload, AVX512)[0], AVX512)
    code = kernel.assembly
    assert code.count("vdpbf16ps") >= 28
    assert not [line for line in code.splitlines() if "vmovaps" in line and "(%rsp)" in line and "zmm" in line]


def test_code_for_amx_uses_its_tiles():
    workload = matmul((128,), 768, 768, (ADD,), ((768,),))
    candidates = [c for c in MATMUL.candidates(workload, AMX) if dict(c.parameters).get("amx")]
    assert candidates
    code = MATMUL.build(workload, candidates[0], AMX).assembly
    assert "tdpbf16ps" in code and "ldtilecfg" in code and "tilerelease" in code


@pytest.mark.skipif(not set(AMX_FEATURES) <= set(HOST.features), reason="this CPU has no AMX")
def test_amx_computes_the_same():
    for workload in (matmul((50,), 100, 70), convolution(1, 32, (9, 33), 48)):
        candidate = next(c for c in template_of(workload).candidates(workload, HOST) if dict(c.parameters).get("amx"))
        check(workload, candidate=candidate)


@pytest.mark.parametrize("target", [AVX2, CpuTarget.of_features("skylake-avx512", FEATURES[:4])])
def test_a_cpu_without_the_instruction_is_not_asked(target):
    assert not MATMUL.matches(matmul((4,), 8, 16), target)
    assert "avx512bf16" in missing_features(target)


def test_workloads_that_ask_for_float32_are_left_alone():
    workload = matmul((4,), 8, 16)
    for precision in ((), (("precision", "f32"),)):
        other = type(workload)("matmul", workload.inputs, workload.output, (*precision, ("weights", (1,))))
        assert not MATMUL.matches(other, AVX512)


@runs_here
def test_tensors_of_another_shape_or_type_are_refused():
    workload = matmul((4,), 8, 16)
    candidate = MATMUL.candidates(workload, HOST)[0]
    kernel = MATMUL.build(workload, candidate, HOST)
    x, out = np.zeros((4, 8), np.float32), np.zeros((4, 16), np.float32)
    packed = np.zeros(MATMUL.packing(workload, candidate, HOST)[1].result.shape, np.uint16)
    kernel(*map(tensor_of, (x, packed, out)))
    for wrong in ((x[:3], packed, out), (x.astype(np.float64), packed, out), (x, packed.astype(np.int16), out)):
        with pytest.raises(ValueError, match=r"argument [01] is no contiguous"):
            kernel(*map(tensor_of, wrong))
    with pytest.raises(ValueError, match="expected 3 tensors"):
        kernel(tensor_of(x), tensor_of(out))


def test_digests_follow_what_changes_the_library():
    workload = matmul((4,), 64, 64)
    first, second = MATMUL.candidates(workload, AVX512)[:2]
    digests = {
        MATMUL.digest(workload, first, AVX512),
        MATMUL.digest(workload, second, AVX512),
        MATMUL.digest(workload, first, AMX),
        MATMUL.digest(matmul((5,), 64, 64), first, AVX512),
    }
    assert len(digests) == 4
    assert MATMUL.digest(workload, first, AVX512) in digests


def test_without_a_compiler_building_fails_with_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    workload = matmul((4,), 8, 16)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler on PATH"):
        MATMUL.build(workload, Candidate.of(MATMUL.name, rows=1, columns=1, vectors=1, split=0, chunk=4), AVX512)
