"""Device code of CUTLASS 3.x kernels, of pairs and of attention, built without a GPU and looked at in machine code.

A 3.x kernel takes half a minute and 4 GB, so these are one for each way of multiplying and each schedule. That other
tiles are legal is checked without their machine code: for an older architecture, such a kernel's body is left out, and
what CUTLASS asserts of its types is not.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.attention import FusedAttention
from hone.compiler.templates.cutlass.conv3x import Conv3x
from hone.compiler.templates.cutlass.gemm3x import Gemm3x
from hone.compiler.templates.cutlass.persistent import Persistent
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.templates.cutlass.render import render
from hone.compiler.templates.cutlass.tiles3x import COOPERATIVE, PINGPONG
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.compiler.workload import TensorType
from hone.engines.tvm import aligned_empty
from hone.kernels import Entry
from tests.cutlass.fused import attention, convolutions, products
from tests.cutlass.workloads import chain, conv2d, matmul, operand

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(1800)]

GEMM, CONV, PAIR, ATTENTION = Gemm3x(), Conv3x(), Persistent(), FusedAttention()
MAX_SPILL_BYTES = 32

BIAS_GELU_RESIDUALS = chain(("add", operand(2)), "gelu_tanh", ("add", operand(3)), ("multiply", operand(4)))


def gemm(dtype="float16", m=1280, **given):
    n = 3072
    extra = [((n,), "float32"), ((m, n), dtype), ((m, n), dtype)]
    return matmul((m, 768), (768, n), dtype, epilogue=BIAS_GELU_RESIDUALS, extra=extra, **given)


def scaled_gemm():
    """An operand over rows and one for all, beside one over columns."""
    extra = [((2048,), "bfloat16"), ((1152, 1), "float32"), ((1,), "float32")]
    epilogue = chain(("add", operand(2)), ("multiply", operand(3)), ("add", operand(4)), "relu")
    return matmul((1152, 4096), (4096, 2048), "bfloat16", epilogue=epilogue, extra=extra)


def gemm_with_residual():
    extra = [((3072,), "float16"), ((1280, 3072), "float16")]
    epilogue = chain(("add", operand(2)), "silu", ("add", operand(3)))
    return matmul((1280, 768), (768, 3072), epilogue=epilogue, extra=extra)


def conv(dtype="float16", **given):
    data, weight, output = (8, 28, 28, 64), (128, 3, 3, 64), (8, 14, 14, 128)
    extra = [((128,), dtype), (output, dtype)]
    epilogue = chain(("add", operand(2)), ("add", operand(3)), "relu")
    return conv2d(data, weight, dtype, strides=(2, 2), padding=(1, 1, 1, 1), epilogue=epilogue, extra=extra, **given)


def summed_gemm():
    """A sum for each of four batches of rows that share their weight."""
    epilogue = chain(("add", operand(2)), "relu", ("add", operand(3)), "column_sum")
    extra = [((256,), "float16"), ((4, 128, 256), "float16")]
    return matmul((4, 128, 512), (512, 256), epilogue=epilogue, extra=extra, output=(4, 256), out_dtype="float32")


def pooled_conv():
    workload = conv2d((1, 14, 14, 512), (512, 3, 3, 512), padding=(1, 1, 1, 1), epilogue=chain("relu", "column_sum"))
    return replace(workload, output=TensorType((1, 512), "float32"))


def pair(middle, columns, dtype="float16", vector="float16"):
    return products(
        16384, 256, middle, columns, dtype,
        epilogue0=chain(("add", operand(3)), "relu"), epilogue=chain(("add", operand(4)), "relu"),
        extra=[((middle,), vector), ((columns,), vector)],
    )  # fmt: skip


def pair_of_convolutions(channels, columns):
    extra = [((channels,), "float32")] * 2 + [((columns,), "float32"), ((32, 56, 56, columns), "float16")]
    return convolutions(
        (32, 56, 56, channels), (channels, 3, 3, channels), columns, extra=extra,
        epilogue0=chain(("multiply", operand(3)), ("add", operand(4)), "hardswish"),
        epilogue=chain(("add", operand(5)), "relu", ("add", operand(6))),
    )  # fmt: skip


def heads(depth=64, dtype="float16", *, masked=True):
    mask = (2, 1, 1, 128) if masked else None
    return attention(heads=12, queries=128, keys=128, depth=64, values=depth, dtype=dtype, mask=mask, output="bshd")


def with_parameters(**wanted):
    return lambda candidate: all(candidate[name] == value for name, value in wanted.items())


#: Products, and sums of tiles that are added in memory.
SUMS = r"HGMMA\.64x[\s\S]*REDG\.E\.ADD\.F32"
RESIDENT, STAGED = with_parameters(shared=0), with_parameters(shared=1)
#: Name: (template, workload, device, which of its candidates, what the machine code must hold).
KERNELS = {
    "gemm f16 pingpong sm_90a": (GEMM, gemm(), "h100", with_parameters(schedule=PINGPONG), r"HGMMA\.64x"),
    "gemm bf16 stream-k sm_90a": (GEMM, scaled_gemm(), "h100", with_parameters(stream_k=1), r"HGMMA\.64x"),
    "gemm tf32 cooperative sm_90a": (
        GEMM,
        gemm("float32", math="tf32"),
        "h100",
        with_parameters(schedule=COOPERATIVE, stream_k=0),
        r"HGMMA\.64x[0-9]+x8",
    ),
    "gemm int8 sm_90a": (
        GEMM,
        matmul((1280, 768), (768, 3072), "int8", out_dtype="int32"),
        "h100",
        with_parameters(stream_k=0),
        r"IGMMA\.64x",
    ),
    "gemm column sums pingpong sm_90a": (GEMM, summed_gemm(), "h100", with_parameters(schedule=PINGPONG), SUMS),
    "gemm column sums cooperative sm_90a": (GEMM, summed_gemm(), "h100", with_parameters(schedule=COOPERATIVE), SUMS),
    "conv global pooling sm_90a": (CONV, pooled_conv(), "h100", with_parameters(), SUMS),
    "gemm f16 sm_100a": (GEMM, gemm_with_residual(), "b200", with_parameters(), r"UTCHMMA"),
    "conv f16 sm_90a": (CONV, conv(), "h100", with_parameters(), r"HGMMA\.64x"),
    "conv bf16 sm_90a": (CONV, conv("bfloat16"), "h100", with_parameters(), r"HGMMA\.64x[0-9]+x16\.F32\.BF16"),
    "conv tf32 sm_90a": (CONV, conv("float32", math="tf32"), "h100", with_parameters(), r"HGMMA\.64x[0-9]+x8"),
    "pair in registers sm_75": (PAIR, pair(64, 64), "t4", RESIDENT, r"HMMA\.1688\.F32"),
    "pair in registers sm_80": (PAIR, pair(64, 128), "a100", RESIDENT, r"HMMA\.16816\.F32"),
    "pair in shared memory sm_80": (PAIR, pair(64, 256, vector="float32"), "a100", STAGED, r"HMMA\.16816\.F32"),
    "pair bf16 sm_90a": (PAIR, pair(128, 64, "bfloat16", "bfloat16"), "h100", STAGED, r"HMMA\.16816\.F32\.BF16"),
    "convolutions in registers sm_80": (PAIR, pair_of_convolutions(64, 128), "a100", RESIDENT, r"HMMA\.16816\.F32"),
    "convolutions in shared memory sm_86": (PAIR, pair_of_convolutions(48, 48), "a10", STAGED, r"HMMA\.16816\.F32"),
    "convolutions in shared memory sm_75": (PAIR, pair_of_convolutions(48, 48), "t4", STAGED, r"HMMA\.1688\.F32"),
    "attention f16 sm_80": (ATTENTION, heads(), "a100", with_parameters(queries=64, keys=64), r"HMMA"),
    "attention bf16 deep values sm_90a": (
        ATTENTION,
        heads(256, "bfloat16", masked=False),
        "h100",
        with_parameters(queries=64, keys=128),
        r"HMMA\.[0-9]+\.F32\.BF16",
    ),
    "attention f16 sm_75": (ATTENTION, heads(), "t4", with_parameters(queries=32), r"HMMA\.1688\.F32"),
    "attention f32 sm_86": (ATTENTION, heads(dtype="float32"), "a10", with_parameters(), r"HMMA\.1688\.F32\.TF32"),
}


@pytest.fixture(params=KERNELS)
def built(request, kernel_cache):
    template, workload, device, wanted, sass = KERNELS[request.param]
    target = CudaTarget.preset(device)
    candidate = next(one for one in template.candidates(workload, target) if wanted(one))
    kernel = published_kernel(kernel_cache, template, workload, candidate, target)
    entry = kernel_cache.get("kernels", kernel.digest, f"sm_{target.arch}")
    assert isinstance(entry, Entry)
    return kernel, entry.manifest, template, workload, target, sass


def test_kernels_hold_the_instructions_that_they_are_for_and_spill_nothing(built):
    kernel, manifest, template, _, target, sass = built
    found = find_toolchain().disassemble(kernel.path)
    assert re.search(sass, found), f"no {sass} in {sorted(set(re.findall(r'[A-Z]*MMA[.A-Za-z0-9]*', found)))}"
    if template in (GEMM, CONV):
        assert "UTMALDG" in found, "tiles do not come by TMA"
        assert ("UTMASTG" in found) == (sass != SUMS), "only whole tiles go by TMA"
    assert 0 < manifest["shared_bytes"] <= target.max_shared_memory_per_block
    assert manifest["resources"]
    for resources in manifest["resources"]:
        assert resources["spill_store_bytes"] <= MAX_SPILL_BYTES
        assert resources["registers"] <= target.max_registers_per_thread


def test_libraries_load_without_a_gpu_and_refuse_what_is_not_on_one(built):
    kernel, _, _, workload, _, _ = built
    memory = aligned_empty((16,), np.dtype(np.float32))
    tensors = [tvm_ffi.from_dlpack(memory)] * (len(workload.inputs) + 2)
    with pytest.raises((TypeError, ValueError), match=f"{kernel.name}: input 0"):
        kernel(*tensors)


def compile_together(template, workload, candidates, target, folder, arch):
    """All candidates' sources as one, each in a namespace of its own. Raises BuildFailed if one does not compile."""
    sources, folders = [], ()
    for number, candidate in enumerate(candidates):
        recipe = template.recipe(workload, candidate, target)
        folders = [find_toolchain().cutlass / name for name in recipe.folders]
        source = render(recipe.source, {**recipe.values, "name": f"sweep{number}"})
        sources.append(re.sub(r"\bhone\b", f"hone{number}", source))
    together = "\n".join(sources)
    return find_toolchain().compile(
        together, folder / "sweep.so", replace(target, arch=arch), num_gib=4.0, folders=folders
    )


