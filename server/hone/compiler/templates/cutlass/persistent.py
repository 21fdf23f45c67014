"""Two operators back to back in one persistent kernel (Bolt, section 3.1.1), on the headers of CUTLASS's example 13.

A block computes whole rows of the first result and multiplies them with the second weight at once, so that they never
leave the chip. That holds only where a block has all columns of both results (threadblock residence); the first result
stays in registers where each warp also has all columns of its rows, and goes through shared memory otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.elements import ELEMENTS, arguments_of
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, EpilogueProgram
from hone.compiler.templates.cutlass.gemm3x import transposed
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Convolution, convolution_of, matmul_of
from hone.compiler.templates.cutlass.tiles import Access, stores_evenly
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 24
#: Data, and both weights.
_NUM_OPERANDS = 3
#: Items of data and weights that are read at once: 16 bytes of half floats.
_ALIGNMENT = 8
_DEPTH = 32
_MAX_OPTIMIZED_KERNEL = 32
#: Vectors over columns that CUTLASS's kernels carry to the first epilogue.
_MAX_FIRST_OPERANDS = 2
#: Registers of a thread beside sums: fragments of both products, addresses, the epilogue's vectors.
_OTHER_REGISTERS = 88
_FOLDERS = ("examples/13_two_tensor_op_fusion",)


@dataclass(frozen=True, slots=True)
class Pair:
    """Sizes: rows of the data, columns between the operators and of the output, depth of the first product."""

    rows: int
    middle: int
    columns: int
    depth: int
    convolution: Convolution | None = None
    """The first operator, where it is one."""

    @classmethod
    def of(cls, workload: Workload) -> Pair | None:
        """None where it is no pair of a shape that kernels take."""
        if workload.op not in ("matmul_matmul", "conv2d_conv2d") or len(workload.inputs) < _NUM_OPERANDS:
            return None
        weight0, weight1 = workload.inputs[1].shape, workload.inputs[2].shape
        if workload.op == "conv2d_conv2d":
            conv = convolution_of(replace(workload, op="conv2d"))
            if conv is None or conv.groups != 1 or len(weight1) != 4:
                return None
            if weight1[1:] != (1, 1, conv.outputs):
                return None
            rows, middle, depth = conv.gemm
            return cls(rows, middle, weight1[0], depth, conv)
        first = matmul_of(replace(workload, op="matmul"))
        if first is None or len(weight0) != 2 or len(weight1) != 2:
            return None
        depth1, columns = reversed(weight1) if _transposes(workload)[1] else weight1
        if depth1 != first.n:
            return None
        return cls(first.m, first.n, columns, first.k)


@dataclass(frozen=True, slots=True)
class PairTile:
    """What a block computes of both results, and how its warps share it. All columns are in one block."""

    m: int
    n0: int
    n1: int
    warps0: tuple[int, int]
    warps1: tuple[int, int]
    stages: int
    in_shared_memory: bool

    @property
    def warp0(self) -> tuple[int, int]:
        return self.m // self.warps0[0], self.n0 // self.warps0[1]

    @property
    def warp1(self) -> tuple[int, int]:
        return self.m // self.warps1[0], self.n1 // self.warps1[1]

    @property
    def num_threads(self) -> int:
        return 32 * self.warps0[0] * self.warps0[1]

    @property
    def registers(self) -> int:
        """An estimate from above. In registers, both sums live at once; through shared memory, one after the other."""
        sums0, sums1 = (m * n // 32 for m, n in (self.warp0, self.warp1))
        return (max(sums0, sums1) if self.in_shared_memory else sums0 + sums1) + _OTHER_REGISTERS

    @property
    def shared_bytes(self) -> int:
        main = self.stages * (self.m + max(self.n0, self.n1)) * _DEPTH * 2
        between = self.m * (self.n0 + 8) * 2 if self.in_shared_memory else 0
        epilogue = self.warps1[0] * 8 * (self.n1 + 8) * 4 * 2
        return max(main + between, epilogue)

    def is_legal(self, target: CudaTarget, access: Access) -> bool:
        if self.warps0[0] * self.warps0[1] != self.warps1[0] * self.warps1[1]:
            return False
        warps_fit = all(m % 16 == 0 and n % 16 == 0 for m, n in (self.warp0, self.warp1))
        # Matrices go to shared memory in accesses of 16 bytes, shared evenly among the threads.
        loads_evenly = all(size * (_DEPTH // 8) % self.num_threads == 0 for size in (self.m, self.n0, self.n1))
        resident = self.in_shared_memory or (self.warps0 == self.warps1 and self.warps0[1] == 1)
        return (
            warps_fit
            and loads_evenly
            and resident
            and stores_evenly(self.n1, self.warps1[1], access)
            and self.registers <= target.max_registers_per_thread
            and self.registers * self.num_threads <= target.registers_per_sm
            and self.shared_bytes <= target.max_shared_memory_per_block
        )


#: (warps over rows, rows of a warp) of tiles in registers.
_IN_REGISTERS = ((4, 16), (4, 32), (8, 16), (2, 16), (2, 32), (8, 32))
#: (rows, warps of the first product, warps of the second one) of tiles through shared memory.
_IN_SHARED = (
    (64, (2, 2), (1, 4)),
    (64, (2, 2), (2, 2)),
    (128, (4, 2), (2, 4)),
    (128, (4, 2), (4, 2)),
    (64, (4, 1), (2, 2)),
    (32, (2, 2), (1, 4)),
    (64, (2, 4), (2, 4)),
    (64, (2, 2), (4, 1)),
    (128, (4, 2), (8, 1)),
)


def legal_pair_tiles(pair: Pair, target: CudaTarget, access: Access) -> Iterator[PairTile]:
    """All legal tiles: columns are those of the problem, rounded up to what warps and loads take.

    Steps of the second product's depth begin with what is left over in one of its two inputs and end with it in the
    other where the first result is in registers, so there it has to be whole steps and nothing more.
    """
    for stages in (2,) if target.compute_capability < 80 else (3, 4):
        for warps, rows in _IN_REGISTERS:
            shape = (warps, 1)
            n1 = _rounded(pair.columns, max(16, 8 * warps))
            tile = PairTile(warps * rows, pair.middle, n1, shape, shape, stages, False)
            if pair.middle % _DEPTH == 0 and tile.is_legal(target, access):
                yield tile
        for m, warps0, warps1 in _IN_SHARED:
            loads = 8 * warps0[0] * warps0[1]
            n0 = _rounded(pair.middle, max(_DEPTH, loads, 16 * warps0[1]))
            n1 = _rounded(pair.columns, max(loads, 16 * warps1[1]))
            tile = PairTile(m, n0, n1, warps0, warps1, stages, True)
            if tile.is_legal(target, access):
                yield tile


class Persistent(CutlassTemplate):
    """Both operators in float16 or, from 8.0 on, bfloat16; sums in float32; what is between in the data's dtype.

    "matmul_matmul": data [..., K0], weights [K0, N0] and [N0, N1] (attributes `transpose_b`, `transpose_b1`).
    "conv2d_conv2d": the first convolution any of one group, the second 1x1 with stride 1 and no padding.
    The first epilogue (attribute `epilogue0`) may read two vectors over columns, the second one whatever others may.
    """

    name = "cutlass.persistent"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        pair = Pair.of(workload)
        if pair is None or target.arch not in ("75", "80", "86", "89", "90a"):
            return False
        dtype = workload.inputs[0].dtype
        halves = ("float16",) if target.compute_capability < 80 else ("float16", "bfloat16")
        if dtype not in halves or any(tensor.dtype != dtype for tensor in workload.inputs[:_NUM_OPERANDS]):
            return False
        if dict(workload.attributes).get("intermediate", dtype) != dtype:
            return False
        if workload.output.dtype not in ("float16", "bfloat16", "float32"):
            return False
        depth = pair.convolution.channels if pair.convolution is not None else pair.depth
        if any(size % _ALIGNMENT for size in (depth, pair.middle, pair.columns)):
            return False
        if pair.convolution is not None and max(pair.convolution.kernel) > _MAX_OPTIMIZED_KERNEL:
            return False
        if not set(self._packed(workload)) <= set(workload.weights):
            return False
        first, second = first_program(workload), EpilogueProgram.of(workload, _NUM_OPERANDS)
        if first is None or second is None or second.column_sum:
            return False
        return next(legal_pair_tiles(pair, target, _access(workload, pair, second)), None) is not None

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        pair, _, second = self._checked(workload, target)
        tiles = list(legal_pair_tiles(pair, target, _access(workload, pair, second)))
        tiles.sort(key=lambda tile: _cost(tile, pair, target))  # stable: among equals, the order of the lists above
        return [_candidate(self.name, tile) for tile in tiles[:MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Mapping[int, Packing]:
        return {at: transposed(workload.inputs[at]) for at in self._packed(workload)}

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        pair, first, second = self._checked(workload, target)
        dtype = workload.inputs[0].dtype
        align = 1 if target.twin else _ALIGNMENT
        align_output = 1 if target.twin else second.alignment(pair.columns)
        arguments = arguments_of(workload, second, (align,) * _NUM_OPERANDS, align_output)
        for operand in first.operands:
            # Two neighbouring columns of a vector are read at once.
            arguments[operand.at]["alignment"] = DTYPE_BYTES[operand.dtype] * (1 if target.twin else 2)
        values: dict[str, Any] = {
            "twin": target.twin,
            "items": dict(ELEMENTS),
            "arguments": arguments,
            "epilogue0": first.fields(),
            "epilogue": {**second.fields(), "fast_math": first.fast_math and second.fast_math},
            "convolution": pair.convolution is not None,
            "transpose_b0": True,
            "transpose_b1": True,
            "element": ELEMENTS[dtype],
            "accumulator": "float",
            "alignment": align,
            "output_alignment": align_output,
        }
        if pair.convolution is not None:
            conv = pair.convolution
            values |= {"strides": list(conv.strides), "padding": list(conv.padding), "dilation": list(conv.dilation)}
            values |= {"a": {"alignment": align}, "b": {"alignment": align}}
        if target.twin:
            return Recipe("persistent_twin.cu", values)
        tile, modern = _tile_of(candidate), target.compute_capability >= 80
        fits = pair.middle <= tile.n0 if tile.in_shared_memory else pair.middle == tile.n0
        if not fits or pair.columns > tile.n1:
            raise ValueError(f"{candidate} does not hold the columns that {workload} has")
        values |= {
            "tile0": [tile.m, tile.n0, _DEPTH],
            "tile1": [tile.m, tile.n1, _DEPTH],
            "warp0": [*tile.warp0, _DEPTH],
            "warp1": [*tile.warp1, _DEPTH],
            "instruction": [16, 8, 16] if modern else [16, 8, 8],
            "stages": tile.stages,
            "arch_tag": "Sm80" if modern else "Sm75",
            "in_shared_memory": tile.in_shared_memory,
            "max_shared_bytes": target.max_shared_memory_per_block,
        }
        return Recipe("persistent.cu", values, num_gib=1.5, folders=_FOLDERS)

    def _packed(self, workload: Workload) -> tuple[int, ...]:
        """Positions of weights that are turned so that each column lies in one piece."""
        if workload.op == "conv2d_conv2d":
            return ()
        return tuple(at + 1 for at, is_transposed in enumerate(_transposes(workload)) if not is_transposed)

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Pair, EpilogueProgram, EpilogueProgram]:
        """Raises ValueError for a workload that is not its kind."""
        pair, first = Pair.of(workload), first_program(workload)
        second = EpilogueProgram.of(workload, _NUM_OPERANDS)
        if pair is None or first is None or second is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return pair, first, second


def first_program(workload: Workload) -> EpilogueProgram | None:
    """What stands between the operators; None where CUTLASS's kernels cannot apply it."""
    pair = Pair.of(workload)
    if pair is None:
        return None
    told = workload.fields()
    steps = Workload.from_fields({**told, "epilogue": told["attributes"].get("epilogue0", [])}).epilogue
    shape = (pair.rows, pair.middle)
    if (conv := pair.convolution) is not None:
        shape = (conv.batch, conv.rows, conv.columns, conv.outputs)  # type: ignore[assignment]  # of another rank
    dtype = workload.inputs[0].dtype
    first = replace(workload, epilogue=steps, output=TensorType(shape, dtype))
    program = EpilogueProgram.of(first, _NUM_OPERANDS)
    if program is None or program.column_sum or len(program.operands) > _MAX_FIRST_OPERANDS:
        return None
    dtypes = {operand.dtype for operand in program.operands}
    vectors = all(operand.kind == "row" for operand in program.operands)
    # Where a block has more columns than the problem, their sums and vectors are zeros, and what is made of them meets
    # weights of zero: it must be a number.
    if any(step.op == "sqrt" or (step.op == "divide" and step.operands[1].kind != "constant") for step in steps):
        return None
    return program if vectors and len(dtypes) <= 1 and dtypes <= {"float16", "bfloat16", "float32"} else None


