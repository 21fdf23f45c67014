"""Host twins of the kernels against float64: sizes, strides, paddings, layouts, alignments, dtypes and every epilogue.

A twin shares with its kernel the sizes' and operands' code, the checks and the epilogue's functor, and differs in what
multiplies. Each twin serves all problems of its kind, so a few builds run many cases.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.conv2x import Conv2x
from hone.compiler.templates.cutlass.depthwise import DepthwiseConvolution
from hone.compiler.templates.cutlass.gemm2x import Gemm2x
from hone.compiler.templates.cutlass.kernel import Recipe
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.templates.packing import Packer, tensor_of
from hone.compiler.workload import TensorType
from hone.engines.tvm import aligned_empty
from tests.cutlass.workloads import (
    STEPS,
    Step,
    chain,
    constant,
    conv2d,
    matmul,
    numpy_dtype,
    operand,
    random_inputs,
    reference,
    tolerance,
    value,
)

TARGET = CudaTarget.preset("a100").as_twin()
GEMM, CONV, DEPTHWISE = Gemm2x(), Conv2x(), DepthwiseConvolution()


def run(cache, template, workload, arrays, target=TARGET):
    """What the twin gives; its inputs packed as a model's would be."""
    candidate = template.candidates(workload, target)[0]
    kernel = published_kernel(cache, template, workload, candidate, target)
    inputs = [aligned(array) for array in Packer(workload, arrays).pack(template, candidate, target)]
    workspace = aligned_empty((template.workspace_bytes(workload, candidate, target),), np.dtype(np.uint8))
    output = aligned_empty(workload.output.shape, numpy_dtype(workload.output.dtype))
    kernel(*(tensor_of(array) for array in (*inputs, workspace, output)))
    return output


def aligned(array):
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def check(cache, template, workload, seed=0, *, scale=1.0):
    arrays = [
        array if array.dtype.kind in "iu" else (array.astype(np.float32) * scale).astype(array.dtype)
        for array in random_inputs(workload, seed)
    ]
    found = run(cache, template, workload, arrays).astype(np.float64)
    expected = reference(workload, arrays)
    depth = workload.inputs[0].shape[-1] * (np.prod(workload.inputs[1].shape[1:3]) if workload.op == "conv2d" else 1)
    assert found.shape == expected.shape == workload.output.shape
    if workload.output.dtype == "int8":
        expected = np.clip(expected, -128, 127)
    allowed = tolerance(workload.output.dtype, depth, math_attribute=dict(workload.attributes).get("math"))
    np.testing.assert_allclose(found, expected, rtol=allowed / 8, atol=allowed)


BIAS_GELU_RESIDUAL = chain(("add", operand(2)), "gelu", ("add", operand(3)))


def bias_gelu_residual(a, b, shape, dtype="float16"):
    return matmul(a, b, dtype, epilogue=BIAS_GELU_RESIDUAL, extra=[((shape[-1],), "float32"), (shape, dtype)])


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (5, 24, 40), (33, 64, 16), (16, 16, 129), (7, 3, 5), (64, 10, 2)])
def test_product_with_bias_activation_and_residual(twin_cache, m, n, k):
    check(twin_cache, GEMM, bias_gelu_residual((m, k), (k, n), (m, n)), seed=m)


def test_leading_dimensions_are_rows_where_one_weight_serves_all(twin_cache):
    check(twin_cache, GEMM, bias_gelu_residual((2, 3, 4, 16), (16, 24), (2, 3, 4, 24)))


def test_batches_each_have_their_own_product_and_residual(twin_cache):
    check(twin_cache, GEMM, bias_gelu_residual((3, 2, 9, 16), (3, 2, 16, 8), (3, 2, 9, 8)))


@pytest.mark.parametrize("shape", [((4, 6, 20), (4, 12, 20)), ((11, 64), (16, 64))])
def test_transposed_second_operand_and_bfloat16(twin_cache, shape):
    a, b = shape
    check(twin_cache, GEMM, matmul(a, b, "bfloat16", epilogue=chain("silu"), transpose_b=True))


