"""Candidates of CUTLASS 3.x kernels: tens, all within limits, for what TMA can read; and the names of their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass import conv3x, gemm3x
from hone.compiler.templates.cutlass.conv3x import Conv3x
from hone.compiler.templates.cutlass.epilogue import EpilogueProgram
from hone.compiler.templates.cutlass.gemm2x import Gemm2x
from hone.compiler.templates.cutlass.gemm3x import Gemm3x
from hone.compiler.templates.cutlass.tiles import TENSOR, maths_for
from hone.compiler.templates.cutlass.tiles3x import COOPERATIVE, ONE_SM, PINGPONG, SINGLE, Tile3x
from hone.compiler.workload import TensorType
from tests.cutlass.workloads import chain, conv2d, matmul, operand

GEMM, CONV = Gemm3x(), Conv3x()
H100, B200, A100 = (CudaTarget.preset(name) for name in ("h100", "b200", "a100"))

MATMULS = {
    "large": ((4096, 4096), (4096, 4096)),
    "bert": ((1280, 768), (768, 3072)),
    "decode": ((1, 4096), (4096, 4096)),
    "tail": ((1152, 4096), (4096, 2048)),
    "batched": ((8, 12, 128, 64), (8, 12, 64, 128)),
}


def sums_of(a, b, output):
    """A product whose rows are summed."""
    return matmul(a, b, epilogue=chain("relu", "column_sum"), output=output, out_dtype="float32")


def product(dtype, name):
    a, b = MATMULS[name]
    if dtype in ("tf32", "int8"):
        b = (*b[:-2], b[-1], b[-2])
    told = {"tf32": {"math": "tf32", "transpose_b": True}, "int8": {"transpose_b": True, "out_dtype": "int32"}}
    return matmul(a, b, "float32" if dtype == "tf32" else dtype, **told.get(dtype, {}))


def tile_of(candidate):
    names = ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "schedule")
    return Tile3x(*(candidate[name] for name in names))


def check(template, workload, target, most):
    candidates = template.candidates(workload, target)
    assert 1 <= len(candidates) <= most
    assert len(set(candidates)) == len(candidates)
    math = dict(workload.attributes).get("math", "f32")
    math_ = next(m for m in maths_for(workload.inputs[0].dtype, math, target) if m.code == TENSOR)
    program = EpilogueProgram.of(workload)
    for candidate in candidates:
        tile = tile_of(candidate)
        assert tile.k * math_.element_bytes == 128  # the widest swizzle
        assert tile.stages(math_, program, target) >= 2
        used = tile.epilogue_bytes(program) + 2 * tile.stage_bytes(math_)
        assert used <= target.max_shared_memory_per_block
        assert tile.schedule == ONE_SM or tile.accumulators <= 128
        assert tile.schedule != COOPERATIVE or tile.m >= 128  # 64 rows for each of two groups
    return candidates


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "int8"])
@pytest.mark.parametrize("name", MATMULS)
def test_every_candidate_of_a_product_is_within_the_limits(dtype, name):
    candidates = check(GEMM, product(dtype, name), H100, gemm3x.MAX_CANDIDATES)
    assert {candidate["schedule"] for candidate in candidates} == {PINGPONG, COOPERATIVE}
    for candidate in candidates:
        assert not candidate["stream_k"] or candidate["schedule"] == COOPERATIVE


def test_tens_of_candidates_and_balanced_ones_where_the_last_wave_is_not_full():
    assert 15 <= len(GEMM.candidates(product("float16", "bert"), H100)) <= 32
    balanced = [c for c in GEMM.candidates(product("float16", "tail"), H100) if c["stream_k"]]
    assert balanced
    assert not any(c["stream_k"] for c in GEMM.candidates(product("float16", "batched"), H100))


def test_small_problems_get_small_tiles_and_large_ones_large():
    first = {name: tile_of(GEMM.candidates(product("float16", name), H100)[0]) for name in MATMULS}
    assert first["large"].m * first["large"].n == 128 * 256
    assert first["decode"].m == 64


def test_a_balanced_candidate_has_room_for_unfinished_tiles():
    workload = product("float16", "tail")
    for candidate in GEMM.candidates(workload, H100):
        num_bytes = GEMM.workspace_bytes(workload, candidate, H100)
        num_tiles = -(-1152 // candidate["tile_m"]) * -(-2048 // candidate["tile_n"])
        if candidate["stream_k"]:
            assert num_bytes >= min(num_tiles, 2 * H100.num_sms) * candidate["tile_m"] * candidate["tile_n"] * 4
        else:
            assert num_bytes == 0


def test_blackwell_has_its_own_schedule_and_halves_only():
    candidates = check(GEMM, product("float16", "bert"), B200, gemm3x.MAX_CANDIDATES)
    assert {candidate["schedule"] for candidate in candidates} == {ONE_SM}
    assert not GEMM.matches(product("tf32", "bert"), B200)
    extra = [((64, 64), "float16")] * 2
    two_tensors = chain(("add", operand(2)), ("multiply", operand(3)))
    assert not GEMM.matches(matmul((64, 64), (64, 64), epilogue=two_tensors, extra=extra), B200)
    assert not CONV.matches(conv2d((8, 28, 28, 64), (64, 3, 3, 64)), B200)


def test_whole_tensors_in_the_epilogue_take_room_from_the_stages():
    plain = matmul((4096, 4096), (4096, 4096), "float32", math="tf32")
    extra = [((4096, 4096), "float32")] * 4
    steps = chain(*(("add", operand(at)) for at in range(2, 6)))
    crowded = replace(plain, inputs=(*plain.inputs, *matmul((1, 1), (1, 1), extra=extra).inputs[2:]), epilogue=steps)
    shapes = [{tile_of(c) for c in GEMM.candidates(w, H100)} for w in (plain, crowded) if GEMM.matches(w, H100)]
    assert len(shapes[-1]) < len(shapes[0]) or len(shapes) == 1


@pytest.mark.parametrize(
    "workload, target",
    [
        (matmul((64, 64), (64, 64)), A100),
        (matmul((64, 60), (60, 64)), H100),  # rows that do not begin where TMA reads
        (matmul((64, 64), (64, 60), weights=()), H100),
        (matmul((64, 64), (64, 60)), H100),  # the weight could be turned, the output not
        (matmul((64, 64), (64, 64), "float32"), H100),  # strict
        (matmul((64, 64), (64, 64), "float32", math="tf32", weights=()), H100),  # b is not K by K
        (sums_of((3, 2, 16, 64), (3, 2, 64, 64), (3, 64)), H100),  # of neither all rows nor each batch
        (sums_of((64, 64), (64, 64), (64,)), B200),
    ],
)
def test_what_the_kernels_cannot_do_is_not_taken(workload, target):
    assert not GEMM.matches(workload, target)


@pytest.mark.parametrize(
    "a, b, output",
    [
        ((512, 4096), (4096, 64), (64,)),
        ((4, 128, 4096), (4096, 64), (4, 64)),
        ((4, 128, 4096), (4096, 60), (1, 1, 60)),  # no tile is written, so N may be any that B can have
        ((3, 2, 128, 64), (3, 2, 64, 64), (3, 2, 64)),
        ((3, 2, 128, 64), (3, 2, 64, 64), (1, 1, 1, 64)),
    ],
)
def test_rows_are_summed_by_tiles_that_no_blocks_share(a, b, output):
    candidates = check(GEMM, sums_of(a, b, output), H100, gemm3x.MAX_CANDIDATES)
    assert not any(candidate["stream_k"] for candidate in candidates)


@pytest.mark.parametrize("images, output, is_taken", [(1, (1, 64), True), (8, (1, 64), True), (8, (8, 64), False)])
def test_pixels_are_summed_where_one_sum_is_of_all_images(images, output, is_taken):
    workload = conv2d((images, 28, 28, 64), (64, 3, 3, 64), epilogue=chain("column_sum"), out_dtype="float32")
    workload = replace(workload, output=TensorType(output, "float32"))
    assert CONV.matches(workload, H100) == is_taken


def test_float32_and_integer_weights_are_turned_at_load():
    for dtype in ("float32", "int8"):
        given = {"math": "tf32"} if dtype == "float32" else {"out_dtype": "int32"}
        workload = matmul((64, 128), (128, 64), dtype, **given)
        candidate = GEMM.candidates(workload, H100)[0]
        assert GEMM.packing(workload, candidate, H100)[1].result.shape == (64, 128)
        assert GEMM.recipe(workload, candidate, H100).values["transpose_b"]


def test_what_tma_reads_and_writes_is_aligned_to_16_bytes():
    extra = [((64,), "float32"), ((64, 64), "float32"), ((64, 1), "float32"), ((1,), "float32")]
    steps = chain(("add", operand(2)), ("add", operand(3)), ("multiply", operand(4)), ("multiply", operand(5)))
    workload = matmul((64, 64), (64, 64), epilogue=steps, extra=extra)
    recipe = GEMM.recipe(workload, GEMM.candidates(workload, H100)[0], H100)
    assert [argument["alignment"] for argument in recipe.values["arguments"]] == [16, 16, 16, 16, 4, 4, 16]


def test_both_generations_share_a_twin():
    """They compute the same, so models are checked once for both."""
    twin, old = H100.as_twin(), Gemm2x()
    for dtype in ("float16", "bfloat16"):
        workload = matmul((64, 64), (64, 64), dtype, epilogue=chain("relu"))
        digests = {one.digest(workload, one.candidates(workload, twin)[0], twin) for one in (GEMM, old)}
        assert len(digests) == 1


CONVS = {
    "3x3": ((32, 56, 56, 64), (64, 3, 3, 64)),
    "deep": ((1, 7, 7, 512), (512, 3, 3, 512)),
    "pointwise": ((32, 14, 14, 1024), (256, 1, 1, 1024)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("name", CONVS)
def test_every_candidate_of_a_convolution_is_within_the_limits(dtype, name):
    given = {"float32": {"math": "tf32"}, "int8": {"out_dtype": "float32"}}.get(dtype, {})
    workload = conv2d(*CONVS[name], dtype, padding=(1, 1, 1, 1), **given)
    candidates = check(CONV, workload, H100, conv3x.MAX_CANDIDATES)
    assert len(candidates) >= 8
    assert {candidate["schedule"] for candidate in candidates} == {SINGLE}


@pytest.mark.parametrize(
    "workload",
    [
        conv2d((1, 8, 8, 12), (64, 3, 3, 12)),
        conv2d((1, 8, 8, 64), (60, 3, 3, 64)),
        conv2d((1, 8, 8, 64), (64, 3, 3, 16), groups=4),
        conv2d((1, 600, 8, 64), (64, 3, 3, 64), dilation=(128, 1)),
        conv2d((1, 64, 64, 64), (64, 3, 3, 64), strides=(16, 16)),
        conv2d((2, 8, 8, 64), (64, 1, 1, 64), epilogue=chain(("add", operand(2))), extra=[((2, 1, 1, 64), "float16")]),
    ],
)
def test_convolutions_that_tma_cannot_gather_are_not_taken(workload):
    assert not CONV.matches(workload, H100)
