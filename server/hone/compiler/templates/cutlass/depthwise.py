"""Depthwise convolutions: one filter a channel, so nothing for tensor cores to sum; a kernel bound by memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.conv2x import conv_values
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram, largest_power
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Convolution, convolution_of
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

_DTYPES = ("float16", "bfloat16", "float32")
#: The filter is unrolled.
_MAX_TAPS = 49
_COLUMNS = (1, 2, 4)


class DepthwiseConvolution(CutlassTemplate):
    """As many groups as channels and outputs. Sums are float32 also where `math` would allow tf32."""

    name = "cutlass.depthwise"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        conv, program = convolution_of(workload), EpilogueProgram.of(workload)
        if conv is None or program is None or program.column_sum:
            return False
        if not conv.groups == conv.channels == conv.outputs or conv.groups == 1:
            return False
        a, b = workload.inputs[0].dtype, workload.inputs[1].dtype
        if a == "bfloat16" and target.compute_capability < 80:
            return False
        return a == b and a in _DTYPES and program.output in _DTYPES and conv.kernel[0] * conv.kernel[1] <= _MAX_TAPS

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        conv, _ = self._checked(workload, target)
        widest = largest_power(conv.channels, MAX_ACCESS_BYTES // DTYPE_BYTES[_widest(workload)])
        vectors = [width for width in (8, 4, 2, 1) if widest // 4 <= width <= widest and width <= widest]
        found = []
        for vector in vectors:
            for columns in _COLUMNS:
                if columns > 1 and (columns > conv.columns or vector * columns > 32):
                    continue
                found.append(
                    (_cost(conv, vector, columns, target), Candidate.of(self.name, vector=vector, columns=columns))
                )
        # Where threads are not what is missing, wide accesses are better than many.
        found.sort(key=lambda pair: (pair[0], -pair[1]["vector"], pair[1]["columns"]))
        return [candidate for _, candidate in found]

    def packing(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Mapping[int, Packing]:
        """Channels innermost, as in the data: a thread reads a vector of them."""
        conv, _ = self._checked(workload, target)
        shape = (*conv.kernel, conv.channels)

        def channels_last(source: Any) -> Any:
            return te.compute(shape, lambda r, s, c: source(c, r, s, 0), name="channels_last")

        return {1: Packing(TensorType(shape, workload.inputs[1].dtype), channels_last)}

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        conv, program = self._checked(workload, target)
        if target.twin:
            values = conv_values(workload, conv, program, (1, 1), 1, target)
            element = "float" if workload.inputs[0].dtype != "float32" else ""
            values |= {"groups": 0, "accumulator": "float", "math_element": element, "packed_weights": True}
            return Recipe("conv2x_twin.cu", values)
        vector = candidate["vector"]
        values = conv_values(workload, conv, program, (vector, vector), vector, target)
        # The number of channels, which is that of groups, is a size like any other here.
        values |= {"groups": 0, "vector": vector, "columns": candidate["columns"], "kernel": list(conv.kernel)}
        return Recipe("depthwise.cu", values)

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Convolution, EpilogueProgram]:
        """Raises ValueError for a workload that is not its kind."""
        conv, program = convolution_of(workload), EpilogueProgram.of(workload)
        if conv is None or program is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return conv, program


def _widest(workload: Workload) -> str:
    """The dtype whose items fill an access first."""
    return max((workload.inputs[0].dtype, workload.output.dtype), key=lambda dtype: DTYPE_BYTES[dtype])


def _cost(conv: Convolution, vector: int, columns: int, target: CudaTarget) -> float:
    """Orders candidates: accesses of a thread, over threads that fill the device, or wait for it to be filled."""
    taps = conv.kernel[0] * conv.kernel[1]
    threads = conv.batch * conv.rows * -(-conv.columns // columns) * (conv.channels // vector)
    resident = target.num_sms * target.max_threads_per_sm / 2
    work = taps * (1 + columns) + 2 * columns
    return work * max(1.0, threads / resident)
