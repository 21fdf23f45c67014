"""Schedules for the functions of a model that no kernel takes, searched by MetaSchedule on this GPU. In the child.

A round of proposals is compiled by one run of nvcc and measured by the profiler, in turns with dlight's schedule of the
same function. What was found, and that nothing was, is kept as decisions, as for CPUs.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.choices import Choices
from hone.compiler.cuda.functions import build_cuda_functions, remaining_cuda_functions, search_cuda_schedule
from hone.compiler.cuda.partition import Templates
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.metaschedule import Progress, RemainingFunction, SearchResult
from hone.compiler.phases.schedule import function_digest
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.engines.tvm_library import load_library
from hone.kernels import DeviceKey, KernelsCache, digest_of
from hone.tuning.artifacts import Sources
from hone.tuning.profiler import Profiler, Skipped, Subject
from hone.tuning.schedules import FunctionSearch, Tell
from hone.types import NUMPY_DTYPES, Array

#: Proposals that one run of nvcc compiles.
_NUM_TOGETHER = 8
_DTYPES = {dtype.name: dtype for datatype, dtype in NUMPY_DTYPES.items() if datatype != "BYTES"}
_RELATIVE = {"float16": 1e-2, "bfloat16": 4e-2}

Call = Callable[..., Any]
"""Launches a function on its tensors: inputs, then outputs."""


class FunctionSource(Protocol):
    """Makes scheduled functions callable."""

    def build(self, funcs: Sequence[Any]) -> list[Call | BuildFailed]: ...


class BuiltFunctions:
    """By nvcc, for the GPU of this process."""

    def __init__(self, target: CudaTarget) -> None:
        self._target = target

    def build(self, funcs: Sequence[Any]) -> list[Call | BuildFailed]:
        named = {f"run{at}": func for at, func in enumerate(funcs)}
        try:
            library = build_cuda_functions(named, self._target, find_toolchain())
            with tempfile.TemporaryDirectory(prefix="hone-functions-") as folder:
                path = Path(folder) / "functions.so"
                library.export(path)
                module = load_library(path)
        except (BuildFailed, LinkFailed) as problem:
            if len(funcs) == 1:
                return [problem if isinstance(problem, BuildFailed) else BuildFailed("a function", problem)]
            return [one for func in funcs for one in self.build([func])]  # the others may build
        return [module[name] for name in named]


class GpuBench:
    """See `metaschedule.Bench`. The first function that is timed is the reference of all others."""

    def __init__(self, function: RemainingFunction, profiler: Profiler, source: FunctionSource, num_sets: int) -> None:
        self._function, self._profiler, self._source = function, profiler, source
        rng = np.random.default_rng(0)
        arrays = [_random(param, rng) for param in function.func.params]
        device, stream = profiler.device, profiler.stream
        self._sets = [[device.tensor_of(array, stream) for array in arrays] for _ in range(num_sets)]
        self._output = arrays[-1]
        self._reference: Subject | None = None
        self._best_ns = math.inf

    @staticmethod
    def num_bytes(function: RemainingFunction) -> int:
        """Of one set of operands."""
        return sum(
            math.prod(int(dim) for dim in param.shape) * _DTYPES[str(param.dtype)].itemsize
            for param in function.func.params
        )

    def times(self, funcs: Sequence[Any], until: float) -> list[float]:
        """Raises DeviceLost."""
        found: list[float] = []
        while len(found) < len(funcs):
            if time.monotonic() >= until:
                return found + [math.nan] * (len(funcs) - len(found))
            some = funcs[len(found) : len(found) + _NUM_TOGETHER]
            for func, call in zip(some, self._source.build(some), strict=True):
                if isinstance(call, BuildFailed):
                    found.append(math.nan if call.is_of_the_machine else math.inf)
                else:
                    found.append(self._time(func, call))
        return found

    def agrees(self, func: Any, reference: Any) -> bool:
        """Raises DeviceLost."""
        results = []
        for each in (func, reference):
            (call,) = self._source.build([each])
            if isinstance(call, BuildFailed):
                if call.is_of_the_machine:
                    raise call
                return False
            self._poison()
            if self._profiler.run_once(self._subject(each, call)) is not None:
                return False
            results.append(self._last_tensor())
        got, expected = results
        relative = _RELATIVE.get(self._output.dtype.name, 1e-4)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        return bool(np.allclose(got, expected, rtol=relative, atol=relative * scale))

    def close(self) -> None:
        if self._reference is not None:
            self._profiler.release(self._reference)

    def _subject(self, func: Any, call: Call) -> Subject:
        digest = digest_of({"function": self._function.digest, "schedule": function_digest(func)})
        return Subject(digest, lambda arguments: call(*arguments), self._sets)

    def _time(self, func: Any, call: Call) -> float:
        subject = self._subject(func, call)
        if self._profiler.trials.blocked(subject.digest) is not None:
            return math.inf
        if self._profiler.run_once(subject) is not None:
            return math.inf
        if self._reference is None:
            timed = self._profiler.settle(subject)
            if not isinstance(timed, Skipped):
                self._reference = subject
        else:
            timed = self._profiler.measure(subject, self._reference, self._best_ns)
        if isinstance(timed, Skipped):
            return math.inf
        self._best_ns = min(self._best_ns, timed.ns)
        return timed.ns / 1e3

    def _poison(self) -> None:
        """Leave nothing in the output that a function could pass off as its own."""
        device, stream, output = self._profiler.device, self._profiler.stream, self._output
        blank = np.full(output.shape, 77 if output.dtype.kind in "biu" else np.nan, output.dtype)
        device.upload(blank, self._sets[0][-1], device.pinned.take(blank.nbytes), stream)
        device.cuda.synchronize(stream)

    def _last_tensor(self) -> Array:
        device, stream = self._profiler.device, self._profiler.stream
        array = device.download(self._sets[0][-1], self._output.shape, self._output.dtype, stream)
        device.cuda.synchronize(stream)
        values: Array = array.astype(np.float64)
        return values


class GpuScheduleSearch(FunctionSearch):
    """On a GPU. `choices` are what the model is compiled with but for schedules: they tell what is left of it."""

    max_function_seconds = 60.0
    #: Modelled: what memory takes at least. dlight's schedule may take many times that.
    min_microseconds = 10.0

    def __init__(
        self,
        cache: KernelsCache,
        device: DeviceKey,
        sources: Sources,
        target: CudaTarget,
        templates: Templates,
        profiler: Profiler,
        source_of: Callable[[RemainingFunction], FunctionSource],
    ) -> None:
        super().__init__(cache, device, sources, {"architecture": target.arch})
        self._target, self._templates, self._profiler, self._source_of = target, templates, profiler, source_of
        self.choices = Choices()

    def find(self, model: Any) -> list[RemainingFunction]:
        return remaining_cuda_functions(model, self._target, self.choices, templates=self._templates)

    def search(self, function: RemainingFunction, seconds: float, tell: Tell, known: Progress) -> SearchResult | None:
        """Raises DeviceLost."""
        num_sets = self._profiler.num_sets(GpuBench.num_bytes(function))
        if isinstance(num_sets, Skipped):
            return None
        bench = GpuBench(function, self._profiler, self._source_of(function), num_sets)
        try:
            return search_cuda_schedule(function, self._target, bench, seconds, tell, known)
        finally:
            bench.close()


def _random(param: Any, rng: np.random.Generator) -> Array:
    shape, dtype = [int(dim) for dim in param.shape], _DTYPES[str(param.dtype)]
    is_float = str(param.dtype).startswith(("float", "bfloat"))
    drawn = rng.standard_normal(shape) if is_float else rng.integers(0, 2, shape)
    array: Array = drawn.astype(dtype)
    return array
