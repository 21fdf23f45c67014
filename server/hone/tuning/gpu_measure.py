"""Measures single workloads on this machine's GPU, for a person who asks: no server and no child, no model.

What is found is kept as the decisions that a search for a model would keep, and so a later one does not ask again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from hone.compiler.cuda.partition import Wanted
from hone.compiler.workload import Workload
from hone.engines.cuda_runtime import CudaError
from hone.kernels import KernelsCache
from hone.kernels.gpu_key import Gpu
from hone.tuning.artifacts import Sources
from hone.tuning.budget import num_compilers
from hone.tuning.gpu_parts import open_gpu
from hone.tuning.gpu_search import GpuSearch
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.profiler import DeviceLost, Profiler

#: Of the host: it only launches.
_NUM_THREADS = 1


def measure_workloads(
    workloads: Sequence[Workload],
    cache: KernelsCache,
    gpu: Gpu,
    precision: str,
    seconds: float,
    tell: Callable[[float, str], None],
) -> str:
    """Decisions for as many as the time is enough for, the heaviest first. Why it ended early; empty where it did not.

    Raises EngineError where there is no driver or runtime.
    """
    parts = open_gpu({"run_threads": _NUM_THREADS, "ordinal": gpu.ordinal}, cache, gpu.key)
    trials = KernelTrials(cache, gpu.key.digest)
    profiler = Profiler(parts.device, trials)
    search = GpuSearch(
        cache,
        gpu.key,
        parts.target,
        Sources.installed(),
        profiler,
        parts.kernels,
        parts.templates,
        precision=precision,
        num_builders=num_compilers(gpu.key.architecture, None, len(os.sched_getaffinity(0))),
    )
    try:
        search.decide(Wanted(dict.fromkeys(workloads, 1), {}), seconds, tell)
    except (DeviceLost, CudaError) as problem:
        return f"{problem}; the kernel is not tried again: ask once more for the rest"
    finally:
        if not parts.device.cuda.lost:
            profiler.close()
        trials.close()
    return ""
