"""Candidates: tens for a workload, all legal, ordered by a model of the device; and what names a kernel."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hone.compiler.cuda_target import PRESETS, CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass import conv2x, gemm2x, second_opinion
from hone.compiler.templates.cutlass.conv2x import Conv2x
from hone.compiler.templates.cutlass.depthwise import DepthwiseConvolution
from hone.compiler.templates.cutlass.gemm2x import STREAM_K, Gemm2x, tile_of
from hone.compiler.templates.cutlass.prebuild import plan
from hone.compiler.templates.cutlass.tiles import maths_for
from hone.compiler.workload import Operand, Step
from hone.tuning.budget import GIB, compiler_bytes
from tests.cutlass.workloads import chain, conv2d, matmul, operand

GEMM, CONV, DEPTHWISE = Gemm2x(), Conv2x(), DepthwiseConvolution()
A100, T4 = CudaTarget.preset("a100"), CudaTarget.preset("t4")
DEVICES = [name for name, target in PRESETS.items() if target.arch != "100a"]

MATMULS = {
    "large": ((4096, 4096), (4096, 4096)),
    "bert": ((1280, 768), (768, 3072)),
    "decode": ((1, 4096), (4096, 4096)),
    "deep": ((64, 16384), (16384, 64)),
    "odd": ((100, 33), (33, 7)),
    "batched": ((8, 12, 128, 64), (8, 12, 64, 128)),
}
CONVS = {
    "3x3": ((32, 56, 56, 64), (64, 3, 3, 64)),
    "deep": ((1, 7, 7, 512), (512, 3, 3, 512)),
    "first": ((8, 224, 224, 3), (64, 7, 7, 3)),
    "odd": ((32, 20, 26, 46), (32, 3, 3, 46)),
    "few": ((8, 32, 32, 4), (16, 3, 3, 4)),
}


def matmul_in(dtype, name):
    a, b = MATMULS[name]
    math = {"math": "tf32"} if dtype == "tf32" else {}
    return matmul(a, b, {"tf32": "float32", "f32": "float32"}.get(dtype, dtype), **math)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "f32", "int8"])
@pytest.mark.parametrize("name", MATMULS)
def test_every_candidate_of_a_product_is_within_the_limits(device, dtype, name):
    target, workload = CudaTarget.preset(device), matmul_in(dtype, name)
    if not GEMM.matches(workload, target):
        assert (dtype == "bfloat16" and target.arch == "75") or (dtype == "int8" and name in ("odd", "batched"))
        return
    candidates = GEMM.candidates(workload, target)
    assert 1 <= len(candidates) <= gemm2x.MAX_CANDIDATES
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates:
        math_ = next(
            m
            for m in maths_for(workload.inputs[0].dtype, dict(workload.attributes).get("math", "f32"), target)
            if m.code == candidate["math"]
        )
        check_limits(candidate, math_, target)
        assert target.arch != "75" or candidate["stages"] == 2
        if MATMULS[name][0][-1] % 2:
            assert math_.element_bytes == 4 or candidate["stages"] == 2  # cp.async moves four bytes at least


def check_limits(candidate, math_, target):
    tile = tile_of(candidate)
    assert tile.shared_bytes(math_) <= target.max_shared_memory_per_block
    assert tile.registers(math_) <= target.max_registers_per_thread
    assert tile.registers(math_) * tile.num_threads <= target.registers_per_sm
    assert tile.num_threads <= target.max_threads_per_block
    assert tile.blocks_per_sm(math_, target) >= 1
    for side, instruction in zip(tile.warp, math_.instruction, strict=True):
        assert side % instruction == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "int8"])
@pytest.mark.parametrize("name", CONVS)
def test_every_candidate_of_a_convolution_is_within_the_limits(device, dtype, name):
    target, (data, weight) = CudaTarget.preset(device), CONVS[name]
    math = {"math": "tf32"} if dtype == "tf32" else {}
    output = {"out_dtype": "float32"} if dtype == "int8" else {}
    workload = conv2d(data, weight, "float32" if dtype == "tf32" else dtype, padding=(1, 1, 1, 1), **math, **output)
    if not CONV.matches(workload, target):
        assert (dtype in ("bfloat16", "tf32") and target.arch == "75") or (dtype == "int8" and data[-1] % 4)
        return
    candidates = CONV.candidates(workload, target)
    assert 1 <= len(candidates) <= conv2x.MAX_CANDIDATES
    math_ = maths_for(workload.inputs[0].dtype, dict(workload.attributes).get("math", "f32"), target)[0]
    for candidate in candidates:
        check_limits(candidate, math_, target)


def test_tens_of_candidates_for_what_models_are_made_of():
    for workload in (matmul_in("float16", "bert"), conv2d(*CONVS["3x3"], padding=(1, 1, 1, 1))):
        template = GEMM if workload.op == "matmul" else CONV
        assert 10 <= len(template.candidates(workload, A100)) <= 40


def test_small_problems_get_small_blocks_and_large_ones_large():
    """Bolt's third rule, and its first: warp tiles as large as registers let them be."""
    small = tile_of(GEMM.candidates(matmul((32, 768), (768, 768)), A100)[0])
    large = tile_of(GEMM.candidates(matmul_in("float16", "large"), A100)[0])
    assert small.m * small.n <= 64 * 64
    assert large.m * large.n >= 128 * 128
    assert large.warp[0] * large.warp[1] >= 64 * 32


