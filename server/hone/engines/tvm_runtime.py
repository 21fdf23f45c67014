"""TVM's runtime without TVM's compiler: two shared libraries, 4 MB, loaded by path.

The `tvm` package costs 150 MB and is not for the server. What runs an artifact is its runtime library, through
tvm-ffi. Loading happens once a process, by whoever composes it; the numbers of threads are set there and then.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_ffi

from hone.engines.tvm_library import Libraries
from hone.engines.tvm_parallel import ParallelPool
from hone.errors import EngineError

#: About 100 µs.
_SPIN_COUNT = 15_000

_LIBRARIES = ("libtvm_runtime.so", "libtvm_runtime_extra.so")
_CUDA_LIBRARY = "libtvm_runtime_cuda.so"


@dataclass(frozen=True, slots=True)
class TvmRuntime:
    """The loaded runtime. `num_threads` run the loops of an instance that tells no number of its own."""

    num_threads: int
    clear_memory: Callable[[], None]
    """Gives the pooled memory that no tensor uses back to the system, for the whole process."""
    view: Callable[..., Any]
    """(tensor, shape, dtype, byte offset) -> the same memory with another type."""
    allocate: Callable[..., Any]
    """(shape, dtype, device, scope or None) -> an uninitialised tensor on that device."""
    libraries: Libraries = field(default_factory=Libraries)
    """Compiled code in use by any engine."""
    parallel: ParallelPool = field(default_factory=ParallelPool)
    """Who runs its parallel loops; loaded with the first artifact that has any."""

    @classmethod
    def load(cls, num_threads: int, folder: Path | None = None) -> TvmRuntime:
        """Load the libraries (`folder`: where they are, else in the installed package).

        Raises EngineError when they are missing or do not load.
        """
        folder = folder or _installed()
        # TVM's own pool, which runs code that is loaded before hone's (see `tvm_parallel`), reads these. It would use
        # half of the machine's cores, and bind the calling thread and its workers to the first ones, whoever else
        # (another instance, ONNX Runtime) runs there.
        os.environ["TVM_NUM_THREADS"] = str(num_threads)
        os.environ["TVM_BIND_THREADS"] = "0"
        # Workers wait for the next kernel, spinning: for 2 ms by default, which takes a core from everybody else long
        # after a run has ended. The kernels of one run follow each other faster than this.
        os.environ["TVM_THREAD_POOL_SPIN_COUNT"] = str(_SPIN_COUNT)
        for name in _LIBRARIES:
            try:
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            except OSError as problem:
                raise EngineError(
                    f"TVM's runtime library {name} did not load: {_tail(problem)}; install apache-tvm again"
                ) from problem
        return cls(
            num_threads=num_threads,
            clear_memory=_function("vm.builtin.memory_manager.clear"),
            view=_function("runtime.TVMTensorCreateView"),
            allocate=_function("runtime.TVMTensorAllocWithScope"),
        )


def load_cuda(folder: Path | None = None) -> None:
    """TVM's runtime for NVIDIA GPUs, beside the runtime itself. The CUDA runtime (`CudaRuntime.load`) is loaded before.

    Raises EngineError where it is missing, or where there is no driver.
    """
    try:
        ctypes.CDLL(str((folder or _installed()) / _CUDA_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError as problem:
        reason = str(problem).removesuffix(": cannot open shared object file: No such file or directory")
        raise EngineError(
            f"TVM's runtime for NVIDIA GPUs did not load ({Path(reason).name} is missing or does not fit):"
            " it needs NVIDIA's driver and the CUDA runtime"
        ) from problem


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = tvm_ffi.get_global_func(name, allow_missing=True)
    if found is None:
        raise EngineError(f"TVM's runtime has no function '{name}': apache-tvm is of another version than hone expects")
    return found


def _installed() -> Path:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise EngineError("TVM's runtime library was not found: apache-tvm is not installed")
    return Path(spec.origin).parent / "lib"


def _tail(problem: OSError) -> str:
    """The loader's reason without the path before it."""
    return str(problem).rsplit(": ", 1)[-1]
