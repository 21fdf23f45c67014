"""The GPUs that this server may use, found once when it starts."""

from __future__ import annotations

import logging

from hone.engines.cuda_runtime import CudaRuntime
from hone.errors import EngineError
from hone.kernels.device_key import package_version
from hone.kernels.gpu_key import Gpu, find_gpus

_log = logging.getLogger(__name__)


def kind_of(gpu: Gpu) -> str:
    """What executors and specializations call its kind of device."""
    return f"gpu {gpu.key.digest[:16]}"


def detect_gpus() -> tuple[Gpu, ...]:
    """None, with a line in the log, where there is no driver, no CUDA runtime or no GPU. Takes a millisecond without a
    driver, and makes no context with one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        _log.info("no GPU is used: NVML is not available: %s", problem)
        return ()
    try:
        gpus = tuple(find_gpus(pynvml, CudaRuntime.load(), nvcc=package_version("nvidia-cuda-nvcc")))
    except (pynvml.NVMLError, EngineError) as problem:
        _log.warning("GPUs are here and are not used: %s", problem)
        return ()
    finally:
        pynvml.nvmlShutdown()
    for gpu in gpus:
        _log.info("GPU %d: %s (%s)", gpu.ordinal, gpu.key.name, gpu.uuid)
    return gpus