def _transposes(workload: Workload) -> tuple[bool, bool]:
    told = dict(workload.attributes)
    return bool(told.get("transpose_b", False)), bool(told.get("transpose_b1", False))


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step


def _access(workload: Workload, pair: Pair, second: EpilogueProgram) -> Access:
    return Access(_ALIGNMENT, second.alignment(pair.columns), DTYPE_BYTES[workload.output.dtype])


def _candidate(name: str, tile: PairTile) -> Candidate:
    return Candidate.of(
        name,
        tile_m=tile.m,
        tile_n0=tile.n0,
        tile_n1=tile.n1,
        warps_m0=tile.warps0[0],
        warps_n0=tile.warps0[1],
        warps_m1=tile.warps1[0],
        warps_n1=tile.warps1[1],
        stages=tile.stages,
        shared=int(tile.in_shared_memory),
    )


def _tile_of(candidate: Candidate) -> PairTile:
    return PairTile(
        candidate["tile_m"],
        candidate["tile_n0"],
        candidate["tile_n1"],
        (candidate["warps_m0"], candidate["warps_n0"]),
        (candidate["warps_m1"], candidate["warps_n1"]),
        candidate["stages"],
        bool(candidate["shared"]),
    )


def _cost(tile: PairTile, pair: Pair, target: CudaTarget) -> float:
    """Orders candidates: rounds of blocks, each with its products at what a multiprocessor does for warps so small."""
    num_blocks = -(-pair.rows // tile.m)
    rounds = -(-num_blocks // target.num_sms)
    reuse = [m * n / (m + n) for m, n in (tile.warp0, tile.warp1)]
    flops = [2.0 * tile.m * n * k for n, k in ((tile.n0, _rounded(pair.depth, _DEPTH)), (tile.n1, tile.n0))]
    per_us = target.tensor_tflops * 1e6 / target.num_sms
    product_us = sum(work / (per_us * use / (use + 5.0)) for work, use in zip(flops, reuse, strict=True))
    busy = min(1.0, tile.num_threads / 128)
    return rounds * (product_us / busy + (0.6 if tile.in_shared_memory else 0.4)) * (1.02 if tile.stages == 4 else 1.0)
