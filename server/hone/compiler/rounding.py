"""What rounding single layers' operands does to a model's outputs, without a compilation for every question.

The model is built once, in float32, as bytecode of TVM's virtual machine, whose instrument is told before and after
each call: it rounds data and weight of the layers asked for, as a kernel of bfloat16 would, and puts the data back
after the call, for those who read it too. Products of two bfloat16 are exact in float32, and sums are added up in it on
both sides, so what comes out is what lowered kernels compute but for the order of sums, and for results that are stored
in bfloat16 and read by an epilogue.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from hone.compiler.build import build_executable
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.phases.partition import layers_in_order
from hone.compiler.pipeline import CODE_PHASES, GRAPH_PHASES, Compilation, Model, run_phases
from hone.compiler.roofline import operations
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.registry import templates_for
from hone.compiler.workload import Workload
from hone.types import Array

_RUN = 0
"""What an instrument returns: go on with the call."""
_DATA, _WEIGHT = 0, 1
#: Its weights are transformed when they are packed: rounding them then is not what rounding them before is.
_TRANSFORMS_WEIGHTS = "winograd"


class RoundedModel:
    """A model whose layers round their operands to bfloat16 when they are told to. For one thread at a time.

    Layer i is the i-th of `pipeline.lowerable_layers`, whose workloads are `layers`.
    """

    def __init__(self, model: Model, target: CpuTarget, num_builders: int = 1) -> None:
        """Builds it. Raises BuildFailed and LinkFailed."""
        compilation = Compilation(target, Choices())
        mod = run_phases(model.mod, GRAPH_PHASES, compilation, None)
        self.layers, self._order = layers_in_order(mod, target, "bf16")
        plain = {workload.digest: _plain(workload, target) for workload in self.layers}
        compilation.choices = Choices(kernels={digest: found for digest, found in plain.items() if found is not None})
        compilation.parameters = tuple(model.params)  # names of packed weights: nobody else sees them
        mod = run_phases(mod, CODE_PHASES, compilation, None)
        executable = build_executable(mod, target, exec_mode="bytecode").module
        self._returns_tuple = compilation.returns_tuple
        with tempfile.TemporaryDirectory(prefix="hone-rounding-") as folder:
            for library in _export(compilation.kernels, target, Path(folder), num_builders):
                executable.import_module(tvm_ffi.load_module(str(library), keep_module_alive=False))
        self._machine = relax.VirtualMachine(executable, tvm.cpu())
        weights = [tvm.runtime.tensor(array) for array in model.params.values()]
        self._packed = self._machine["main_transform_params"]([weights])
        names = {call.name: call.workload for call in compilation.kernels}
        self._rounding = _Rounding(self.layers, self._order, names)
        self._machine.set_instrument(self._rounding)

    @property
    def operations(self) -> list[float]:
        """Arithmetic operations of each layer."""
        return [operations(workload) for workload in self.layers]

    def run(self, inputs: Sequence[Array], lowered: Collection[int]) -> list[Array]:
        """Outputs for inputs in the model's order, with the operands of these layers rounded."""
        self._rounding.begin(frozenset(lowered))
        result = self._machine["main"](*(tvm.runtime.tensor(array) for array in inputs), self._packed)
        return [np.array(tensor.numpy()) for tensor in (list(result) if self._returns_tuple else [result])]


def round_to_bfloat16(values: Array) -> Array:
    """Float32 numbers rounded to the nearest bfloat16, ties to even, as float32. NaN and infinities stay."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


class _Rounding:
    """The instrument: the virtual machine calls it before and after each of its calls."""

    def __init__(self, layers: Sequence[Workload], order: Sequence[int], names: Mapping[str, Workload]) -> None:
        self._layers, self._order = layers, order
        self._names = {name for name, workload in names.items() if workload in set(layers)}
        self._workloads = names
        self._lowered: frozenset[int] = frozenset()
        self._exact: dict[int, Array] = {}
        """Layer -> its weight as it was, where that is rounded now or was before."""
        self._is_rounded: set[int] = set()
        self._num_calls = 0
        self._data: Array | None = None

    def begin(self, lowered: frozenset[int]) -> None:
        self._lowered, self._num_calls = lowered, 0

    def __call__(self, _function: Any, symbol: str, before: bool, _result: Any, *arguments: Any) -> int:
        if str(symbol) not in self._names:
            return _RUN
        layer = self._order[self._num_calls]
        if self._workloads[str(symbol)] != self._layers[layer]:
            raise AssertionError(f"call {self._num_calls} is no call of layer {layer}: {self._workloads[str(symbol)]}")
        if before:
            self._set_weight(layer, arguments[_WEIGHT])
            if layer in self._lowered:
                self._data = arguments[_DATA].numpy()
                arguments[_DATA].copyfrom(round_to_bfloat16(self._data))
            return _RUN
        if layer in self._lowered:
            arguments[_DATA].copyfrom(self._data)
        self._num_calls += 1
        return _RUN

    def _set_weight(self, layer: int, weight: Any) -> None:
        if (layer in self._lowered) == (layer in self._is_rounded):
            return
        exact = self._exact.get(layer)
        if exact is None:
            exact = self._exact[layer] = weight.numpy()
        if layer in self._lowered:
            weight.copyfrom(round_to_bfloat16(exact))
            self._is_rounded.add(layer)
        else:
            weight.copyfrom(exact)
            self._is_rounded.remove(layer)


def _plain(workload: Workload, target: CpuTarget) -> Candidate | None:
    """A first guess whose weights are packed in another order, and not transformed."""
    templates = [one for one in templates_for(workload, target) if _TRANSFORMS_WEIGHTS not in one.name]
    return templates[0].candidates(workload, target)[0] if templates else None


def _export(kernels: Sequence[KernelCall], target: CpuTarget, folder: Path, num_builders: int) -> list[Path]:
    def export(call: KernelCall) -> Path:
        path = folder / f"{call.name}.so"
        call.build(target).export(path)
        return path

    with ThreadPoolExecutor(num_builders, thread_name_prefix="link") as builders:
        return list(builders.map(export, kernels))
