"""Tiles of CUTLASS 3.x kernels: which are legal from Hopper on, and what each would cost, by a model.

There one thread asks for whole tiles (TMA) and groups of 128 threads multiply them out of shared memory, so what bounds
a tile is the accumulators of such a group, and that at least two stages of inputs fit beside the epilogue's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram
from hone.compiler.templates.cutlass.tiles import Math, Problem

#: Schedules, as candidates have them: two groups of warps that each have a tile of their own and take turns; two that
#: share one; one group and blocks that each have one tile; Blackwell's, whose accumulators are not in registers.
PINGPONG, COOPERATIVE, SINGLE, ONE_SM = range(4)

_GROUP_THREADS = 128
#: Of 232 registers that a multiplying thread has, what accumulators may take.
_MAX_ACCUMULATORS = 128
#: Where an accumulator's columns of Blackwell's tensor memory are held twice, so that epilogue and products overlap.
_MAX_TENSOR_MEMORY_COLUMNS = 256
_MIN_STAGES = 2
#: Barriers, the scheduler's storage, and alignment of buffers to what swizzled layouts ask for.
_OTHER_SHARED_BYTES = 4096
_STAGE_DEPTH_BYTES = 128
_LAUNCH_US = 3.0
_FILL_US = 1.5
_EXCHANGE_US = 2.0
_L2_OVER_MEMORY = 3.5
#: Of the shorter of arithmetic and traffic, what the longer one does not hide.
_OVERLAP_LOSS = 0.1
#: The epilogue's pieces of a tile: columns, and how many of them are under way to be read and to be written.
_EPILOGUE_COLUMNS, _LOADS, _STORES = 32, 4, 2


@dataclass(frozen=True, slots=True)
class Tile3x:
    """A block's tile of the output and depth, how many blocks share their inputs, and who multiplies."""

    m: int
    n: int
    k: int
    cluster_m: int
    cluster_n: int
    schedule: int

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        groups = 2 if self.schedule == COOPERATIVE else 1
        return self.m * self.n // (groups * _GROUP_THREADS)

    def stage_bytes(self, math_: Math) -> int:
        return (self.m + self.n) * self.k * math_.element_bytes

    def epilogue_bytes(self, program: EpilogueProgram) -> int:
        """Pieces of whole tensors on their way in and out, and vectors over columns."""
        rows = min(self.m, 64 if self.schedule == PINGPONG else 128)
        piece = rows * min(self.n, _EPILOGUE_COLUMNS)
        total = _STORES * piece * DTYPE_BYTES[program.output]
        for operand in program.operands:
            size = DTYPE_BYTES[operand.dtype]
            total += {"tensor": _LOADS * piece * size, "row": self.n * size}.get(operand.kind, 0)
        return total + _OTHER_SHARED_BYTES

    def stages(self, math_: Math, program: EpilogueProgram, target: CudaTarget) -> int:
        """At least so many fit; CUTLASS's builder takes all that do."""
        left = target.max_shared_memory_per_block - self.epilogue_bytes(program)
        return left // self.stage_bytes(math_)


_SHAPES = {
    PINGPONG: ((64, 256), (128, 128), (64, 128), (128, 64), (64, 64), (64, 32), (128, 32), (64, 192)),
    COOPERATIVE: ((128, 256), (256, 128), (128, 128), (256, 64), (128, 64), (128, 192), (256, 96)),
    SINGLE: ((128, 128), (64, 256), (128, 64), (64, 128), (64, 64), (64, 32), (128, 32), (128, 96)),
    ONE_SM: ((128, 256), (128, 192), (128, 128), (128, 64)),
}
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_EFFICIENCY = {PINGPONG: 1.0, COOPERATIVE: 0.97, SINGLE: 0.8, ONE_SM: 1.0}


