"""Host twins of pairs of operators and of attention against float64, and what their kernels refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.attention import FusedAttention
from hone.compiler.templates.cutlass.persistent import Persistent
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.templates.packing import Packer, tensor_of
from hone.engines.tvm import aligned_empty
from tests.cutlass.fused import attention, attention_reference, convolutions, pair_reference, products
from tests.cutlass.workloads import chain, numpy_dtype, operand, random_inputs, tolerance

TARGET = CudaTarget.preset("a100").as_twin()
PAIR, ATTENTION = Persistent(), FusedAttention()


def aligned(array):
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def run(cache, template, workload, arrays):
    candidate = template.candidates(workload, TARGET)[0]
    kernel = published_kernel(cache, template, workload, candidate, TARGET)
    inputs = [aligned(array) for array in Packer(workload, arrays).pack(template, candidate, TARGET)]
    output = aligned_empty(workload.output.shape, numpy_dtype(workload.output.dtype))
    workspace = aligned_empty((template.workspace_bytes(workload, candidate, TARGET),), np.dtype(np.uint8))
    kernel(*(tensor_of(array) for array in (*inputs, workspace, output)))
    return output


def check_pair(cache, workload, seed=0):
    arrays = random_inputs(workload, seed)
    for weight in (1, 2):  # so that what is between stays of about one too
        depth = np.sqrt(
            np.prod(arrays[weight].shape[:-1] if workload.op == "matmul_matmul" else arrays[weight].shape[1:])
        )
        arrays[weight] = (arrays[weight].astype(np.float32) / depth).astype(arrays[weight].dtype)
    found = run(cache, PAIR, workload, arrays).astype(np.float64)
    allowed = tolerance(workload.inputs[0].dtype, 4)
    np.testing.assert_allclose(found, pair_reference(workload, arrays), rtol=allowed, atol=allowed)


def bias_relu_pair(m, k, middle, columns):
    return products(
        m, k, middle, columns,
        epilogue0=chain(("add", operand(3)), "relu"),
        epilogue=chain(("add", operand(4)), "relu", ("add", operand(5))),
        extra=[((middle,), "float16"), ((columns,), "float16"), ((m, columns), "float16")],
    )  # fmt: skip


@pytest.mark.parametrize("m, k, middle, columns", [(1, 8, 8, 8), (37, 40, 24, 56), (64, 16, 64, 128)])
def test_two_products_with_bias_activation_and_residual(twin_cache, m, k, middle, columns):
    check_pair(twin_cache, bias_relu_pair(m, k, middle, columns), seed=m)


def test_leading_dimensions_are_rows_and_weights_may_come_transposed(twin_cache):
    workload = bias_relu_pair(12, 16, 24, 8)
    turned = products(
        12, 16, 24, 8, transposed=True, epilogue0=chain(("add", operand(3)), "relu"),
        epilogue=chain(("add", operand(4)), "relu", ("add", operand(5))),
        extra=[(tensor.shape, tensor.dtype) for tensor in workload.inputs[3:]],
    )  # fmt: skip
    # Turned or not, it is one kernel: weights that are not are turned at load.
    candidate = PAIR.candidates(workload, TARGET)[0]
    assert PAIR.digest(workload, candidate, TARGET) == PAIR.digest(turned, candidate, TARGET)
    check_pair(twin_cache, turned, seed=1)
    data, *others, residual = workload.inputs
    data, residual = replace(data, shape=(2, 6, 16)), replace(residual, shape=(2, 6, 8))
    lead = replace(workload, inputs=(data, *others, residual), output=replace(workload.output, shape=(2, 6, 8)))
    check_pair(twin_cache, lead, seed=2)


SCALED = {
    "epilogue0": chain(("multiply", operand(3)), ("add", operand(4)), "hardswish"),
    "epilogue": chain(("add", operand(5)), "relu"),
}


@pytest.mark.parametrize(
    "data, weight, columns, strides, padding",
    [
        ((2, 7, 9, 8), (16, 3, 3, 8), 24, (1, 1), (1, 1, 1, 1)),
        ((1, 6, 6, 16), (48, 1, 3, 16), 48, (1, 1), (1, 1, 1, 1)),
        ((3, 9, 8, 8), (8, 3, 3, 8), 32, (2, 2), (0, 0, 1, 1)),
    ],
)
def test_two_convolutions_with_two_vectors_between(twin_cache, data, weight, columns, strides, padding):
    extra = [((weight[0],), "float32"), ((weight[0],), "float32"), ((columns,), "float32")]
    workload = convolutions(data, weight, columns, strides=strides, padding=padding, extra=extra, **SCALED)
    check_pair(twin_cache, workload, seed=columns)


class TestResidence:
    """Which pairs are taken, and by which tiles."""

    @pytest.mark.parametrize("device", ["t4", "a100", "rtx3070", "l4", "h100"])
    @pytest.mark.parametrize(
        "middle, columns", [(64, 64), (48, 48), (64, 128), (128, 64), (64, 256), (96, 32), (16, 64)]
    )
    def test_a_block_has_all_columns_of_both_results(self, device, middle, columns):
        target = CudaTarget.preset(device)
        workload = products(16384, 256, middle, columns)
        assert PAIR.matches(workload, target)
        candidates = PAIR.candidates(workload, target)
        assert 1 <= len(candidates) == len(set(candidates)) <= 24
        for candidate in candidates:
            assert candidate["tile_n0"] >= middle and candidate["tile_n1"] >= columns
            assert candidate["warps_m0"] * candidate["warps_n0"] == candidate["warps_m1"] * candidate["warps_n1"]
            if not candidate["shared"]:  # and each warp has all columns of its rows
                assert (candidate["warps_n0"], candidate["warps_n1"]) == (1, 1)
                assert candidate["warps_m0"] == candidate["warps_m1"]
                assert candidate["tile_n0"] == middle
            assert candidate["stages"] == 2 if target.arch == "75" else candidate["stages"] > 2

    def test_wide_results_go_through_shared_memory_and_wider_ones_are_not_taken(self):
        a100 = CudaTarget.preset("a100")
        kinds = {
            width: {candidate["shared"] for candidate in PAIR.candidates(products(16384, 256, 64, width), a100)}
            for width in (64, 256)
        }
        assert kinds == {64: {0, 1}, 256: {0, 1}}
        assert {c["shared"] for c in PAIR.candidates(products(16384, 256, 256, 256), a100)} == {1}
        assert not PAIR.matches(products(16384, 256, 64, 1024), a100)
        assert not PAIR.matches(products(16384, 256, 1024, 64), a100)
        assert {c["shared"] for c in PAIR.candidates(products(16384, 256, 48, 48), a100)} == {1}  # no whole steps of 32

    @pytest.mark.parametrize(
        "workload",
        [
            products(64, 12, 64, 64),  # rows that vectors do not divide
            products(64, 16, 60, 64),
            products(64, 16, 64, 60),
            products(64, 16, 64, 64, "float32"),
            products(64, 16, 64, 64, epilogue0=chain(("add", operand(3))), extra=[((64, 64), "float16")]),
            products(
                64, 16, 64, 64,
                epilogue0=chain(("add", operand(3)), ("add", operand(4)), ("multiply", operand(5))),
                extra=[((64,), "float16")] * 3,
            ),
            products(64, 16, 64, 64, intermediate="float32"),
            products(64, 16, 64, 64, epilogue0=chain(("divide", operand(3))), extra=[((64,), "float16")]),
            products(64, 16, 64, 64, weights=(1,)),
            replace(products(64, 16, 64, 64), op="matmul"),
        ],
    )  # fmt: skip
    def test_what_the_kernels_cannot_do_is_not_taken(self, workload):
        assert not PAIR.matches(workload, CudaTarget.preset("a100"))

    def test_bfloat16_from_ampere_on(self):
        workload = products(64, 16, 64, 64, "bfloat16")
        assert PAIR.matches(workload, CudaTarget.preset("a100"))
        assert not PAIR.matches(workload, CudaTarget.preset("t4"))

    def test_a_kernel_is_refused_more_columns_than_its_blocks_hold(self):
        a100 = CudaTarget.preset("a100")
        narrow = PAIR.candidates(products(64, 16, 32, 32), a100)[0]
        with pytest.raises(ValueError, match="does not hold the columns that"):
            PAIR.recipe(products(64, 16, 64, 256), narrow, a100)


def test_wrong_tensors_of_a_pair_are_refused_by_name(twin_cache):
    workload = bias_relu_pair(4, 8, 16, 8)
    kernel = published_kernel(twin_cache, PAIR, workload, PAIR.candidates(workload, TARGET)[0], TARGET)

    def call(**changed):
        shapes = {"data": (4, 8), "w0": (16, 8), "w1": (8, 16), "b0": (16,), "b1": (8,), "residual": (4, 8)}
        shapes = {**shapes, "workspace": (0,), "output": (4, 8), **changed}
        dtypes = {"workspace": np.uint8}
        kernel(*(tensor_of(aligned_empty(s, np.dtype(dtypes.get(n, np.float16)))) for n, s in shapes.items()))

    with pytest.raises(ValueError, match="data of 8 columns does not fit weights of 16 x 9 and 8 x 16"):
        call(w0=(16, 9))
    with pytest.raises(ValueError, match="input 3 has 8 items, expected 16"):
        call(b0=(8,))
    with pytest.raises(ValueError, match="output has 24 items, expected 4 rows of 8"):
        call(output=(3, 8))


BY_ROWS = {"layouts": ("bshd",) * 3, "output": "bshd"}


@pytest.mark.parametrize(
    "dtype, given",
    [
        ("float16", {}),
        ("float16", {"queries": 1, "keys": 24, "depth": 16, "values": 12}),
        ("float16", {**BY_ROWS, "mask": (2, 1, 1, 16)}),
        ("float16", {"layouts": ("bs0hd", "bs1hd", "bs2hd"), "output": "bshd", "queries": 16}),
        ("float32", {"layouts": ("hsd",) * 3, "output": "shd", "batch": 1, "mask": (5, 16)}),
    ],
)
def test_attention(twin_cache, dtype, given):
    workload = attention(dtype=dtype, **given)
    arrays = random_inputs(workload, seed=len(given))
    found = run(twin_cache, ATTENTION, workload, arrays).astype(np.float64)
    allowed = {"float16": 2e-3, "float32": 2e-6}[dtype]
    np.testing.assert_allclose(found, attention_reference(workload, arrays), rtol=allowed, atol=allowed)


def test_keys_that_a_mask_forbids_do_not_count(twin_cache):
    workload = attention(**BY_ROWS, mask=(2, 1, 1, 16), keys=16)
    arrays = random_inputs(workload)
    arrays[3][...] = 0
    arrays[3][..., 9:] = -np.inf
    short = attention(**BY_ROWS, keys=9)
    cut = [arrays[0], arrays[1][:, :9], arrays[2][:, :9]]
    found = run(twin_cache, ATTENTION, workload, arrays).astype(np.float64)
    np.testing.assert_allclose(found, attention_reference(short, cut), rtol=2e-3, atol=2e-3)


class TestAttentionCandidates:
    @pytest.mark.parametrize("device", ["t4", "a100", "rtx3070", "l4", "h100"])
    @pytest.mark.parametrize("values", [64, 128, 256])
    def test_values_deeper_than_a_blocks_keys_are_summed_in_the_workspace(self, device, values):
        target = CudaTarget.preset(device)
        workload = attention(heads=12, queries=128, keys=128, depth=64, values=values)
        for candidate in ATTENTION.candidates(workload, target):
            in_registers = candidate["max_depth"] == candidate["keys"] >= values
            wanted = 0 if in_registers else 2 * 12 * 128 * values * 4
            assert ATTENTION.workspace_bytes(workload, candidate, target) == wanted

    @pytest.mark.parametrize(
        "workload",
        [
            attention(depth=6),
            attention(layouts=("bhsd", "bhds", "bhsd")),
            attention(mask=(2, 1, 5, 1)),
            attention(keys=12, mask=(12,)),
            attention(dtype="int8"),
            replace(attention(), inputs=attention(heads=1).inputs[:1] + attention().inputs[1:]),
        ],
    )
    def test_what_the_kernel_cannot_do_is_not_taken(self, workload):
        assert not ATTENTION.matches(workload, CudaTarget.preset("a100"))