@pytest.mark.parametrize("seed", range(4))
def test_every_step(twin_cache, seed):
    """Each step once on the product itself, all summed up: one twin for the whole vocabulary."""
    steps = [Step("multiply", (value(0), constant(0.25)))]
    x = value(1)
    more = {
        "add": (operand(2),), "subtract": (operand(3),), "multiply": (operand(4),), "divide": (operand(5),),
        "maximum": (constant(0.25),), "minimum": (operand(2),), "leakyrelu": (constant(0.1),),
        "clip": (constant(-0.5), constant(0.75)),
    }  # fmt: skip
    results = []
    for step in STEPS:
        source = x
        if step in ("sqrt", "exp"):  # of what is positive, and of what does not outgrow the others
            steps.append(Step("sigmoid", (x,)))
            source = value(len(steps))
        steps.append(Step(step, (source, *more.get(step, ()))))
        results.append(value(len(steps)))
    total = results[0]
    for result in results[1:]:
        steps.append(Step("add", (total, result)))
        total = value(len(steps))
    m, n = (6, 10)
    # A bias over columns, a number for each row, one for all, a whole tensor.
    extra = [((n,), "float16"), ((m, 1), "float32"), ((1,), "float32"), ((m, n), "float32")]
    workload = matmul((m, 8), (8, n), "float32", epilogue=tuple(steps), extra=extra)
    arrays = random_inputs(workload, seed)
    arrays[5] = 1.5 + np.abs(arrays[5])
    found = run(twin_cache, GEMM, workload, arrays)
    np.testing.assert_allclose(found, reference(workload, arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "a, b, output",
    [
        ((33, 16), (16, 24), (24,)),
        ((2, 5, 16), (16, 24), (1, 1, 24)),
        ((2, 5, 16), (16, 24), (2, 1, 24)),
        ((3, 2, 9, 16), (3, 2, 16, 8), (3, 1, 1, 8)),
        ((3, 2, 9, 16), (3, 2, 16, 8), (3, 2, 8)),
    ],
)
def test_sums_of_rows(twin_cache, a, b, output):
    """The last step may add up rows: all, or those of each item of the first dimensions."""
    epilogue = chain(("add", operand(2)), "relu", "column_sum")
    extra = [((b[-1],), "float16")]
    workload = matmul(a, b, output=output, epilogue=epilogue, extra=extra, out_dtype="float32")
    check(twin_cache, GEMM, workload)


@pytest.mark.parametrize("output", [(2, 24), (2, 1, 1, 24), (1, 1, 1, 24)])
def test_convolution_with_global_pooling(twin_cache, output):
    given = {"padding": (1, 1, 1, 0), "epilogue": chain("relu", "column_sum"), "out_dtype": "float32"}
    workload = replace(conv2d((2, 7, 6, 16), (24, 3, 3, 16), **given), output=TensorType(output, "float32"))
    check(twin_cache, CONV, workload)


def test_nan_and_infinity_pass_through_activations(twin_cache):
    workload = matmul((4, 8), (8, 8), "float32", epilogue=chain("relu", ("clip", constant(-1.0), constant(6.0))))
    arrays = random_inputs(workload)
    arrays[0][0, :], arrays[0][1, :], arrays[0][2, :] = np.nan, np.inf, 0.0
    arrays[1][:] = np.abs(arrays[1])
    found = run(twin_cache, GEMM, workload, arrays)
    assert np.isnan(found[0]).all()
    assert (found[1] == 6.0).all()
    assert (found[2] == 0.0).all()


def test_tf32_rounds_its_inputs_and_strict_float32_does_not(twin_cache):
    strict, rounded = matmul((32, 64), (64, 32), "float32"), matmul((32, 64), (64, 32), "float32", math="tf32")
    check(twin_cache, GEMM, strict)
    check(twin_cache, GEMM, rounded)
    arrays = random_inputs(strict)
    assert np.abs(run(twin_cache, GEMM, rounded, arrays) - reference(strict, arrays)).max() > 1e-4


def test_integers_are_summed_exactly(twin_cache):
    workload = matmul((9, 80), (80, 32), "int8", out_dtype="int32")
    arrays = random_inputs(workload)
    found = run(twin_cache, GEMM, workload, arrays)
    assert found.dtype == np.int32
    assert (found == reference(workload, arrays)).all()


def test_integers_are_requantised_by_a_scale_for_each_column(twin_cache):
    """Products, scales, bias, rounding to even and saturation: what a quantised layer does."""
    epilogue = chain(("multiply", operand(2)), ("add", operand(3)), "round", "cast")
    extra = [((16,), "float32"), ((16,), "float32")]
    workload = matmul((5, 32), (32, 16), "int8", out_dtype="int8", epilogue=epilogue, extra=extra)
    arrays = random_inputs(workload)
    arrays[2] = np.abs(arrays[2]) * np.float32(2e-3)
    expected = np.clip(reference(workload, arrays), -128, 127)
    assert np.abs(expected).max() == 128
    found = run(twin_cache, GEMM, workload, arrays)
    assert np.abs(found.astype(np.float64) - expected).max() <= 1
    assert (found == expected).mean() > 0.98  # but for what float32 puts on the other side of a half


CONVOLUTIONS = [
    ((2, 9, 8, 16), (24, 3, 3, 16)),
    ((1, 5, 5, 3), (8, 3, 3, 3)),
    ((3, 6, 7, 10), (5, 1, 1, 10)),
    ((1, 12, 11, 8), (16, 5, 2, 8)),
]


@pytest.mark.parametrize("data, weight", CONVOLUTIONS)
@pytest.mark.parametrize(
    "strides, padding, dilation",
    [((1, 1), (1, 1, 1, 1), (1, 1)), ((2, 1), (2, 0, 1, 1), (1, 1)), ((1, 1), (2, 2, 2, 2), (2, 1))],
)
def test_convolution(twin_cache, data, weight, strides, padding, dilation):
    workload = conv2d(data, weight, strides=strides, padding=padding, dilation=dilation)
    extra = [((weight[0],), "float32"), (workload.output.shape, "float16"), ((data[0], 1, 1, weight[0]), "float16")]
    epilogue = chain(("add", operand(2)), "relu", ("add", operand(3)), ("multiply", operand(4)))
    check(
        twin_cache,
        CONV,
        conv2d(data, weight, strides=strides, padding=padding, dilation=dilation, epilogue=epilogue, extra=extra),
    )


@pytest.mark.parametrize("seed", range(4))
def test_products_of_random_sizes(twin_cache, seed):
    """Of the twin above: rows, depths and widths of every alignment, one weight for all or one for each batch."""
    rng = np.random.default_rng(100 + seed)
    for case in range(6):
        m, n, k = (int(size) for size in rng.integers(1, 90, 3))
        lead = tuple(int(size) for size in rng.integers(1, 5, rng.integers(0, 3)))
        own = lead if rng.random() < 0.5 else ()
        check(twin_cache, GEMM, bias_gelu_residual((*lead, m, k), (*own, k, n), (*lead, m, n)), seed=case)


@pytest.mark.parametrize("seed", range(4))
def test_convolutions_of_random_sizes(twin_cache, seed):
    """Of the twins above, whose strides, paddings and dilations are compiled in: all else is drawn."""
    rng = np.random.default_rng(200 + seed)
    for case, (strides, padding, dilation) in enumerate(
        [((1, 1), (1, 1, 1, 1), (1, 1)), ((2, 1), (2, 0, 1, 1), (1, 1)), ((1, 1), (2, 2, 2, 2), (2, 1))]
    ):
        batch, height, width, channels, outputs = (
            int(size) for size in rng.integers((1, 5, 5, 1, 1), (4, 14, 14, 40, 40))
        )
        kernel = tuple(int(size) for size in rng.integers(1, 4, 2))
        given = {"strides": strides, "padding": padding, "dilation": dilation}
        plain = conv2d((batch, height, width, channels), (outputs, *kernel, channels), **given)
        extra = [((outputs,), "float32"), (plain.output.shape, "float16"), ((batch, 1, 1, outputs), "float16")]
        epilogue = chain(("add", operand(2)), "relu", ("add", operand(3)), ("multiply", operand(4)))
        drawn = conv2d(plain.inputs[0].shape, plain.inputs[1].shape, **given, epilogue=epilogue, extra=extra)
        check(twin_cache, CONV, drawn, seed=case)


def random_epilogue(rng, shape):
    """Up to eight steps of operands drawn from the values before, vectors over rows and columns, and tensors."""
    one = ("relu", "relu6", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish", "softplus", "abs", "negative")
    two = ("add", "subtract", "multiply", "maximum", "minimum")
    kinds = [((shape[-1],), "float16"), ((shape[0], 1), "float32"), (shape, "float16"), ((1,), "float32")]
    extra = [kinds[at] for at in rng.integers(0, len(kinds), rng.integers(1, 4))]
    steps = [Step("multiply", (value(0), constant(0.25)))]
    for at in range(len(extra)):
        steps.append(Step(str(rng.choice(two)), (value(len(steps)), operand(2 + at))))
    for _ in range(rng.integers(1, 5)):
        earlier = value(int(rng.integers(0, len(steps) + 1)))
        last = value(len(steps))
        name = str(rng.choice(one + two))
        steps.append(Step(name, (last, earlier) if name in two else (last,)))
        steps.append(Step("clip", (value(len(steps)), constant(-8.0), constant(8.0))))
    return tuple(steps), extra


@pytest.mark.parametrize("seed", range(2))
def test_random_epilogues(twin_cache, seed):
    rng = np.random.default_rng(300 + seed)
    m, n, k = (int(size) for size in rng.integers(2, 40, 3))
    epilogue, extra = random_epilogue(rng, (m, n))
    check(twin_cache, GEMM, matmul((m, k), (k, n), "float32", epilogue=epilogue, extra=extra), seed=seed)


@pytest.mark.parametrize("per_group, outputs", [(8, 64), (4, 8), (16, 32)])
def test_grouped_convolution(twin_cache, per_group, outputs):
    groups = 4
    workload = conv2d(
        (2, 6, 5, per_group * groups), (outputs * groups, 3, 3, per_group), groups=groups, padding=(1, 1, 1, 1)
    )
    check(twin_cache, CONV, workload)


@pytest.mark.parametrize("channels, kernel", [(2, (3, 3)), (24, (3, 3)), (24, (5, 3))])
def test_depthwise_convolution(twin_cache, channels, kernel):
    workload = conv2d(
        (2, 9, 10, channels),
        (channels, *kernel, 1),
        groups=channels,
        strides=(2, 2),
        padding=(1, 1, 1, 1),
        epilogue=chain(("add", operand(2)), "relu6"),
        extra=[((channels,), "float32")],
    )
    check(twin_cache, DEPTHWISE, workload)


def test_quantised_convolution(twin_cache):
    workload = conv2d((1, 7, 7, 16), (32, 3, 3, 16), "int8", padding=(1, 1, 1, 1), out_dtype="float32")
    arrays = random_inputs(workload)
    assert (run(twin_cache, CONV, workload, arrays) == reference(workload, arrays)).all()


def test_convolution_in_tf32(twin_cache):
    check(twin_cache, CONV, conv2d((1, 7, 7, 12), (8, 3, 3, 12), "float32", padding=(1, 1, 1, 1), math="tf32"))


class Strict(Gemm2x):
    """Twins that check alignments as kernels do, though they need none."""

    def recipe(self, workload, candidate, target):
        twin, device = (super(Strict, self).recipe(workload, candidate, replace(target, twin=t)) for t in (True, False))
        same = ("arguments", "a", "b", "output_alignment")
        return Recipe(twin.source, {**twin.values, **{name: device.values[name] for name in same}})


class TestChecks:
    """What a kernel refuses, by name; twins run the very checks of the device's kernels."""

    @pytest.fixture
    def kernel(self, twin_cache):
        """A twin that insists on the alignments of the device's kernel."""
        workload = bias_gelu_residual((16, 16), (16, 16), (16, 16))
        return published_kernel(twin_cache, Strict(), workload, GEMM.candidates(workload, TARGET)[0], TARGET)

    def tensors(self, **changed):
        shapes = {
            "a": (16, 16),
            "b": (16, 16),
            "bias": (16,),
            "residual": (16, 16),
            "workspace": (0,),
            "output": (16, 16),
        }
        dtypes = {"bias": "float32", "workspace": "uint8"}
        made = {name: aligned_empty(shape, np.dtype(dtypes.get(name, "float16"))) for name, shape in shapes.items()}
        return [tensor_of(array) for array in {**made, **changed}.values()]

    @pytest.mark.parametrize(
        "changed, error, told",
        [
            ({"a": np.empty((16, 24), np.float16)}, ValueError, "a has 24 columns, b 16 rows"),
            ({"bias": np.empty((8,), np.float32)}, ValueError, "input 2 has 8 items, expected 16"),
            ({"bias": np.empty((16,), np.float16)}, TypeError, "input 2: expected float32"),
            ({"residual": np.empty((1, 16), np.float16)}, ValueError, "input 3 has 16 items, expected 256"),
            ({"output": np.empty((16, 8), np.float16)}, ValueError, "output has 128 items, expected 16 rows of 16"),
            ({"b": np.empty((16, 32), np.float16)[:, ::2]}, ValueError, "input 1 is not contiguous"),
        ],
    )
    def test_wrong_tensors_are_refused_by_name(self, kernel, changed, error, told):
        with pytest.raises(error, match=told):
            kernel(*self.tensors(**changed))

    def test_memory_that_vectors_cannot_read_is_refused(self, kernel):
        odd = aligned_empty((16 * 16 + 1,), np.dtype(np.float16))[1:].reshape(16, 16)
        with pytest.raises(ValueError, match="input 0: its memory is not aligned to 16 bytes"):
            kernel(*self.tensors(a=odd))

    def test_sizes_that_vectors_do_not_divide_are_refused(self, kernel):
        with pytest.raises(ValueError, match="K is 12, and this kernel needs a multiple of 8"):
            kernel(
                *self.tensors(
                    a=aligned_empty((16, 12), np.dtype(np.float16)), b=aligned_empty((12, 16), np.dtype(np.float16))
                )
            )

    def test_too_few_tensors(self, kernel):
        with pytest.raises(TypeError, match=r"expected 6 tensors \(inputs, workspace, output\), found 2"):
            kernel(*self.tensors()[:2])

    def test_what_is_no_tensor(self, kernel):
        with pytest.raises(TypeError, match="input 0 is no tensor"):
            kernel(tvm_ffi.Shape((1, 2)), *self.tensors()[1:])
