"""The GPUs that this server may use, found once when it starts."""

from __future__ import annotations

import logging
from typing import Any

from hone.engines.cuda_runtime import CudaError, CudaRuntime
from hone.errors import EngineError
from hone.kernels.device_key import package_version
from hone.kernels.gpu_key import Gpu, find_gpus, nvcc_version

_log = logging.getLogger(__name__)

_NO_DRIVER = "NVML is not available"
_ANSWERED = "models on GPUs are answered by their baseline, and by what the cache holds for this machine"
#: Of cudaError.
_OLD_DRIVER, _NO_DEVICE = 35, 100


def kind_of(gpu: Gpu) -> str:
    """What executors and specializations call its kind of device."""
    return f"gpu {gpu.key.digest[:16]}"


def detect_gpus() -> tuple[Gpu, ...]:
    """None, with a line in the log, where there is no driver, no CUDA runtime or no GPU. Takes a millisecond without a
    driver, and makes no context with one."""
    gpus, problem = look_for_gpus()
    if problem.startswith(_NO_DRIVER):
        _log.info("no GPU is used: %s", problem)
    elif problem:
        _log.warning("GPUs are here and are not used, models run on the CPU: %s", problem)
    for gpu in gpus:
        _log.info("GPU %d: %s (%s)", gpu.ordinal, gpu.key.name, gpu.uuid)
    return gpus


def look_for_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs of this process, and why there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return (), f"{_NO_DRIVER}: {problem}"
    try:
        return tuple(find_gpus(pynvml, CudaRuntime.load(), nvcc=nvcc_version())), ""
    except CudaError as problem:
        return (), f"{problem}{_advice(pynvml, problem.code)}"
    except (pynvml.NVMLError, EngineError) as problem:
        return (), str(problem)
    finally:
        pynvml.nvmlShutdown()


def _advice(nvml: Any, code: int) -> str:
    """What to do about a failure of CUDA's first call."""
    if code == _OLD_DRIVER:
        try:
            version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        except nvml.NVMLError:
            return ": install a newer driver"
        return f": the driver is for CUDA {version // 1000}.{version % 1000 // 10} and older, install a newer one"
    if code == _NO_DEVICE:
        return ": is CUDA_VISIBLE_DEVICES empty, or were no GPUs given to this container?"
    return ""


def missing_cuda_tools() -> str:
    """What is missing to make code for GPUs; empty where nothing is."""
    if nvcc_version() == "none":
        return f"no nvcc is installed, neither from PyPI (pip install 'hone[cuda]') nor on PATH: {_ANSWERED}"
    if package_version("nvidia-cutlass") == "none":
        return f"CUTLASS's headers are not installed (pip install 'hone[cuda]'): {_ANSWERED}"
    return ""