def test_four_or_eight_warps_come_first():
    for name in ("large", "bert"):
        best = GEMM.candidates(matmul_in("float16", name), A100)[:8]
        assert all(tile_of(candidate).num_threads in (128, 256) for candidate in best)


def test_deep_products_with_few_blocks_split_their_depth():
    split = [c for c in GEMM.candidates(matmul_in("float16", "deep"), A100) if c["slices"] != 1]
    assert split
    assert GEMM.candidates(matmul_in("float16", "deep"), A100)[0]["slices"] != 1
    assert all(c["slices"] == 1 for c in GEMM.candidates(matmul_in("float16", "batched"), A100))
    deep = conv2d(*CONVS["deep"], padding=(1, 1, 1, 1))
    assert any(c["slices"] > 1 for c in CONV.candidates(deep, A100))


def test_waves_that_do_not_fill_the_device_may_be_balanced():
    candidates = GEMM.candidates(matmul_in("float16", "bert"), A100)
    assert any(candidate["slices"] == STREAM_K for candidate in candidates)


def test_a_convolutions_slices_and_swizzles_are_tried_for_few_tiles_only():
    wide = conv2d((32, 14, 14, 512), (1024, 3, 3, 512), padding=(1, 1, 1, 1))
    deep = conv2d(*CONVS["deep"], padding=(1, 1, 1, 1))
    for workload, name, usual in ((wide, "swizzle", 4), (deep, "slices", 1)):
        refined = {tile_of(one) for one in CONV.candidates(workload, A100) if one[name] != usual}
        assert 1 <= len(refined) <= 3
    assert len({CONV.digest(wide, one, A100) for one in CONV.candidates(wide, A100)}) == len(
        CONV.candidates(wide, A100)
    )


def test_swizzles_are_tried_for_few_tiles_only():
    candidates = GEMM.candidates(matmul_in("float16", "large"), A100)
    swizzled = {tile_of(candidate) for candidate in candidates if candidate["swizzle"] > 1}
    assert 1 <= len(swizzled) <= 3


def test_workspace_is_for_those_that_share_a_tile():
    workload = matmul_in("float16", "deep")
    for candidate in GEMM.candidates(workload, A100):
        num_bytes = GEMM.workspace_bytes(workload, candidate, A100)
        assert (num_bytes == 0) == (candidate["slices"] == 1)
        assert GEMM.workspace_bytes(workload, candidate, A100.as_twin()) == 0
        if candidate["slices"] > 1:
            assert num_bytes >= 64 * 64 * 4


BASE = {
    "workload": matmul((128, 256), (256, 64), epilogue=chain(("add", operand(2)), "relu"), extra=[((64,), "float16")]),
    "candidate": 0,
    "target": A100,
}


def digest(**changed):
    given = {**BASE, **changed}
    candidate = GEMM.candidates(BASE["workload"], A100)[given["candidate"]]
    return GEMM.digest(given["workload"], candidate, given["target"])


def bias_relu(a, b, **given):
    epilogue = given.pop("epilogue", chain(("add", operand(2)), "relu"))
    extra = given.pop("extra", [((b[-1],), given.get("dtype", "float16"))])
    return matmul(a, b, epilogue=epilogue, extra=extra, **given)


@pytest.mark.parametrize(
    "changed",
    [
        {"candidate": 1},
        {"target": CudaTarget.preset("rtx3070")},
        {"target": A100.as_twin()},
        {"workload": bias_relu((128, 256), (256, 64), dtype="bfloat16")},
        {"workload": bias_relu((128, 256), (256, 64), out_dtype="float32")},
        {"workload": bias_relu((128, 256), (256, 64), extra=[((64,), "float32")])},
        {"workload": bias_relu((128, 256), (256, 64), extra=[((128, 64), "float16")])},
        {"workload": bias_relu((128, 256), (256, 64), extra=[((128, 1), "float16")])},
        {"workload": bias_relu((128, 256), (256, 64), epilogue=chain(("add", operand(2)), "silu"))},
        {
            "workload": bias_relu(
                (128, 256),
                (256, 64),
                epilogue=chain(("add", operand(2)), ("maximum", Operand("constant", constant=0.5))),
            )
        },
        {"workload": bias_relu((128, 252), (252, 64))},
        {"workload": bias_relu((128, 256), (256, 60))},
        {"workload": bias_relu((128, 256), (64, 256), transpose_b=True, extra=[((64,), "float16")])},
    ],
)
def test_whatever_changes_code_changes_the_name(changed):
    assert digest(**changed) != digest()


