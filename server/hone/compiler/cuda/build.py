"""Phase 9: a lowered module becomes a VM executable with machine code for one GPU, made by nvcc and without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from hone.compiler.build import BuildFailed, Library, build_executable, tells_of_want
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cutlass.slots import compiler_slot
from hone.compiler.templates.cutlass.toolchain import CudaToolchain, NvccFailed

#: TVM looks a compiler for CUDA up under this name; its own wants nvcc on PATH, or NVRTC.
_CALLBACK = "tvm_callback_cuda_compile"
_LOCK = threading.Lock()
_TIMEOUT_SECONDS = 600.0
#: Of memory, for a module's generated kernels.
_NUM_GIB = 1.0

#: float16 and bfloat16 with operators; no fast math: what may be approximate is said in the functions.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
    "--expt-relaxed-constexpr",
)


def build_module(mod: Any, target: CudaTarget, host: CpuTarget, toolchain: CudaToolchain | None) -> Library:
    """The module as an executable for the target's GPU, or for `host` where it is a twin.

    Raises BuildFailed; `toolchain` may be missing for twins alone.
    """
    if target.twin:
        return build_executable(mod, host)
    if toolchain is None:
        raise ValueError("a CUDA toolchain is needed to build for a GPU")
    try:
        with compiled_by(toolchain, target):
            built = relax.build(mod, target=target.tvm_target(), relax_pipeline=None, exec_mode="compiled")
    except BuildFailed:
        raise
    except Exception as problem:  # TVM raises whatever its passes raise
        raise BuildFailed("executable", problem) from problem
    return Library(built.mod)


@contextmanager
def compiled_by(toolchain: CudaToolchain, target: CudaTarget) -> Iterator[None]:
    """TVM's CUDA sources are compiled by this toolchain meanwhile. One build at a time: TVM has one such function."""

    def compile_source(source: str, *_: Any) -> bytearray:
        return bytearray(compile_device_code(str(source), toolchain, target))

    with _LOCK:
        before = tvm.get_global_func(_CALLBACK)
        tvm_ffi.register_global_func(_CALLBACK, compile_source, override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(_CALLBACK, before, override=True)


def compile_device_code(source: str, toolchain: CudaToolchain, target: CudaTarget) -> bytes:
    """CUDA source as a cubin for the target. Raises BuildFailed with nvcc's log."""
    with tempfile.TemporaryDirectory(prefix="hone-cuda-") as folder:
        path, output = Path(folder) / "module.cu", Path(folder) / "module.cubin"
        path.write_text(source, encoding="utf-8")
        command = [str(toolchain.nvcc), *_FLAGS, "--cubin", f"-arch=sm_{target.arch}", "-o", str(output), str(path)]
        try:
            with compiler_slot(_NUM_GIB) as slot:
                ran = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=False,
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    timeout=_TIMEOUT_SECONDS,
                    pass_fds=(slot,),
                )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise BuildFailed("device code", problem) from problem
        if ran.returncode != 0:
            log = ran.stdout + ran.stderr
            is_refusal = ran.returncode > 0 and not tells_of_want(log)
            failed = NvccFailed(f"exited with {ran.returncode}", log, is_refusal=is_refusal)
            raise BuildFailed("device code", failed)
        return output.read_bytes()
