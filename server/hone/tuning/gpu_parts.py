"""What the compile step for GPUs works with: the device, its target, kernels from the cache and functions from nvcc.

Tests replace these parts by what stands for a GPU. In the child only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hone.compiler.build import BuildFailed
from hone.compiler.cuda.partition import CudaTemplate, Templates
from hone.compiler.cuda_target import CudaTarget, preset_named
from hone.compiler.metaschedule import RemainingFunction
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.published import published_kernel, scope_of
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.workload import Workload
from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.tvm_runtime import TvmRuntime, load_cuda
from hone.kernels import DeviceKey, Entry, KernelsCache
from hone.tuning.budget import OWN_BYTES
from hone.tuning.gpu_schedules import BuiltFunctions, FunctionSource
from hone.tuning.gpu_search import Kernel
from hone.tuning.group import resident_bytes
from hone.tuning.measure import Clock
from hone.tuning.wire import Message

_GIB = 1 << 30


class CachedKernels:
    """See `gpu_search.KernelSource`: the kernels cache, and nvcc for what it does not hold.

    `memory_bytes` is what the process may take with all that it starts; kernels whose compiler takes more are only for
    those who have built them before.
    """

    def __init__(self, cache: KernelsCache, target: CudaTarget, memory_bytes: int | None = None) -> None:
        self._cache, self._target, self._memory_bytes = cache, target, memory_bytes

    def digest_of(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> str:
        return template.digest(workload, candidate, self._target)

    def has(self, digest: str) -> bool:
        return isinstance(self._cache.get("kernels", digest, scope_of(self._target)), Entry)

    def get(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> Kernel:
        cutlass: Any = template  # all that are built by nvcc
        compiler = int(cutlass.recipe(workload, candidate, self._target).num_gib * _GIB)
        needed = compiler + max(OWN_BYTES, resident_bytes([os.getpid()]))
        is_too_much = self._memory_bytes is not None and needed > self._memory_bytes
        if is_too_much and not self.has(self.digest_of(template, workload, candidate)):
            told = (
                f"its compiler takes {needed >> 20} MiB with this process, and tuning may take"
                f" {int(self._memory_bytes or 0) >> 20}: raise --tuning-memory-mib to {needed >> 20} where so much is"
                " free, or build it before by `hone kernels build`"
            )
            raise BuildFailed(str(candidate), MemoryError(told))
        return published_kernel(self._cache, cutlass, workload, candidate, self._target)


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What the compile step works with, which tests replace by what stands for a GPU."""

    device: CudaDevice
    target: CudaTarget
    kernels: CachedKernels
    functions: Callable[[RemainingFunction], FunctionSource]
    templates: Templates = CUTLASS_TEMPLATES
    clock: Clock = time.perf_counter_ns
    """What the gate measures by."""


def open_gpu(spec: Message, cache: KernelsCache, device: DeviceKey) -> GpuParts:
    """The GPU of a job. Raises EngineError where there is no driver or runtime, ValueError for an architecture that
    kernels are not made for."""
    cuda = CudaRuntime.load()
    runtime = TvmRuntime.load(int(spec["run_threads"]))
    load_cuda()
    target = target_of(device)
    return GpuParts(
        CudaDevice(cuda, runtime, int(spec.get("ordinal", 0))),
        target,
        CachedKernels(cache, target, spec.get("memory_bytes")),
        lambda function: BuiltFunctions(target),
    )


def target_of(device: DeviceKey) -> CudaTarget:
    """The compiler's view of a device key. What its maker states of speed is scaled from a card of its architecture
    where the key does not tell, and to a slice of a card by its share. Raises ValueError for an architecture that
    kernels are not made for."""
    fields: Any = device.fields
    arch = str(fields["architecture"]).removeprefix("sm_")
    like = preset_named(str(fields["name"])) or CudaTarget.typical(arch)
    num_sms, l2_bytes = int(fields["num_sms"]), int(fields["l2_bytes"])
    clock, bits = fields.get("memory_clock_mhz"), fields.get("memory_bus_bits")
    # Both edges of the clock carry data.
    memory_gbps = 2 * clock * bits / 8 / 1000 if clock and bits else like.memory_gbps
    if fields.get("mig"):  # caches are cut like the memory that they stand before
        memory_gbps *= min(1.0, l2_bytes / like.l2_bytes)
    return CudaTarget.of_architecture(
        arch,
        name=str(fields["name"]),
        num_sms=num_sms,
        l2_bytes=l2_bytes,
        tensor_tflops=like.tensor_tflops * num_sms / like.num_sms,
        memory_gbps=memory_gbps,
    )