@pytest.mark.parametrize("template, workload", [(GEMM, gemm()), (CONV, conv())])
def test_every_tile_is_one_that_cutlass_takes(template, workload, tmp_path):
    target = CudaTarget.preset("h100")
    tiles = {}
    for candidate in template.candidates(workload, target):
        shape = tuple(candidate[name] for name in ("tile_m", "tile_n", "schedule"))
        tiles.setdefault(shape, candidate)
    assert len(tiles) >= 6
    report = compile_together(template, workload, tiles.values(), target, tmp_path, "80")
    assert len(report.resources) >= len(tiles)


PAIRS = {
    "products sm_80": ("a100", pair(64, 128)),
    "products sm_75": ("t4", pair(64, 128)),
    "narrow products sm_80": ("a100", pair(48, 24)),
    "convolutions sm_80": ("a100", pair_of_convolutions(64, 64)),
    "convolutions sm_75": ("t4", pair_of_convolutions(48, 48)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_tile_of_a_pair_compiles_and_none_spills(name, tmp_path):
    device, workload = PAIRS[name]
    target = CudaTarget.preset(device)
    candidates = [c for c in PAIR.candidates(workload, target) if c["stages"] != 4]
    report = compile_together(PAIR, workload, candidates, target, tmp_path, target.arch)
    assert len(report.resources) == len(candidates) >= 2
    for resources in report.resources:
        assert resources.spill_store_bytes <= MAX_SPILL_BYTES, resources.function
