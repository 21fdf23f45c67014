"""The convolution template against float64, its candidates against the machine, its code against the architecture."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.compiler.build import BuildFailed
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.cpu.conv2d import MAX_CANDIDATES, BlockedConvolution, sizes_of
from hone.compiler.templates.packing import Packer
from hone.compiler.templates.registry import TEMPLATES, template_named, templates_for
from hone.compiler.workload import Operand, Step, TensorType, Workload

TEMPLATE = BlockedConvolution()
HOST = CpuTarget.detect(num_threads=1)

AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
AVX512 = CpuTarget.of_features("skylake-avx512", ("avx2", "fma", "avx512f"))
NEON = CpuTarget.of_features("generic", ("neon",), triple="aarch64-linux-gnu")

ADD_BIAS = (Step("add", (Operand("value", 0), Operand("input", 2))),)
VALUE = Operand("value", 0)


def convolution(
    batch=1, channels_in=16, size=8, channels_out=32, kernel=3, stride=1, pad=1, dilation=1, epilogue=(), extra=(),
    target=HOST,
) -> Workload:  # fmt: skip
    blocks = TEMPLATE.blocks(channels_in, channels_out, target)
    assert blocks is not None
    block_in, block_out = blocks
    out = (size + 2 * pad - (kernel - 1) * dilation - 1) // stride + 1
    data = (batch, channels_in // block_in, size, size, block_in) if block_in else (batch, channels_in, size, size)
    weight = (channels_out, channels_in, kernel, kernel)
    output = (batch, channels_out // block_out, out, out, block_out)
    inputs = [TensorType(data, "float32"), TensorType(weight, "float32")]
    for kind in extra:
        shape = (1, output[1], 1, 1, block_out) if kind == "channel" else output
        inputs.append(TensorType(shape, "float32"))
    return Workload(
        op="conv2d",
        inputs=tuple(inputs),
        output=TensorType(output, "float32"),
        attributes=(
            ("dilation", (dilation, dilation)),
            ("groups", 1),
            ("padding", (pad, pad, pad, pad)),
            ("strides", (stride, stride)),
            ("weights", (1,)),
        ),
        epilogue=tuple(epilogue),
    )


def tensors_of(workload: Workload, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in workload.inputs]


def reference(workload: Workload, inputs) -> np.ndarray:
    """Plain loops over the kernel's window, in float64, in the same layouts."""
    data, weight = (array.astype(np.float64) for array in inputs[:2])
    sizes = sizes_of(workload)
    if data.ndim == 5:
        data = data.transpose(0, 1, 4, 2, 3).reshape(sizes.batch, -1, sizes.height, sizes.width)
    top, left, bottom, right = sizes.padding
    data = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    out = np.zeros((sizes.batch, weight.shape[0], sizes.out_h, sizes.out_w))
    for y in range(sizes.kernel_h):
        for x in range(sizes.kernel_w):
            rows = slice(y * sizes.dilation[0], y * sizes.dilation[0] + (sizes.out_h - 1) * sizes.strides[0] + 1)
            columns = slice(x * sizes.dilation[1], x * sizes.dilation[1] + (sizes.out_w - 1) * sizes.strides[1] + 1)
            window = data[:, :, rows, columns][:, :, :: sizes.strides[0], :: sizes.strides[1]]
            out += np.einsum("nihw,oi->nohw", window, weight[:, :, y, x])
    return out.reshape(sizes.batch, sizes.blocks_out, sizes.block_out, sizes.out_h, sizes.out_w).transpose(
        0, 1, 3, 4, 2
    )


def run(workload: Workload, inputs, candidate: Candidate | None = None) -> np.ndarray:
    candidate = candidate or TEMPLATE.candidates(workload, HOST)[0]
    kernel = TEMPLATE.build(workload, candidate, HOST)
    packed = Packer(workload, inputs).pack(TEMPLATE, candidate, HOST)
    out = tvm.runtime.tensor(np.full(workload.output.shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in packed), out)
    return out.numpy()


