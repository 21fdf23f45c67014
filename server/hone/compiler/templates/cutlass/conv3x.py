"""Convolutions as implicit products by CUTLASS 3.x on Hopper: TMA gathers the pixels under the filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.conv2x import conv_values
from hone.compiler.templates.cutlass.elements import ELEMENTS
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram
from hone.compiler.templates.cutlass.gemm2x import twin_element
from hone.compiler.templates.cutlass.gemm3x import NUM_GIB, tile3x_values
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Convolution, convolution_of
from hone.compiler.templates.cutlass.tiles import TENSOR, Math, Problem, maths_for
from hone.compiler.templates.cutlass.tiles3x import (
    SINGLE,
    align_operands,
    best_tiles3x,
    fits_tma,
    legal_tiles3x,
    takes_program,
    tile3x_parameters,
)
from hone.compiler.workload import Workload

MAX_CANDIDATES = 24
#: What TMA's gathering counts in: corners of the window in signed, offsets within a filter in unsigned bytes.
_MAX_CORNER, _MAX_OFFSET = 127, 254


class Conv3x(CutlassTemplate):
    """One group; any stride, padding and dilation. float16, bfloat16, float32 with `math` "tf32", int8.

    Channels of both sides are multiples of 16 bytes. Strides, paddings and dilations are compiled in; sizes, also those
    of the filter, come at run time.
    """

    name = "cutlass.conv3x"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        conv = convolution_of(workload)
        if conv is None or conv.groups != 1 or target.arch != "90a" or _math_of(workload, target) is None:
            return False
        a, b, output = workload.inputs[0].dtype, workload.inputs[1].dtype, workload.output.dtype
        if a != b or a == "uint8" or output not in ELEMENTS or (a != "int8" and output == "int32"):
            return False
        if not fits_tma(conv.channels, a) or not _is_gathered(conv):
            return False
        program = EpilogueProgram.of(workload)
        if program is None or not takes_program(program, conv.outputs):
            return False
        if program.column_sum and workload.output.num_elements != conv.outputs:
            return False  # its tiles go across images
        return bool(self._tiles(workload, target))

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        conv, _, math_ = self._checked(workload, target)
        m, n, _ = conv.gemm
        tiles = self._tiles(workload, target)
        # A step of the depth never spans two places of the filter: what channels leave of it is zeros.
        taps = conv.kernel[0] * conv.kernel[1]
        depth = taps * -(-conv.channels // tiles[0].k) * tiles[0].k
        sizes = Problem(m, n, depth, 1, DTYPE_BYTES[workload.output.dtype])
        best = best_tiles3x(tiles, math_, sizes, target, MAX_CANDIDATES)
        return [Candidate.of(self.name, **tile3x_parameters(tile)) for _, tile in best]

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        conv, program, math_ = self._checked(workload, target)
        dtype = workload.inputs[0].dtype
        align = 1 if target.twin else MAX_ACCESS_BYTES // DTYPE_BYTES[dtype]
        align_output = 1 if target.twin else program.alignment(conv.outputs)
        values = conv_values(workload, conv, program, (align, align), align_output, target)
        values["accumulator"] = math_.accumulator
        if target.twin:
            element = twin_element(dtype, math_)
            return Recipe("conv2x_twin.cu", {**values, "math_element": element, "packed_weights": False})
        values["arguments"] = align_operands(values["arguments"], program)
        values |= {**tile3x_values(candidate, target), "epilogue_schedule": "TmaWarpSpecialized"}
        return Recipe("conv3x.cu", values, num_gib=NUM_GIB)

    def _tiles(self, workload: Workload, target: CudaTarget) -> list[Any]:
        math_, program = _math_of(workload, target), EpilogueProgram.of(workload)
        if math_ is None or program is None:
            return []
        return list(legal_tiles3x(math_, program, target, (SINGLE,)))

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Convolution, EpilogueProgram, Math]:
        """Raises ValueError for a workload that is not its kind."""
        conv, program, math_ = convolution_of(workload), EpilogueProgram.of(workload), _math_of(workload, target)
        if conv is None or program is None or math_ is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return conv, program, math_


def _math_of(workload: Workload, target: CudaTarget) -> Math | None:
    maths = maths_for(workload.inputs[0].dtype, str(dict(workload.attributes).get("math", "f32")), target)
    return next((math_ for math_ in maths if math_.code == TENSOR), None)


def _is_gathered(conv: Convolution) -> bool:
    """Whether filter, padding and dilation are within what TMA's gathering can count."""
    reach = [(size - 1) * step for size, step in zip(conv.kernel, conv.dilation, strict=True)]
    corners = [max(pad, abs(pad - far)) for pad, far in zip(conv.padding, reach, strict=True)]
    return max(reach) <= _MAX_OFFSET and max(*corners, *conv.padding) <= _MAX_CORNER and max(conv.strides) <= 8