def legal_tiles3x(
    math_: Math, program: EpilogueProgram, target: CudaTarget, schedules: Sequence[int]
) -> Iterator[Tile3x]:
    """All legal tiles of the schedules: each compiles, and none asks for more than the device has."""
    for schedule in schedules:
        for m, n in _SHAPES[schedule]:
            for cluster_m, cluster_n in _CLUSTERS:
                tile = Tile3x(m, n, _STAGE_DEPTH_BYTES // math_.element_bytes, cluster_m, cluster_n, schedule)
                limit = _MAX_ACCUMULATORS if schedule != ONE_SM else _MAX_TENSOR_MEMORY_COLUMNS
                if tile.accumulators <= limit and tile.stages(math_, program, target) >= _MIN_STAGES:
                    yield tile


def fits_tma(num_items: int, dtype: str) -> bool:
    """Whether rows of so many items start where TMA may read and write."""
    return num_items * DTYPE_BYTES[dtype] % MAX_ACCESS_BYTES == 0


def takes_program(program: EpilogueProgram | None, num_columns: int) -> bool:
    """Whether the epilogue is one that visitor trees express, for rows of so many columns."""
    if program is None or not (program.column_sum or fits_tma(num_columns, program.output)):
        return False
    for operand in program.operands:
        if operand.kind == "image":
            return False
        if operand.kind in ("tensor", "row") and not fits_tma(num_columns, operand.dtype):
            return False
    return True


def align_operands(arguments: list[dict[str, object]], program: EpilogueProgram) -> list[dict[str, object]]:
    """The arguments, with what TMA reads and writes aligned as it must be."""
    wide = {operand.at for operand in program.operands if operand.kind in ("tensor", "row")}
    output = len(arguments) - 1
    return [
        {**argument, "alignment": MAX_ACCESS_BYTES} if at in wide or at == output else argument
        for at, argument in enumerate(arguments)
    ]


def cost3x_us(tile: Tile3x, math_: Math, problem: Problem, target: CudaTarget, *, balanced: bool = False) -> float:
    """Modelled time in microseconds, to order what nobody measured; nothing is promoted by it.

    `balanced`: the depth is shared out so that all multiprocessors work equally long, and parts of tiles are exchanged.
    """
    blocks_m = -(-problem.m // (tile.m * tile.cluster_m)) * tile.cluster_m
    blocks_n = -(-problem.n // (tile.n * tile.cluster_n)) * tile.cluster_n
    num_blocks = blocks_m * blocks_n * problem.batch
    depth = -(-problem.k // tile.k) * tile.k
    reuse = tile.m * tile.n / (tile.m + tile.n)
    # Taking turns hides the epilogue behind the other group's products; sharing a tile halves what each reads.
    efficiency = 0.95 * reuse / (reuse + 12.0) * _EFFICIENCY[tile.schedule]
    sm_flops_per_us = target.tensor_tflops * 1e6 * math_.rate / target.num_sms
    rounds = num_blocks / target.num_sms if balanced else math.ceil(num_blocks / target.num_sms)
    product_us = rounds * 2.0 * tile.m * tile.n * depth / (sm_flops_per_us * efficiency)
    # Blocks of a cluster read what they share once.
    read = tile.m / tile.cluster_n + tile.n / tile.cluster_m
    input_bytes = num_blocks * read * depth * math_.element_bytes
    output_bytes = problem.batch * problem.m * problem.n * problem.output_bytes
    least_bytes = problem.batch * (problem.m + problem.n) * problem.k * math_.element_bytes + output_bytes
    bytes_per_us = target.memory_gbps * 1e3
    l2_bytes_per_us = bytes_per_us * _L2_OVER_MEMORY
    # Where there are few blocks, what each of them can read is the bound.
    busy = 1.0 if balanced else min(1.0, num_blocks / target.num_sms)
    memory_us = max(least_bytes / bytes_per_us, input_bytes / (l2_bytes_per_us * busy))
    longer, shorter = max(product_us, memory_us), min(product_us, memory_us)
    fills = rounds if tile.schedule == SINGLE else 1
    exchange_us = 0.0
    if balanced:
        # Written and read once at least, in float32, and those who add wait for those who write.
        parts = min(num_blocks, 2 * target.num_sms) * tile.m * tile.n
        exchange_us = 2 * 2 * 4 * parts / l2_bytes_per_us + _EXCHANGE_US
    return longer + _OVERLAP_LOSS * shorter + exchange_us + _FILL_US * fills + _LAUNCH_US


def best_tiles3x(
    tiles: Sequence[Tile3x], math_: Math, problem: Problem, target: CudaTarget, limit: int
) -> list[tuple[float, Tile3x]]:
    """The cheapest by the model, of each shape and schedule no more than two."""
    priced = sorted(((cost3x_us(tile, math_, problem, target), tile) for tile in tiles), key=lambda pair: pair[0])
    taken: list[tuple[float, Tile3x]] = []
    seen: dict[tuple[int, int, int], int] = {}
    for cost, tile in priced:
        shape = (tile.m, tile.n, tile.schedule)
        if seen.get(shape, 0) < 2 and len(taken) < limit:
            seen[shape] = seen.get(shape, 0) + 1
            taken.append((cost, tile))
    return taken


def tile3x_parameters(tile: Tile3x) -> dict[str, int]:
    return {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "cluster_m": tile.cluster_m,
        "cluster_n": tile.cluster_n,
        "schedule": tile.schedule,
    }