@pytest.mark.parametrize(
    "workload",
    [
        bias_relu((1, 8), (8, 8)),
        bias_relu((3, 5, 1024), (1024, 4096)),
        bias_relu((7, 4, 64), (7, 64, 24)),
    ],
)
def test_sizes_do_not_name_a_kernel(workload):
    assert digest(workload=workload) == digest()


def test_sizes_of_a_device_do_not_name_a_kernel():
    assert digest(target=replace(A100, num_sms=82, name="a30")) == digest()


def test_sizes_of_a_convolution_do_not_name_a_kernel_but_its_strides_do():
    def name(data, weight, **given):
        workload = conv2d(data, weight, **given)
        return CONV.digest(workload, CONV.candidates(conv2d((8, 28, 28, 64), (64, 3, 3, 64)), A100)[0], A100)

    same = {name((8, 28, 28, 64), (64, 3, 3, 64)), name((1, 9, 5, 8), (16, 2, 5, 8)), name((1, 9, 5, 8), (16, 1, 1, 8))}
    assert len(same) == 1
    for other in ({"strides": (2, 2)}, {"padding": (1, 1, 1, 1)}, {"dilation": (2, 2)}):
        assert name((8, 28, 28, 64), (64, 3, 3, 64), **other) not in same
    # What is added below and to the right only changes the output's size.
    assert name((8, 28, 28, 64), (64, 3, 3, 64), padding=(0, 0, 1, 1)) in same


def test_a_twin_serves_all_candidates():
    workload, twin = matmul_in("float16", "bert"), A100.as_twin()
    assert len({GEMM.digest(workload, candidate, twin) for candidate in GEMM.candidates(workload, twin)}) == 1


@pytest.mark.parametrize(
    "workload",
    [
        matmul((8, 8), (8, 8), epilogue=(Step("floor", (Operand("value", 0),)),)),
        matmul((4, 2, 8, 8), (4, 8, 8)),  # batches that no single stride walks through
        matmul((2, 4, 8, 16), (2, 4, 16, 8), epilogue=chain(("add", operand(2))), extra=[((2, 1, 1, 8), "float16")]),
        matmul((8, 8), (8, 8), epilogue=chain(("add", operand(0)))),
        matmul((8, 16), (16, 8), "int8", weights=(), out_dtype="int32"),
        matmul((8, 6), (6, 8), "int8", out_dtype="int32"),
        matmul((8, 8), (8, 8), "float64"),
    ],
)
def test_what_no_kernel_can_do_is_not_matched(workload):
    assert not GEMM.matches(workload, A100)
    with pytest.raises(ValueError, match="ask matches"):
        GEMM.recipe(workload, Candidate.of(GEMM.name), A100)


def test_groups_choose_how_blocks_share_them():
    many = conv2d((8, 28, 28, 128), (128, 3, 3, 4), groups=32, padding=(1, 1, 1, 1))
    few = conv2d((8, 28, 28, 128), (256, 3, 3, 64), groups=2, padding=(1, 1, 1, 1))
    assert {c["groups"] for c in CONV.candidates(many, A100)} == {conv2x.MULTIPLE_GROUPS}
    assert conv2x.SINGLE_GROUP in {c["groups"] for c in CONV.candidates(few, A100)}
    for candidate in CONV.candidates(few, A100):
        if candidate["groups"] == conv2x.SINGLE_GROUP:
            assert 128 % candidate["tile_n"] == 0


def test_few_channels_have_iterators_of_their_own():
    iterators = {c["iterator"] for c in CONV.candidates(conv2d(*CONVS["few"]), A100)}
    assert conv2x.FIXED_CHANNELS in iterators
    assert conv2x.FEW_CHANNELS in {
        c["iterator"] for c in CONV.candidates(conv2d(*CONVS["first"], strides=(2, 2)), A100)
    }