def check(workload: Workload, expected, candidate: Candidate | None = None, seed=0) -> None:
    inputs = tensors_of(workload, seed)
    got = run(workload, inputs, candidate)
    want = expected(reference(workload, inputs), inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def plain(result, _):
    return result


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 3),
    channels_in=st.sampled_from([1, 3, 5, 16, 24, 32]),
    channels_out=st.sampled_from([16, 24, 48]),
    size=st.integers(5, 17),
    kernel=st.sampled_from([1, 2, 3, 5]),
    stride=st.integers(1, 3),
    pad=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_any_size(batch, channels_in, channels_out, size, kernel, stride, pad, dilation):
    if (kernel - 1) * dilation + 1 > size + 2 * pad:
        return
    check(convolution(batch, channels_in, size, channels_out, kernel, stride, pad, dilation), plain)


def test_every_candidate_of_a_workload_computes_the_same():
    workload = convolution(channels_in=16, size=8, channels_out=64)
    candidates = TEMPLATE.candidates(workload, HOST)
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates[::4]:
        check(workload, plain, candidate)


def test_padding_that_is_not_the_same_on_all_sides():
    workload = convolution(size=8)
    uneven = (("dilation", (1, 1)), ("groups", 1), ("padding", (0, 1, 2, 0)), ("strides", (1, 1)))
    output = TensorType((1, workload.output.shape[1], 8, 7, workload.output.shape[4]), "float32")
    check(Workload("conv2d", workload.inputs, output, uneven), plain)


@pytest.mark.parametrize(
    ("steps", "extra", "expected"),
    [
        (ADD_BIAS, ("channel",), lambda r, i: r + i[2]),
        ((*ADD_BIAS, Step("relu", (Operand("value", 1),))), ("channel",), lambda r, i: np.maximum(r + i[2], 0)),
        (
            (
                *ADD_BIAS,
                Step("add", (Operand("value", 1), Operand("input", 3))),
                Step("relu", (Operand("value", 2),)),
            ),
            ("channel", "full"),
            lambda r, i: np.maximum(r + i[2] + i[3], 0),
        ),
        (
            (Step("subtract", (Operand("input", 2), VALUE)),),
            ("full",),
            lambda r, i: i[2] - r,
        ),
        (
            # hard swish: a value that is used twice
            (
                Step("add", (VALUE, Operand("constant", constant=3.0))),
                Step(
                    "clip",
                    (Operand("value", 1), Operand("constant", constant=0.0), Operand("constant", constant=6.0)),
                ),
                Step("multiply", (VALUE, Operand("value", 2))),
                Step("divide", (Operand("value", 3), Operand("constant", constant=6.0))),
            ),
            (),
            lambda r, _: r * np.clip(r + 3, 0, 6) / 6,
        ),
        (
            (Step("leakyrelu", (VALUE, Operand("constant", constant=0.1))),),
            (),
            lambda r, _: np.where(r > 0, r, 0.1 * r),
        ),
        ((Step("silu", (VALUE,)),), (), lambda r, _: r / (1 + np.exp(-r))),
        ((Step("sigmoid", (VALUE,)),), (), lambda r, _: 1 / (1 + np.exp(-r))),
        ((Step("tanh", (VALUE,)),), (), lambda r, _: np.tanh(r)),
        ((Step("relu6", (VALUE,)),), (), lambda r, _: np.clip(r, 0, 6)),
        ((Step("abs", (VALUE,)), Step("sqrt", (Operand("value", 1),))), (), lambda r, _: np.sqrt(np.abs(r))),
        ((Step("negative", (VALUE,)),), (), lambda r, _: -r),
    ],
)  # fmt: skip
def test_epilogues(steps, extra, expected):
    check(convolution(epilogue=steps, extra=extra), expected)


def test_gelu_epilogue():
    from math import erf

    gelu = np.vectorize(lambda v: 0.5 * v * (1 + erf(v / np.sqrt(2))))
    check(convolution(channels_in=3, size=5, channels_out=16, epilogue=(Step("gelu", (VALUE,)),)), lambda r, _: gelu(r))


