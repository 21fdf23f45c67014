"""Operands for kernels under measurement: random, never zero, on the GPU, as many sets as rotation wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hone.compiler.cuda.partition import CudaTemplate
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.packing import Packer
from hone.compiler.workload import TensorType, Workload
from hone.tuning.profiler import Profiler, Skipped
from hone.types import NUMPY_DTYPES, Array

_DTYPES = {dtype.name: dtype for datatype, dtype in NUMPY_DTYPES.items() if datatype != "BYTES"}


class Operands:
    """Of one workload. The host's arrays are made once; sets on the device are made for each way of packing."""

    def __init__(self, workload: Workload, profiler: Profiler) -> None:
        self._workload, self._profiler = workload, profiler
        generator = np.random.default_rng(0)
        self._arrays = [_random(tensor, generator) for tensor in workload.inputs]
        self._packer = Packer(workload, self._arrays)
        self._uploaded: dict[tuple[int, ...], list[list[Any]]] = {}

    def sets(
        self, template: CudaTemplate, candidate: Candidate, target: CudaTarget, *, rotate: bool = True
    ) -> list[list[Any]] | Skipped:
        """Arguments of the candidate's kernel: inputs, workspace, output; one set where `rotate` is False."""
        device, stream = self._profiler.device, self._profiler.stream
        arrays = self._packer.pack(template, candidate, target)  # type: ignore[arg-type]  # a target is a target
        workspace = max(1, template.workspace_bytes(self._workload, candidate, target))
        output = self._workload.output
        output_bytes = output.num_elements * _DTYPES[output.dtype].itemsize
        num_bytes = sum(array.nbytes for array in arrays) + workspace + output_bytes
        key = tuple(id(array) for array in arrays)
        uploaded = self._uploaded.get(key, [])
        if not uploaded:
            self._uploaded.clear()  # another packing: the one before makes room
        wanted = self._profiler.num_sets(num_bytes)
        if isinstance(wanted, Skipped) and not uploaded:
            return wanted
        num_sets = max(len(uploaded), wanted if isinstance(wanted, int) and rotate else 1)
        try:
            if missing := num_sets - len(uploaded):
                made = [device.copies_of(array, missing, stream) for array in arrays]
                uploaded += [list(inputs) for inputs in zip(*made, strict=True)]
            self._uploaded[key] = uploaded
            workspaces = device.empty_copies(len(uploaded), (workspace,), "uint8")
            outputs = device.empty_copies(len(uploaded), output.shape, output.dtype)
            return [[*each] for each in zip(*zip(*uploaded, strict=True), workspaces, outputs, strict=True)]
        except Exception as problem:  # TVM's allocator and the CUDA runtime say it in their own ways
            if "out of memory" not in str(problem).lower() and not isinstance(problem, MemoryError):
                raise
            self._uploaded.clear()
            return Skipped(f"the GPU's memory is used up: {problem}")

    def output_of(self, arguments: Sequence[Any]) -> Array:
        """What a kernel wrote, as float32."""
        device, stream, output = self._profiler.device, self._profiler.stream, self._workload.output
        array = device.download(arguments[-1], output.shape, _DTYPES[output.dtype], stream)
        device.cuda.synchronize(stream)
        values: Array = array.astype(np.float32)
        return values

    def poison(self, arguments: Sequence[Any]) -> None:
        """Leave nothing in the output that a kernel could pass off as its own."""
        device, stream, output = self._profiler.device, self._profiler.stream, self._workload.output
        blank = np.full(output.shape, 77 if _DTYPES[output.dtype].kind in "biu" else np.nan, _DTYPES[output.dtype])
        staging = device.pinned.take(blank.nbytes)
        device.upload(blank, arguments[-1], staging, stream)
        device.cuda.synchronize(stream)


def _random(tensor: TensorType, generator: np.random.Generator) -> Array:
    """Never zero, of either sign: what a GPU draws for a multiplication depends on its operands' bits."""
    dtype = _DTYPES[tensor.dtype]
    if dtype.kind == "b":
        return np.ones(tensor.shape, dtype)
    if dtype.kind in "iu":
        values = generator.integers(1, 8, tensor.shape)
        return (values * generator.choice((-1, 1), tensor.shape) if dtype.kind == "i" else values).astype(dtype)
    values = generator.uniform(0.25, 1.0, tensor.shape) * generator.choice((-1.0, 1.0), tensor.shape)
    drawn: Array = values.astype(dtype)
    return drawn
