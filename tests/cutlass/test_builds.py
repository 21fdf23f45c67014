"""Device code, built for real without a GPU: one kernel a family, dtype and architecture, looked at in machine code;
and every tile that candidates are made of. `make test-kernels` runs it.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm_ffi

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.conv2x import (
    ANALYTIC,
    FEW_CHANNELS,
    FIXED_CHANNELS,
    MULTIPLE_GROUPS,
    NO_GROUPS,
    OPTIMIZED,
    SINGLE_GROUP,
    Conv2x,
)
from hone.compiler.templates.cutlass.depthwise import DepthwiseConvolution
from hone.compiler.templates.cutlass.gemm2x import STREAM_K, Gemm2x, tile_of, tile_parameters
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.templates.cutlass.tiles import SIMT, TF32_THRICE, Access, legal_tiles, maths_for
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.compiler.workload import Workload
from hone.engines.tvm import aligned_empty
from hone.kernels import Entry
from tests.cutlass.sweep import compile_all
from tests.cutlass.workloads import chain, conv2d, matmul, operand

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(1200)]

GEMM, CONV, DEPTHWISE = Gemm2x(), Conv2x(), DepthwiseConvolution()
#: Bytes a thread may keep in local memory: what does not fit the registers goes there, at a hundred times the cost.
MAX_SPILL_BYTES = 32

BIAS_GELU_RESIDUAL = chain(("add", operand(2)), "gelu", ("add", operand(3)))
BIAS_RESIDUAL_RELU = chain(("add", operand(2)), ("add", operand(3)), "relu")
REQUANTISE = chain(("multiply", operand(2)), ("add", operand(3)), "round", "cast")


def gemm(dtype="float16", **given):
    extra = [((256,), dtype), ((128, 256), dtype)]
    return matmul((128, 512), (512, 256), dtype, epilogue=BIAS_GELU_RESIDUAL, extra=extra, **given)


def quantised_gemm():
    extra = [((256,), "float32"), ((256,), "float32")]
    return matmul((128, 512), (512, 256), "int8", out_dtype="int8", epilogue=REQUANTISE, extra=extra)


def conv(dtype="float16", channels=64, outputs=64, groups=1, **given):
    extra = [((outputs,), dtype), ((8, 28, 28, outputs), dtype)]
    weight = (outputs, 3, 3, channels // groups)
    given = {"epilogue": BIAS_RESIDUAL_RELU, "extra": extra, **given}
    return conv2d((8, 28, 28, channels), weight, dtype, padding=(1, 1, 1, 1), groups=groups, **given)


def quantised_conv():
    extra = [((64,), "float32"), ((64,), "float32")]
    return conv("int8", out_dtype="int8", epilogue=REQUANTISE, extra=extra)


def any_of(_):
    return True


#: Name: (template, workload, device, which of its candidates, what the machine code must hold).
KERNELS = {
    "gemm f16 sm_75": (GEMM, gemm(), "t4", any_of, r"HMMA\.1688\.F32"),
    "gemm f16 sm_80": (GEMM, gemm(), "a100", any_of, r"HMMA\.16816\.F32 [\s\S]*LDGSTS"),
    "gemm bf16 sm_86": (GEMM, gemm("bfloat16"), "a10", any_of, r"HMMA\.16816\.F32\.BF16"),
    "gemm f16 sm_89": (GEMM, gemm(transpose_b=False), "l4", any_of, r"HMMA\.16816\.F32"),
    "gemm f16 sm_90a": (GEMM, gemm(), "h100", any_of, r"HMMA\.16816\.F32"),
    "gemm tf32 sm_80": (GEMM, gemm("float32", math="tf32"), "a100", any_of, r"HMMA\.1688\.F32\.TF32"),
    "gemm 3xtf32 sm_80": (GEMM, gemm("float32"), "a100", lambda c: c["math"] == TF32_THRICE, r"HMMA\.1688\.F32\.TF32"),
    "gemm f32 sm_75": (GEMM, gemm("float32"), "t4", lambda c: c["math"] == SIMT, r"FFMA"),
    "gemm int8 sm_75": (GEMM, quantised_gemm(), "t4", any_of, r"IMMA\.8816\.S8\.S8"),
    "gemm int8 sm_89": (GEMM, quantised_gemm(), "l4", any_of, r"IMMA\.16832\.S8\.S8"),
    "gemm slices sm_80": (GEMM, gemm(), "a100", lambda c: c["slices"] > 1, r"HMMA\.16816\.F32"),
    "gemm stream-k sm_80": (GEMM, gemm(), "a100", lambda c: c["slices"] == STREAM_K, r"HMMA\.16816\.F32"),
    "gemm column sum sm_80": (
        GEMM,
        matmul((128, 512), (512, 256), epilogue=chain("relu", "column_sum"), output=(256,), out_dtype="float32"),
        "a100",
        lambda c: c["slices"] == 1,
        r"HMMA\.16816\.F32 [\s\S]*(RED|ATOMG)\.E\.ADD\.F32",
    ),
    "conv f16 sm_75": (CONV, conv(), "t4", any_of, r"HMMA\.1688\.F32"),
    "conv f16 sm_80": (CONV, conv(), "a100", any_of, r"HMMA\.16816\.F32 [\s\S]*LDGSTS"),
    "conv f16 slices sm_80": (CONV, conv(channels=512), "a100", lambda c: c["slices"] > 1, r"HMMA\.16816\.F32"),
    "conv bf16 sm_89": (CONV, conv("bfloat16"), "l4", any_of, r"HMMA\.16816\.F32\.BF16"),
    "conv tf32 sm_86": (CONV, conv("float32", math="tf32"), "a10", any_of, r"HMMA\.1688\.F32\.TF32"),
    "conv int8 sm_80": (CONV, quantised_conv(), "a100", any_of, r"IMMA\.16832\.S8\.S8"),
    "conv odd channels sm_80": (CONV, conv(channels=46), "a100", lambda c: c["iterator"] == OPTIMIZED, r"HMMA"),
    "conv few channels sm_80": (CONV, conv(channels=2), "a100", lambda c: c["iterator"] == FEW_CHANNELS, r"HMMA"),
    "conv rgb sm_80": (CONV, conv(channels=3), "a100", any_of, r"HMMA"),
    "conv fixed channels sm_80": (CONV, conv(channels=8), "a100", lambda c: c["iterator"] == FIXED_CHANNELS, r"HMMA"),
    "conv one group a block sm_80": (
        CONV,
        conv(channels=128, outputs=256, groups=2),
        "a100",
        lambda c: (c["groups"], c["iterator"]) == (SINGLE_GROUP, OPTIMIZED),
        r"HMMA",
    ),
    "conv groups in a block sm_80": (
        CONV,
        conv(channels=64, outputs=64, groups=8),
        "a100",
        lambda c: (c["groups"], c["iterator"]) == (MULTIPLE_GROUPS, ANALYTIC),
        r"HMMA",
    ),
    "depthwise f16 sm_80": (
        DEPTHWISE,
        conv(channels=64, groups=64),
        "a100",
        any_of,
        r"FFMA[\s\S]*STG\.E\.128",
    ),
}


@pytest.fixture(params=KERNELS)
def built(request, kernel_cache):
    """A kernel, its entry's manifest, and what to find in it."""
    template, workload, device, wanted, sass = KERNELS[request.param]
    target = CudaTarget.preset(device)
    candidate = next(one for one in template.candidates(workload, target) if wanted(one))
    kernel = published_kernel(kernel_cache, template, workload, candidate, target)
    entry = kernel_cache.get("kernels", kernel.digest, f"sm_{target.arch}")
    assert isinstance(entry, Entry)
    return kernel, entry.manifest, template, workload, candidate, target, sass


