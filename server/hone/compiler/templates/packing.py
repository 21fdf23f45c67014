"""Packing: how a kernel wants a weight, computed once a load from the weight as the model has it.

A workload tells its weights as the operator has them; what order (or transform) of them is fast is the affair of a
template and a candidate. So a template names a packing for some of the inputs, and the compiled model prepares those in
`main_transform_params`, where `phases/packing.py` lets models and generations share the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
import tvm_ffi
import tvm_ffi.structural
from tvm import te

from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm import aligned_empty
from hone.types import NUMPY_DTYPES, Array

if TYPE_CHECKING:
    from hone.compiler.target import CpuTarget
    from hone.compiler.templates.base import Candidate, Template


@dataclass(frozen=True, slots=True)
class Packing:
    """One input as the kernel takes it. `compute` makes a tensor of type `result` from the workload's, in TE."""

    result: TensorType
    compute: Callable[[Any], Any]

    def prim_func(self, source: TensorType) -> Any:
        """The packing as an unscheduled PrimFunc: the weight, then the result."""
        weight = te.placeholder(source.shape, source.dtype, name="weight")
        return te.create_prim_func([weight, self.compute(weight)]).without_attr("global_symbol")


def kernel_inputs(
    template: Template, workload: Workload, candidate: Candidate, target: CpuTarget
) -> tuple[TensorType, ...]:
    """What a kernel of the candidate is called with before its output: the workload's inputs, some of them packed."""
    packings = template.packing(workload, candidate, target)
    return tuple(packings[at].result if at in packings else tensor for at, tensor in enumerate(workload.inputs))


def tensor_of(array: Array) -> Any:
    """A tensor over the array's memory, as kernels take it. DLPack's numpy knows no bfloat16: that goes by its bits."""
    if array.dtype != NUMPY_DTYPES["BF16"]:
        return tvm_ffi.from_dlpack(array)
    bits = tvm_ffi.from_dlpack(array.view(np.uint16))
    view = tvm.get_global_func("runtime.TVMTensorCreateView")
    return view(bits, tvm_ffi.Shape(array.shape), tvm_ffi.dtype("bfloat16"), 0)


class Packer:
    """Packs one workload's inputs in this process, as a search or a test needs them; what is packed alike is made once.

    Results are aligned as kernels' arguments must be.
    """

    def __init__(self, workload: Workload, inputs: Sequence[Array]) -> None:
        self._workload, self._inputs = workload, inputs
        self._made: list[tuple[int, Any, Array]] = []

    def pack(self, template: Template, candidate: Candidate, target: CpuTarget) -> list[Array]:
        """The inputs as the candidate's kernel takes them (see `kernel_inputs`)."""
        packings = template.packing(self._workload, candidate, target)
        return [self._packed(at, packings[at]) if at in packings else array for at, array in enumerate(self._inputs)]

    def _packed(self, at: int, packing: Packing) -> Array:
        func = packing.prim_func(self._workload.inputs[at])
        for position, known, array in self._made:
            if position == at and tvm_ffi.structural.structural_equal(known, func):
                return array
        built = tvm.tirx.build(tvm.IRModule({"pack": func.with_attr("global_symbol", "pack")}), target="llvm")["pack"]
        array = aligned_empty(packing.result.shape, np.dtype(packing.result.dtype))
        built(tvm.runtime.tensor(self._inputs[at]), tensor_of(array))
        self._made.append((at, func, array))
        return array
