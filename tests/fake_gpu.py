"""A GPU whose kernels are host twins and whose timings come from a table, through the interfaces of a real one.

The table is JSON: nanoseconds by the candidate's text (`kernels`, or `default_ns`), of a whole model (`model_ns`);
candidates that break the device (`breaks`, or the one that is tried as `breaks_at`-th), hang (`hangs`), or refuse
(`refuses`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from dataclasses import replace

import numpy as np

from hone.compiler.build import BuildFailed, build_functions
from hone.compiler.cuda.schedule import plain_cuda_schedule
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from hone.engines.cuda_device import CPU_TYPE, CudaDevice
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.tvm_runtime import TvmRuntime
from hone.kernels.digest import digest_of
from hone.kernels.gpu_key import find_gpus
from hone.tuning.gpu_parts import CachedKernels, GpuParts
from tests.fake_cuda import H100, LAUNCH_FAILURE, SUCCESS, FakeCudart, FakeNvml

AMPERE = {**H100, "name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0), "num_sms": 108, "l2_bytes": 1 << 20}
COPY_BYTES_PER_NS = 25.0
TARGET = CudaTarget.preset("a100").as_twin()


def device_key(card=AMPERE):
    (gpu,) = find_gpus(FakeNvml(Name=card["name"]), CudaRuntime(FakeCudart([card])), environment={})
    return gpu.key


class FakeGpu(CudaDevice):
    """Its clock is the host's, less what twins took, plus what the table says."""

    def __init__(self, table, num_threads=1):
        self.table = table
        self.cudart = FakeCudart([AMPERE])
        super().__init__(CudaRuntime(self.cudart), TvmRuntime.load(num_threads), 0, device_type=CPU_TYPE)
        self._depth = 0
        self._excluded_ns = 0

    def clock(self):
        return time.perf_counter_ns() - self._excluded_ns + int(self.cudart.now_ns)

    def upload(self, array, tensor, staging, stream):
        with self._taking(array.nbytes / COPY_BYTES_PER_NS):
            super().upload(array, tensor, staging, stream)

    def download(self, tensor, shape, dtype, stream):
        with self._taking(self.table.get("latency_ns", 5_000.0)):
            return super().download(tensor, shape, dtype, stream)

    @contextlib.contextmanager
    def _taking(self, ns):
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._excluded_ns += time.perf_counter_ns() - began
            self.cudart.now_ns += ns

    @contextlib.contextmanager
    def launching_on(self, stream):
        began, now = time.perf_counter_ns(), self.cudart.now_ns
        self._depth += 1
        try:
            with super().launching_on(stream):
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._excluded_ns += time.perf_counter_ns() - began
                if self.cudart.now_ns == now:  # no kernel said what it takes: a whole model
                    self.cudart.now_ns += self.table.get("model_ns", 1000.0)


class FakeKernels(CachedKernels):
    """Twins from the cache, which take what the table says. All candidates share a twin, but each has its own name."""

    def __init__(self, cache, gpu):
        super().__init__(cache, TARGET)
        self.gpu = gpu
        self.ran = []

    def digest_of(self, template, workload, candidate):
        return digest_of({"twin": super().digest_of(template, workload, candidate), "of": str(candidate)})

    def has(self, digest):
        return digest in self.gpu.table.get("there", ())

    def get(self, template, workload, candidate):
        kernel = super().get(template, workload, candidate)
        return FakeKernel(self, kernel, self.digest_of(template, workload, candidate), str(candidate))


class FakeKernel:
    def __init__(self, kernels, twin, digest, text):
        self.kernels, self.twin, self.digest, self.text = kernels, twin, digest, text
        self.done = False

    def __call__(self, *tensors):
        table, cudart = self.kernels.gpu.table, self.kernels.gpu.cudart
        if self.text in table.get("refuses", ()):
            raise RuntimeError("can_implement: misaligned operand")
        if not self.done:  # the same twin for all: once is enough to see that it computes
            self.kernels.ran.append(self.text)
            self.twin(*tensors)
            self.done = True
        if self.text in table.get("breaks", ()) or len(self.kernels.ran) == table.get("breaks_at", 0):
            cudart.failure = LAUNCH_FAILURE
        if self.text in table.get("hangs", ()):
            cudart.hangs = True
        cudart.now_ns += table.get("kernels", {}).get(self.text, table.get("default_ns", 50_000.0))

    def __getattr__(self, name):
        return getattr(self.twin, name)


class FillingKernels(FakeKernels):
    """Kernels that need no compiler: all compute zeros, and take what the table says."""

    def get(self, template, workload, candidate):
        return FakeKernel(self, _fill, self.digest_of(template, workload, candidate), str(candidate))


def _fill(*tensors):
    output = np.from_dlpack(tensors[-1])
    ctypes.memset(output.ctypes.data, 0, output.nbytes)


class FakeFunctions:
    """A function that no kernel takes: whatever the schedule, it computes on the host, and takes what the table says of
    dlight's schedule (`plain_function_ns`) or of any other (`function_ns`)."""

    def __init__(self, function, gpu):
        self.function, self.gpu = function, gpu
        host = CpuTarget.detect(num_threads=1)
        self.run = build_functions({"run": plain_schedule(function.func, host).func}, host).function("run")
        self.plain = plain_cuda_schedule(function.func, TARGET).script(show_meta=False)
        self.built = []

    def build(self, funcs):
        return [self._call(func) for func in funcs]

    def _call(self, func):
        table = self.gpu.table
        is_plain = func.script(show_meta=False) == self.plain
        self.built.append("plain" if is_plain else "searched")
        if not is_plain and len(self.built) % 5 == 0:
            return BuildFailed("a function", RuntimeError("nvcc refuses every fifth"))

        def call(*tensors):
            self.run(*tensors)
            self.gpu.cudart.now_ns += table.get("plain_function_ns" if is_plain else "function_ns", 1e6)

        return call


def parts_of(table, cache):
    gpu = FakeGpu(table)
    parts = GpuParts(gpu, TARGET, FakeKernels(cache, gpu), lambda function: FakeFunctions(function, gpu))
    return replace(parts, clock=gpu.clock)


def healed(parts):
    """The device as a new process finds it."""
    parts.device.cudart.failure, parts.device.cudart.hangs, parts.device.cuda.lost = SUCCESS, False, ""


def read_table(path):
    return json.loads(path.read_text(encoding="utf-8"))


class Sharing:
    """A cache whose kernels are another's."""

    def __init__(self, own, twins):
        self._own, self._twins = own, twins

    def get(self, kind, digest, scope="", **more):
        return (self._twins if kind == "kernels" else self._own).get(kind, digest, scope, **more)

    def get_or_build(self, kind, *arguments, **more):
        return (self._twins if kind == "kernels" else self._own).get_or_build(kind, *arguments, **more)

    def release(self, entry):
        return (self._twins if entry.kind == "kernels" else self._own).release(entry)

    def __getattr__(self, name):
        return getattr(self._own, name)