def test_kernels_hold_the_instructions_that_they_are_for_and_spill_nothing(built):
    kernel, manifest, template, _, candidate, target, sass = built
    found = find_toolchain().disassemble(kernel.path)
    assert re.search(sass, found), f"no {sass} in {sorted(set(re.findall(r'[HI]MMA[.A-Z0-9]*', found)))}"
    assert manifest["resources"]
    for resources in manifest["resources"]:
        assert resources["spill_store_bytes"] <= MAX_SPILL_BYTES
        assert resources["registers"] <= target.max_registers_per_thread
    if template is not DEPTHWISE:
        workload = Workload.from_fields(manifest["workload"])
        maths = maths_for(workload.inputs[0].dtype, dict(workload.attributes).get("math", "f32"), target)
        math_ = next(one for one in maths if one.code == candidate["math"])
        assert 0 < manifest["shared_bytes"] <= tile_of(candidate).shared_bytes(math_)


def test_libraries_load_without_a_gpu_and_refuse_what_is_not_on_one(built):
    kernel, _, _, workload, _, _, _ = built
    memory = aligned_empty((16,), np.dtype(np.float32))
    tensors = [tvm_ffi.from_dlpack(memory)] * (len(workload.inputs) + 2)
    with pytest.raises((TypeError, ValueError), match=f"{kernel.name}: input 0"):
        kernel(*tensors)


def tiles_of(workload, math_, target, access, extra):
    """One candidate for every legal block, warps and depth; how many stages there are changes a number only."""
    seen = {}
    for tile in legal_tiles(math_, target, access, pipelined=math_.code == SIMT):
        shape = (tile.m, tile.n, tile.k, tile.warps_m, tile.warps_n)
        name = GEMM.name if workload.op == "matmul" else CONV.name
        seen.setdefault(shape, Candidate.of(name, **tile_parameters(tile, math_), **extra))
    return list(seen.values())


PLAIN_GEMM, PLAIN_CONV = (
    {"slices": 1, "swizzle": 1},
    {"slices": 1, "swizzle": 4, "iterator": OPTIMIZED, "groups": NO_GROUPS},
)
#: (workload, device, items read and written at once, bytes of an output's item).
SWEEPS = {
    "gemm f16 sm_80": (gemm(), "a100", Access(8, 8, 2)),
    "gemm f16 sm_75": (gemm(), "t4", Access(8, 8, 2)),
    "gemm tf32 sm_80": (gemm("float32", math="tf32"), "a100", Access(4, 4, 4)),
    "gemm int8 sm_80": (quantised_gemm(), "a100", Access(16, 16, 1)),
    "gemm f32 sm_86": (gemm("float32"), "a10", Access(4, 4, 4)),
    "conv f16 sm_80": (conv(), "a100", Access(8, 8, 2, scattered=True)),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_tile_compiles_and_none_spills(name, tmp_path):
    workload, device, access = SWEEPS[name]
    target = CudaTarget.preset(device)
    template, extra = (GEMM, PLAIN_GEMM) if workload.op == "matmul" else (CONV, PLAIN_CONV)
    for math_ in maths_for(workload.inputs[0].dtype, dict(workload.attributes).get("math", "f32"), target):
        widths = Access(1, 1, 4) if math_.code == SIMT else access
        candidates = tiles_of(workload, math_, target, widths, extra)
        report = compile_all(template, workload, candidates, target, tmp_path)
        assert len(report.resources) == len(candidates) >= 6
        for resources in report.resources:
            assert resources.spill_store_bytes <= MAX_SPILL_BYTES, resources.function
