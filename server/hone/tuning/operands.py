"""What the candidates of a workload are run on, and what they should give. In the child only."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate, Template
from hone.compiler.templates.packing import Packer, tensor_of
from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm import aligned_empty
from hone.types import NUMPY_DTYPES, Array

#: Weights that are so many times smaller than the second cache are measured where they are.
_MAX_TURNS = 16
_DTYPES = {dtype.name: dtype for datatype, dtype in NUMPY_DTYPES.items() if datatype != "BYTES"}


class Operands:
    """Random arrays for a workload: its inputs, and the output. Packed inputs are made when a kernel wants them."""

    def __init__(self, workload: Workload) -> None:
        generator = np.random.default_rng(0)
        self.inputs = [_random(tensor, generator) for tensor in workload.inputs]
        self.output = aligned_empty(workload.output.shape, _DTYPES[workload.output.dtype])
        self._packer = Packer(workload, self.inputs)
        self._weights = workload.weights

    @property
    def num_bytes(self) -> int:
        """With as much again for what is packed."""
        return 2 * int(sum(array.nbytes for array in (*self.inputs, self.output)))

    def poison(self) -> None:
        """Leave nothing in the output that a kernel could pass off as its own."""
        self.output[...] = 0 if self.output.dtype.kind in "biu" else np.nan  # bfloat16 is of no kind that numpy knows

    def tensors(self, template: Template, candidate: Candidate, target: CpuTarget) -> list[Any]:
        """The arguments of the candidate's kernel. What candidates pack alike exists once."""
        return [tensor_of(array) for array in (*self._packer.pack(template, candidate, target), self.output)]

    def weight_bytes(self, template: Template, candidate: Candidate, target: CpuTarget) -> int:
        arrays = self._packer.pack(template, candidate, target)
        return sum(arrays[at].nbytes for at in self._weights)

    def copies(self, template: Template, candidate: Candidate, target: CpuTarget) -> list[Any]:
        """The same arguments, with weights of their own."""
        arrays = self._packer.pack(template, candidate, target)
        for at in self._weights:
            copy = aligned_empty(arrays[at].shape, arrays[at].dtype)
            copy[...] = arrays[at]
            arrays[at] = copy
        return [tensor_of(array) for array in (*arrays, self.output)]


def num_turns(weight_bytes: int, target: CpuTarget) -> int:
    """How many copies of weights exceed the second cache by so much that none is there when its turn comes again."""
    if weight_bytes * _MAX_TURNS < target.l2_bytes:
        return 1  # so few that it hardly matters where they are
    return max(1, ceil(2 * target.l2_bytes / weight_bytes))


def _random(tensor: TensorType, generator: np.random.Generator) -> Array:
    dtype = _DTYPES[tensor.dtype]
    array = aligned_empty(tensor.shape, dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        array[...] = generator.integers(0, 2, tensor.shape)
    elif dtype == np.float32:
        generator.random(dtype=np.float32, out=array)
        array += np.float32(0.1)
    else:
        array[...] = generator.uniform(0.1, 1.1, tensor.shape)
    return array


class Expected:
    """Outputs that other candidates' must be close to."""

    def __init__(self, values: Array, tolerance: float) -> None:
        self._values = values.astype(np.float32)
        size = np.abs(self._values)
        scale = float(np.sqrt(np.mean(np.square(size), dtype=np.float64))) if values.size else 0.0
        self._allowed = tolerance * np.maximum(size, np.float32(scale))

    def matches(self, found: Array) -> bool:
        """NaN is close to nothing: a place that was not written is a failure."""
        difference = np.subtract(found, self._values, dtype=np.float32)
        return bool(np.all(np.abs(difference, out=difference) <= self._allowed))
