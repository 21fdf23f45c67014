"""Convolutions as implicit products on tensor cores by CUTLASS 2.x: NHWC data, OHWI weights, one group or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.elements import ELEMENTS, arguments_of
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram, largest_power
from hone.compiler.templates.cutlass.gemm2x import tile_of, tile_parameters, tile_values, twin_element
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Convolution, convolution_of
from hone.compiler.templates.cutlass.tiles import (
    TENSOR,
    Access,
    Math,
    Problem,
    Tile,
    best_tiles,
    cost_us,
    legal_tiles,
    maths_for,
)
from hone.compiler.workload import Workload

MAX_CANDIDATES = 32
_NUM_REFINED = 3
_SLICES = (2, 4, 8)
#: Columns of blocks that are walked together: the usual number, and the others that the best tiles are tried with.
_SWIZZLE, _SWIZZLES = 4, (1, 8)
_ALIGN = 128
#: CUTLASS's optimised iterators keep a bit for each row and column of the filter.
_MAX_OPTIMIZED_KERNEL = 32

#: How the data is walked through; numbers as candidates have them.
ITERATORS = ("Optimized", "Analytic", "FewChannels", "FixedChannels")
OPTIMIZED, ANALYTIC, FEW_CHANNELS, FIXED_CHANNELS = range(4)
#: One group of outputs a block, several, or no groups at all.
GROUP_MODES = ("None", "SingleGroup", "MultipleGroup")
NO_GROUPS, SINGLE_GROUP, MULTIPLE_GROUPS = range(3)


class Conv2x(CutlassTemplate):
    """Any stride, padding and dilation. float16, bfloat16, float32 with attribute `math` "tf32", int8.

    Strides, paddings and dilations are compiled in; sizes, also those of the filter, come at run time.
    """

    name = "cutlass.conv2x"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        conv, program = convolution_of(workload), EpilogueProgram.of(workload)
        if conv is None or program is None or target.arch not in ("75", "80", "86", "89", "90a"):
            return False
        a, b = workload.inputs[0].dtype, workload.inputs[1].dtype
        if a != b or a == "uint8" or workload.output.dtype not in ELEMENTS or _tensor_math(workload, target) is None:
            return False
        if max(conv.kernel) > _MAX_OPTIMIZED_KERNEL:
            return False
        if a == "int8":
            narrow = largest_power(conv.group_channels, 16) < 4
            return not narrow and (program.output != "int8" or program.alignment(conv.outputs) >= 4)
        return program.output != "int32" and next(self._tiles(workload, conv, program, target), None) is not None

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        conv, program, math_ = self._checked(workload, target)
        sizes = _sizes(workload, conv)
        found: list[tuple[float, Candidate]] = []
        by_walk: dict[tuple[int, int], list[Tile]] = {}
        for walk, tile in self._tiles(workload, conv, program, target):
            by_walk.setdefault(walk, []).append(tile)
        for (iterator, mode), tiles in by_walk.items():
            # What a walk costs beside the products: addresses computed anew for every access, groups that only pad.
            burden = {OPTIMIZED: 1.0, FIXED_CHANNELS: 1.1, FEW_CHANNELS: 1.2, ANALYTIC: 1.3}[iterator]
            best = best_tiles(tiles, math_, sizes, target, MAX_CANDIDATES)
            for cost, tile in best:
                waste = tile.n / conv.group_outputs if mode == MULTIPLE_GROUPS else 1.0
                found.append((cost * burden * waste, self._candidate(tile, math_, iterator, mode, 1)))
            for plain, tile in best[:_NUM_REFINED] if mode == NO_GROUPS else ():
                for swizzle in _swizzles(tile, sizes, target):
                    found.append((plain * burden * 1.01, self._candidate(tile, math_, iterator, mode, 1, swizzle)))
                for slices in _slices(tile, sizes, target):
                    cost = cost_us(tile, math_, sizes, target, slices) * burden
                    found.append((cost, self._candidate(tile, math_, iterator, mode, slices)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int:
        conv, _, _ = self._checked(workload, target)
        if target.twin or candidate["slices"] == 1:
            return 0
        rows, columns, _ = conv.gemm
        flags = -(-rows // candidate["tile_m"]) * -(-columns // candidate["tile_n"]) * 4
        return -(-flags // _ALIGN) * _ALIGN + rows * conv.outputs * 4

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        conv, program, math_ = self._checked(workload, target)
        # A twin reads item by item, so that one serves all alignments.
        align = 1 if target.twin else _alignment(workload, conv)
        align_output = 1 if target.twin else program.alignment(conv.outputs)
        values = conv_values(workload, conv, program, (align, align), align_output, target)
        values["accumulator"] = math_.accumulator
        if target.twin:
            element = twin_element(workload.inputs[0].dtype, math_)
            return Recipe("conv2x_twin.cu", {**values, "math_element": element, "packed_weights": False})
        values |= {
            **tile_values(tile_of(candidate), math_, target),
            "iterator": ITERATORS[candidate["iterator"]],
            "group_mode": GROUP_MODES[candidate["groups"]],
            "slices": candidate["slices"],
            "swizzle": candidate["swizzle"],
        }
        return Recipe("conv2x.cu", values)

    def _tiles(
        self, workload: Workload, conv: Convolution, program: EpilogueProgram, target: CudaTarget
    ) -> Iterator[tuple[tuple[int, int], Tile]]:
        """Every legal way to walk through the data, with every legal tile for it."""
        math_ = _tensor_math(workload, target)
        if math_ is None:
            return
        align = _alignment(workload, conv)
        access = Access(align, program.alignment(conv.outputs), DTYPE_BYTES[workload.output.dtype], scattered=True)
        widest = MAX_ACCESS_BYTES // math_.element_bytes
        walks = [(OPTIMIZED, NO_GROUPS)]
        if conv.groups > 1:
            walks = [(OPTIMIZED, SINGLE_GROUP), (ANALYTIC, MULTIPLE_GROUPS)]
        elif conv.channels == align and align in (4, 8) and align <= widest:
            walks.append((FIXED_CHANNELS, NO_GROUPS))
        elif conv.channels < widest:
            walks.append((FEW_CHANNELS, NO_GROUPS))
        for iterator, mode in walks:
            for tile in legal_tiles(math_, target, access):
                if mode == SINGLE_GROUP and conv.group_outputs % tile.n:
                    continue
                if mode == MULTIPLE_GROUPS and (tile.n % conv.group_outputs or conv.outputs % tile.n):
                    continue
                yield (iterator, mode), tile

    def _candidate(
        self, tile: Tile, math_: Math, iterator: int, mode: int, slices: int, swizzle: int = _SWIZZLE
    ) -> Candidate:
        return Candidate.of(
            self.name,
            **tile_parameters(tile, math_),
            iterator=iterator,
            groups=mode,
            slices=slices,
            swizzle=swizzle if mode == NO_GROUPS else 1,
        )

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Convolution, EpilogueProgram, Math]:
        """Raises ValueError for a workload that is not its kind."""
        conv, program = convolution_of(workload), EpilogueProgram.of(workload)
        math_ = _tensor_math(workload, target)
        if conv is None or program is None or math_ is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return conv, program, math_


def conv_values(
    workload: Workload,
    conv: Convolution,
    program: EpilogueProgram,
    alignments: tuple[int, int],
    output_alignment: int,
    target: CudaTarget,
) -> dict[str, Any]:
    """What sources of all convolutions want."""
    dtype_a, dtype_b = workload.inputs[0].dtype, workload.inputs[1].dtype
    return {
        "twin": target.twin,
        "items": dict(ELEMENTS),
        "arguments": arguments_of(workload, program, alignments, output_alignment),
        "epilogue": program.fields(),
        "output_alignment": output_alignment,
        "strides": list(conv.strides),
        "padding": list(conv.padding if not program.column_sum else conv.all_padding),
        "dilation": list(conv.dilation),
        "groups": conv.groups,
        "a": {"element": ELEMENTS[dtype_a], "alignment": alignments[0]},
        "b": {"element": ELEMENTS[dtype_b], "alignment": alignments[1]},
    }


def _tensor_math(workload: Workload, target: CudaTarget) -> Math | None:
    maths = maths_for(workload.inputs[0].dtype, str(dict(workload.attributes).get("math", "f32")), target)
    return next((math_ for math_ in maths if math_.code == TENSOR), None)


def _alignment(workload: Workload, conv: Convolution) -> int:
    """Items of data and weights that may be read at once: neighbours are channels of one group."""
    return largest_power(conv.group_channels, MAX_ACCESS_BYTES // DTYPE_BYTES[workload.inputs[0].dtype])


def _sizes(workload: Workload, conv: Convolution) -> Problem:
    m, n, k = conv.gemm
    return Problem(m, n, k, conv.groups, DTYPE_BYTES[workload.output.dtype])


def _swizzles(tile: Tile, sizes: Problem, target: CudaTarget) -> Iterator[int]:
    """Worth a look where blocks are more than one wave, and their columns enough to tell orders apart."""
    blocks_m, blocks_n = -(-sizes.m // tile.m), -(-sizes.n // tile.n)
    if blocks_m * blocks_n > target.num_sms:
        yield from (swizzle for swizzle in _SWIZZLES if blocks_n >= max(2, swizzle))


def _slices(tile: Tile, sizes: Problem, target: CudaTarget) -> Iterator[int]:
    num_blocks = -(-sizes.m // tile.m) * -(-sizes.n // tile.n)
    for slices in _SLICES:
        if num_blocks * slices <= 2 * target.num_sms and sizes.k // tile.k >= 4 * slices:
            yield slices