@pytest.mark.parametrize("target", [HOST, AVX2, AVX512, NEON], ids=["host", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("size", [4, 7, 13, 14, 28, 56])
@pytest.mark.parametrize("channels", [(3, 64), (16, 16), (64, 64), (24, 40)])
def test_candidates_fit_the_registers(target, size, channels):
    workload = convolution(1, channels[0], size, channels[1], 3, 1, 1, target=target)
    candidates = TEMPLATE.candidates(workload, target)
    assert 1 <= len(candidates) <= MAX_CANDIDATES
    for candidate in candidates:
        vectors = max(1, workload.output.shape[4] // target.lanes) * candidate["blocks"]
        used = vectors * candidate["rows"] * candidate["columns"] + vectors + 1
        assert used <= target.num_vector_registers
        assert size % candidate["rows"] == 0 and size % candidate["columns"] == 0


def test_it_is_asked_for_what_it_can_do_only():
    workload = convolution()
    assert TEMPLATE.name in [template.name for template in templates_for(workload, HOST)]
    grouped = Workload(
        "conv2d",
        workload.inputs,
        workload.output,
        tuple((name, 2 if name == "groups" else value) for name, value in workload.attributes),
    )
    half = Workload(
        "conv2d",
        tuple(TensorType(tensor.shape, "float16") for tensor in workload.inputs),
        TensorType(workload.output.shape, "float16"),
        workload.attributes,
    )
    for other in (grouped, half, Workload("pool", workload.inputs, workload.output, workload.attributes)):
        assert not TEMPLATE.matches(other, HOST)
    assert TEMPLATE.blocks(16, 17, HOST) is None


def test_an_impossible_candidate_is_a_failure_and_no_accident():
    workload = convolution(size=8)
    with pytest.raises(BuildFailed):
        TEMPLATE.build(workload, Candidate.of(TEMPLATE.name, blocks=1, rows=1, columns=0, kernel_innermost=0), HOST)


def test_large_work_is_parallel_and_small_work_is_not():
    many = CpuTarget.of_features("haswell", ("avx2", "fma"), num_threads=4)
    candidate = Candidate.of(TEMPLATE.name, blocks=1, rows=1, columns=4, kernel_innermost=0)
    large = convolution(1, 64, 56, 64, target=many)
    small = convolution(1, 8, 8, 16, target=many)
    assert "T.parallel" in TEMPLATE.prim_func(large, candidate, many).script()
    assert "T.parallel" not in TEMPLATE.prim_func(small, candidate, many).script()
    one = CpuTarget.of_features("haswell", ("avx2", "fma"), num_threads=1)
    assert "T.parallel" not in TEMPLATE.prim_func(large, candidate, one).script()


@pytest.mark.parametrize(
    ("target", "pattern"),
    [(AVX512, r"vfmadd\w+ps.*%zmm"), (AVX2, r"vfmadd\w+ps.*%ymm"), (NEON, r"fmla\s+v\d+\.4s")],
    ids=["avx512", "avx2", "neon"],
)
def test_code_has_the_vectors_of_its_architecture(target, pattern):
    workload = convolution(channels_in=16, size=8, channels_out=16, target=target)
    kernel = TEMPLATE.build(workload, TEMPLATE.candidates(workload, target)[0], target)
    assert len(re.findall(pattern, kernel.assembly)) >= 4


def test_digests_name_everything_that_changes_the_library():
    workload = convolution()
    candidate, other = TEMPLATE.candidates(workload, HOST)[:2]
    digest = TEMPLATE.digest(workload, candidate, HOST)
    assert digest == TEMPLATE.digest(workload, candidate, HOST)
    fewer = CpuTarget.of_features("haswell", ("avx2",))
    others = [
        TEMPLATE.digest(workload, other, HOST),
        TEMPLATE.digest(convolution(stride=2), candidate, HOST),
        TEMPLATE.digest(convolution(epilogue=(Step("relu", (VALUE,)),)), candidate, HOST),
        TEMPLATE.digest(workload, candidate, fewer),
        TEMPLATE.digest(workload, candidate, CpuTarget.detect(num_threads=2)),
    ]
    assert len({digest, *others}) == 6
    assert TEMPLATE.build(workload, candidate, HOST).name == KERNEL_PREFIX + digest


def test_workloads_and_candidates_survive_json():
    workload = convolution(epilogue=ADD_BIAS, extra=("channel",))
    assert Workload.from_fields(workload.fields()) == workload
    assert Workload.from_fields(workload.fields()).digest == workload.digest
    candidate = TEMPLATE.candidates(workload, HOST)[0]
    assert Candidate.from_fields(candidate.fields()) == candidate


def test_templates_have_names_of_their_own():
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)
    for template in TEMPLATES:
        assert template_named(template.name) is template
    assert template_named("none") is None
