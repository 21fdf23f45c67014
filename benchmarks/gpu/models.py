"""B7: whole models against PyTorch, from arrays on the host to arrays on the host, in float16.

Ours is the tuned engine as the server runs it. PyTorch's side runs the same graph under a CUDA graph, eagerly or
compiled with max-autotune (under our graph too, which spares it `torch.compile`'s own checks of every call).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Lost
from benchmarks.gpu.journal import CRASHED, TRYING, Journal
from benchmarks.gpu.torch_graph import TorchGraph

_ROUNDS, _RUNS = 5, 10
#: A compilation is not begun with less time, until it is known what one takes.
_COMPILE_SECONDS = 75.0
#: Ours may be so far from float32, as a share of the root mean square, or some times as far as PyTorch's float16.
_TOLERANCE, _TIMES = 2e-2, 4.0

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Models:
    """`deadline` by `time.monotonic`. What is found goes to the journal."""

    def __init__(self, folder: Path, place: Any, journal: Journal, deadline: float) -> None:
        from hone.engines.cuda_device import CudaDevice
        from hone.engines.cuda_runtime import CudaRuntime
        from hone.engines.tvm_runtime import TvmRuntime, load_cuda

        libraries = folder / "tvm"
        cuda = CudaRuntime.load([libraries / "libcudart.so.13"])
        runtime = TvmRuntime.load(1, libraries)
        load_cuda(libraries)
        self._card = CudaDevice(cuda, runtime, 0)
        self._place, self._torch = place, place.torch
        self._folder, self._journal, self._deadline = folder, journal, deadline
        self._kernels = {path.stem: path for path in (folder / "kernels").glob("*.so")}

    def run(self, models: Sequence[Mapping[str, Any]], *, with_compile: bool) -> None:
        """All under a CUDA graph; or, as a second pass, also through torch.compile, the largest batches first.

        Raises Lost.
        """
        takes = _COMPILE_SECONDS
        ordered = sorted(models, key=lambda told: -told["batch"]) if with_compile else models
        for told in ordered:
            name = f"{told['name']}, {told['batch']}"
            label = f"{name} by torch.compile" if with_compile else name
            done = self._journal.by_name("model").get(name, {}).get("ms", {})
            if label in {one["name"] for one in self._journal.entries(CRASHED)}:
                continue
            if ("compile" in done) if with_compile else bool(done):
                continue
            if time.monotonic() > self._deadline - (takes if with_compile else 0.0):
                return
            self._journal.add(TRYING, label)
            began = time.monotonic()
            try:
                self._model(name, told, with_compile)
            except Exception as problem:  # of either side: the others go on
                reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
                self._journal.add("failed", label, reason=reason)
                if self._place.is_lost():
                    raise Lost(label) from problem
            takes = max(takes, time.monotonic() - began) if with_compile else takes

    def _model(self, name: str, told: Mapping[str, Any], with_compile: bool) -> None:
        torch, place = self._torch, self._folder / "models" / told["name"]
        arrays = inputs_of(told)
        engine = self._engine(place, told)
        try:
            names = [spec.name for spec in engine.outputs]
            instance = engine.instantiate()
            found = instance.run(arrays, names)
            exact = self._exact(place, arrays)
            graph = TorchGraph(place, arrays, "cuda", "float16")
            ways = {"graph": _Captured(torch, graph, arrays)}
            errors = [error_of(found, exact), error_of(ways["graph"].run(), exact)]
            if with_compile:
                compiled = torch.compile(graph, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
                ways["compile"] = _Captured(torch, compiled, arrays)
                errors[1] = max(errors[1], error_of(ways["compile"].run(), exact))
            times = in_turns(
                {"ours": lambda: instance.run(arrays, names), **{way: one.run for way, one in ways.items()}}
            )
        finally:
            engine.close()
        allowed = max(_TOLERANCE, _TIMES * errors[1])
        if not errors[0] <= allowed:
            self._journal.add("wrong", name, error=errors[0], allowed=allowed)
        self._journal.add("model", name, ms=times, error=errors[0], torch_error=errors[1])

    def _engine(self, place: Path, told: Mapping[str, Any]) -> Any:
        from hone.engines.tvm import PackedWeights
        from hone.engines.tvm_cuda import TvmCudaEngine

        artifact = place / str(told["batch"])
        with np.load(artifact / "constants.npz") as file:
            constants = dict(file)
        return TvmCudaEngine.load(
            artifact,
            json.loads((artifact / "manifest.json").read_text(encoding="utf-8")),
            model=place / "model.onnx",
            kernels=self._kernels,
            constants=lambda digest: constants,
            devices=[self._card],
            packed=PackedWeights(),
        )

    def _exact(self, place: Path, arrays: Arrays) -> list[Any]:
        """By PyTorch in float32, without tf32."""
        torch = self._torch
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        with torch.inference_mode():
            given = [torch.from_numpy(array).cuda() for array in arrays.values()]
            return [tensor.cpu().numpy() for tensor in TorchGraph(place, arrays, "cuda", "float32")(*given)]


class _Captured:
    """A callable under a CUDA graph, with its inputs and outputs in pinned memory."""

    def __init__(self, torch: Any, call: Callable[..., Sequence[Any]], arrays: Arrays) -> None:
        self._torch = torch
        self._sources = [torch.from_numpy(array) for array in arrays.values()]
        self._pinned = [source.pin_memory() for source in self._sources]
        self._inputs = [source.cuda() for source in self._sources]
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(3):  # cuDNN looks for its algorithm, and libraries allocate, outside of the capture
                call(*self._inputs)
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._outputs = list(call(*self._inputs))
        self._results = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in self._outputs]

    def run(self) -> list[Any]:
        """As ours: from the host's arrays through pinned memory, and back into pinned memory; one wait, at the end."""
        torch = self._torch
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for source, pinned, tensor in zip(self._sources, self._pinned, self._inputs, strict=True):
                pinned.copy_(source)
                tensor.copy_(pinned, non_blocking=True)
            self._graph.replay()
            for output, result in zip(self._outputs, self._results, strict=True):
                result.copy_(output, non_blocking=True)
        self._stream.synchronize()
        return [result.numpy() for result in self._results]


def inputs_of(told: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Random: floats of about one, integers from the ranges that the bundle tells."""
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, (shape, dtype) in told["inputs"].items():
        if np.dtype(dtype).kind in "iu":
            low, high = told["ranges"].get(name, (0, 2))
            arrays[name] = generator.integers(low, high, shape).astype(dtype)
        else:
            arrays[name] = generator.standard_normal(shape).astype(dtype)
    return arrays


def error_of(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The largest difference of any output, as a share of its root mean square."""
    errors = [
        float(
            np.abs(one.astype(np.float64) - two).max()
            / max(1e-6, float(np.sqrt(np.mean(np.square(two, dtype=np.float64)))))
        )
        for one, two in zip(found, exact, strict=True)
    ]
    return max(errors)


def in_turns(samples: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds a run: medians of rounds."""
    times: dict[str, list[float]] = {name: [] for name in samples}
    for sample in samples.values():
        for _ in range(3):
            sample()
    for _ in range(_ROUNDS):
        for name, sample in samples.items():
            began = time.perf_counter()
            for _ in range(_RUNS):
                sample()
            times[name].append((time.perf_counter() - began) * 1e3 / _RUNS)
    return {name: statistics.median(taken) for name, taken in times.items()}