def test_depthwise_convolutions_have_a_template_of_their_own():
    workload = conv2d((8, 14, 14, 96), (96, 3, 3, 1), groups=96, padding=(1, 1, 1, 1))
    candidates = DEPTHWISE.candidates(workload, A100)
    assert len(candidates) >= 3
    assert all(96 % c["vector"] == 0 for c in candidates)
    assert not DEPTHWISE.matches(conv2d((8, 14, 14, 96), (192, 3, 3, 1), groups=96), A100)


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90a"])
def test_the_plan_holds_every_kernel_once_and_the_most_useful_first(arch):
    target = CudaTarget.typical(arch)
    planned = plan(target, ("gemm", "conv2d", "depthwise"), ("f16",))
    digests = [one.template.digest(one.workload, one.candidate, target) for one in planned]
    assert len(set(digests)) == len(digests) > 100
    steps = [tuple(step.op for step in one.workload.epilogue) for one in planned]
    ops = [one.workload.op for one in planned]
    # Interrupted anywhere, what is there serves the most frequent layers: all have their first guess at once, the
    # second one comes before the first guess for rarer epilogues.
    assert {("matmul", ("add",)), ("conv2d", ("add", "relu")), ("conv2d", ("add", "relu6"))} <= set(
        zip(ops[:12], steps[:12], strict=True)
    )
    kinds = list(zip(ops, steps, strict=True))
    bias_alone = [at for at, kind in enumerate(kinds) if kind == ("matmul", ("add",))]
    rarest = kinds.index(("matmul", ()))
    assert bias_alone[3] < rarest
    # The tuner counts on this much for one compiler.
    most = max(one.template.recipe(one.workload, one.candidate, target).num_gib for one in planned)
    assert most * GIB <= compiler_bytes(f"sm_{arch}")


def test_the_plan_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="'f17' is unknown, expected some of f16"):
        plan(A100, ("gemm",), ("f17",))
    with pytest.raises(ValueError, match="'pooling' is unknown"):
        plan(A100, ("pooling",), ("f16",))


def test_presets_have_the_limits_of_their_architecture():
    for (name, target), other in itertools.product(PRESETS.items(), PRESETS.values()):
        if target.arch == other.arch:
            assert target.max_shared_memory_per_block == other.max_shared_memory_per_block, name
    assert T4.max_shared_memory_per_block == 64 << 10
    with pytest.raises(ValueError, match="device 'x100' is unknown"):
        CudaTarget.preset("x100")
    with pytest.raises(ValueError, match="architecture '70' is unknown"):
        CudaTarget.typical("70")


class FakeHeuristics:
    """The part of nvMatmulHeuristics that is used; proposes what it is given."""

    NvMatmulHeuristicsFlags = SimpleNamespace(PERF_MODEL_BASED_AUTO_TUNING=0)

    def __init__(self, *kernels):
        self.NvMatmulHeuristicsTarget = self.NvMatmulHeuristicsNvidiaGpu = defaultdict(str)
        self.NvMatmulHeuristicsMatmulLayout = defaultdict(str)
        self.kernels, self.asked = kernels, []

    def NvMatmulHeuristicsInterfaceEx(self, **given):
        return self

    def createBackend(self, kind):
        return None

    def makeNvMatmulHeuristicsProblem(self, *given):
        return given

    def getEx(self, problem, count, backend, precision):
        self.asked.append((problem, precision))
        names = ("cta_tile_m", "cta_tile_n", "cta_tile_k", "warp_tile_m", "warp_tile_n", "stages")
        return [{"kernel": SimpleNamespace(**dict(zip(names, one, strict=True)))} for one in self.kernels]


@pytest.fixture
def heuristics(monkeypatch):
    """Installs a fake of the optional package."""

    def install(*kernels):
        fake = FakeHeuristics(*kernels)
        monkeypatch.setattr(second_opinion, "import_module", lambda name: fake)
        monkeypatch.setattr(second_opinion.util, "find_spec", lambda name: object())
        for cached in (second_opinion._configurations, second_opinion._interface):
            cached.cache_clear()
            request.append(cached)
        return fake

    request = []
    yield install
    for cached in request:
        cached.cache_clear()


def test_a_second_opinion_joins_the_candidates(heuristics):
    workload = matmul((1280, 768), (768, 3072))
    before = GEMM.candidates(workload, A100)
    fake = heuristics((128, 128, 32, 64, 64, 5), (512, 512, 64, 64, 64, 4), (128, 96, 32, 64, 64, 4))
    after = GEMM.candidates(workload, A100)
    assert fake.asked == [((1280, 3072, 768, "", 1), "HSH")]
    new = [candidate for candidate in after if candidate not in before]
    assert [(tile_of(one).m, tile_of(one).n, one["stages"]) for one in new] == [(128, 128, 5)]  # the others are illegal
    assert after[0] == before[0]


def test_no_second_opinion_is_asked_on_devices_that_it_does_not_know(heuristics):
    fake = heuristics((128, 128, 32, 64, 64, 5))
    GEMM.candidates(matmul((1280, 768), (768, 3072)), T4)
    assert fake.asked == []
