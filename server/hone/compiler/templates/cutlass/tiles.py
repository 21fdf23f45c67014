"""Tiles of CUTLASS 2.x kernels: which are legal on an architecture, and what each would cost, by a model.

The space is white-box (Bolt, section 3.2): large warp tiles as far as registers go, four or eight warps, small blocks
for small problems, waves that fill the multiprocessors. A tile is listed only if everything that CUTLASS's iterators
and the architecture's limits ask of it holds, so nothing that is listed fails to compile or to launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES

#: Registers of a thread beside accumulators and fragments: addresses, predicates, the epilogue's vectors.
_OTHER_REGISTERS = 60
#: Beside those: more addresses and predicates, where inputs are read in less than 16 bytes at a time.
_NARROW_REGISTERS = 16
#: CUDA keeps this much of a multiprocessor's shared memory for itself, for every block.
_RESERVED_SHARED_BYTES = 1024
_MAX_STAGES = 6
#: Read from L2 per second against memory, roughly the same on all architectures here.
_L2_OVER_MEMORY = 3.5
_LAUNCH_US = 2.5
#: What is left of the rate where few copies are under way at once; four and more hide all.
_HIDDEN = {2: 0.85, 3: 0.96}
#: Before a block's first product: filling the pipeline; after its last: the epilogue's trip through shared memory.
_FILL_US = 1.2


@dataclass(frozen=True, slots=True)
class Math:
    """How products are computed: the instruction and what it does to inputs."""

    name: str
    code: int
    """In candidates, where parameters are numbers."""
    op_class: str
    operator: str
    instruction: tuple[int, int, int]
    element_bytes: int
    accumulator: str
    rate: float
    """Of the target's float16 rate."""


TENSOR, SIMT, TF32_THRICE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile of the output and depth, how its warps share it, and how many of its inputs are under way."""

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def warp(self) -> tuple[int, int, int]:
        return self.m // self.warps_m, self.n // self.warps_n, self.k

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def stage_bytes(self, math_: Math) -> int:
        return (self.m + self.n) * self.k * math_.element_bytes

    def shared_bytes(self, math_: Math) -> int:
        padded = self.stages * 8 * self.k * math_.element_bytes if math_.op_class == "OpClassSimt" else 0
        return max(self.stages * self.stage_bytes(math_) + padded, self._epilogue_bytes())

    def _epilogue_bytes(self) -> int:
        # Eight rows of every row of warps, in float32, twice where CUTLASS interleaves them against bank conflicts.
        return self.warps_m * 8 * (self.n + 8) * 4 * 2

    def registers(self, math_: Math) -> int:
        """An estimate of what a thread takes, rather too much: nothing that stays below the limit is to spill."""
        m, n, _ = self.warp
        accumulators = m * n // 32
        if math_.op_class == "OpClassSimt":
            return accumulators + 2 * (m + n) // 4 + _OTHER_REGISTERS
        fragments = 2 * (m + n) * math_.instruction[2] * math_.element_bytes // (32 * 4)
        if math_.code == TF32_THRICE:
            fragments *= 2  # each input as a large and a small part
        # With two stages, what is under way from memory is in registers too.
        staged = self.stage_bytes(math_) // (self.num_threads * 4) if self.stages == 2 else 0
        return accumulators + fragments + staged + _OTHER_REGISTERS

    def address_registers(self, math_: Math) -> int:
        """What addresses and masks take beyond the few that are counted already, for data and for weights."""
        per_row = self.k * math_.element_bytes // 16
        data, weights = (rows * per_row // self.num_threads for rows in (self.m, self.n))
        return 4 * max(0, data - 4) + 2 * max(0, weights - 8)

    def blocks_per_sm(self, math_: Math, target: CudaTarget) -> int:
        registers = -(-min(self.registers(math_), target.max_registers_per_thread) // 8) * 8
        return min(
            target.shared_memory_per_sm // (self.shared_bytes(math_) + _RESERVED_SHARED_BYTES),
            target.registers_per_sm // (registers * self.num_threads),
            target.max_threads_per_sm // self.num_threads,
            target.max_blocks_per_sm,
        )


def maths_for(dtype: str, math_attribute: str, target: CudaTarget) -> tuple[Math, ...]:
    """Ways to multiply inputs of this dtype on the target, the preferred first; none if it cannot."""
    modern = target.compute_capability >= 80
    if dtype == "float16" or (dtype == "bfloat16" and modern):
        instruction = (16, 8, 16) if modern else (16, 8, 8)
        return (Math("mma", TENSOR, "OpClassTensorOp", "OpMultiplyAdd", instruction, 2, "float", 1.0),)
    if dtype in ("int8", "uint8"):
        instruction = (16, 8, 32) if modern else (8, 8, 16)
        return (Math("mma", TENSOR, "OpClassTensorOp", "OpMultiplyAddSaturate", instruction, 1, "int32_t", 2.0),)
    if dtype != "float32":
        return ()
    if math_attribute == "tf32" and modern:
        return (Math("tf32", TENSOR, "OpClassTensorOp", "OpMultiplyAdd", (16, 8, 8), 4, "float", 0.5),)
    simt = Math("simt", SIMT, "OpClassSimt", "OpMultiplyAdd", (1, 1, 1), 4, "float", 1.0 / 16)
    if not modern:
        return (simt,)
    thrice = Math("3xtf32", TF32_THRICE, "OpClassTensorOp", "OpMultiplyAddFastF32", (16, 8, 8), 4, "float", 0.5 / 3)
    return (thrice, simt)


#: (m, n, warps over m, warps over n), from large to small: warp tiles between 16x16 and 64x64, two to eight warps.
_SHAPES = (
    (256, 128, 4, 2),
    (128, 256, 2, 4),
    (256, 64, 4, 1),
    (64, 256, 1, 4),
    (128, 128, 2, 2),
    (128, 128, 4, 2),
    (128, 64, 2, 2),
    (64, 128, 2, 2),
    (128, 64, 4, 1),
    (64, 128, 1, 4),
    (128, 32, 4, 1),
    (32, 128, 1, 4),
    (64, 64, 2, 2),
    (64, 64, 4, 1),
    (64, 32, 2, 2),
    (64, 32, 4, 1),
    (32, 64, 2, 2),
    (32, 64, 2, 1),
    (32, 64, 1, 2),
    (32, 32, 2, 1),
)
#: SIMT: each thread of a warp computes 8 x 8 or 4 x 4 items.
_SIMT_SHAPES = ((128, 128, 4, 2), (128, 64, 2, 2), (64, 128, 2, 2), (64, 64, 2, 1), (128, 32, 2, 1), (32, 128, 1, 2))


@dataclass(frozen=True, slots=True)
class Access:
    """How memory is read and written: items at once of the inputs (the smaller of both) and of the output."""

    inputs: int
    output: int
    output_bytes: int
    scattered: bool = False
    """Convolutions: every access has an address and a mask of filter positions of its own."""


def legal_tiles(math_: Math, target: CudaTarget, access: Access, *, pipelined: bool = False) -> Iterator[Tile]:
    """All legal tiles; `pipelined` asks for two stages.

    Copies that need no registers (`cp.async`) move at least four bytes: with less, and before 8.0, two stages it is.
    """
    two_stages = pipelined or target.compute_capability < 80 or access.inputs * math_.element_bytes < 4
    for m, n, warps_m, warps_n in _SIMT_SHAPES if math_.op_class == "OpClassSimt" else _SHAPES:
        for k in _depths(math_):
            for stages in (2,) if two_stages else (3, 4, _MAX_STAGES):
                tile = Tile(m, n, k, warps_m, warps_n, stages)
                if is_legal(tile, math_, target, access):
                    yield tile


def is_legal(tile: Tile, math_: Math, target: CudaTarget, access: Access) -> bool:
    if tile.shared_bytes(math_) > target.max_shared_memory_per_block or tile.blocks_per_sm(math_, target) < 1:
        return False
    narrow = access.inputs * math_.element_bytes < 16 and math_.op_class != "OpClassSimt"
    registers = tile.registers(math_) + (_NARROW_REGISTERS if narrow else 0)
    if access.scattered:
        registers += tile.address_registers(math_)
    if registers > target.max_registers_per_thread:
        return False
    if math_.op_class == "OpClassSimt":
        return True
    warp_m, warp_n, _ = tile.warp
    # Matrices go to shared memory in accesses of 16 bytes, shared evenly among the threads.
    per_row = tile.k * math_.element_bytes // 16
    loads_evenly = all(rows * per_row % tile.num_threads == 0 for rows in (tile.m, tile.n))
    # And from there by instructions that read 16 rows.
    return loads_evenly and warp_m % 16 == 0 and warp_n % 16 == 0 and stores_evenly(tile.n, tile.warps_n, access)


def stores_evenly(columns: int, warps_n: int, access: Access) -> bool:
    """Whether the epilogue's threads share eight rows of a tile evenly (CUTLASS's OutputTileOptimalThreadMap): the
    warps side by side take rows each, and the lanes of a warp vectors, 256 bytes of a row if they can."""
    rows, vectors = 8 // warps_n, columns // access.output
    wide = 256 // (access.output * access.output_bytes)
    if 32 // wide > rows:
        lanes, lane_rows = 32 // rows, rows
    else:
        lanes = min(vectors, wide, 32)
        lane_rows = min(8, 32 // lanes)
    return vectors % lanes == 0 and vectors >= lanes and rows % lane_rows == 0 and rows >= lane_rows


def _depths(math_: Math) -> tuple[int, ...]:
    if math_.op_class == "OpClassSimt":
        return (8,)
    return (64 // math_.element_bytes, 128 // math_.element_bytes)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a tile is to compute: `batch` products; bytes are of one item."""

    m: int
    n: int
    k: int
    batch: int
    output_bytes: int


def cost_us(tile: Tile, math_: Math, problem: Problem, target: CudaTarget, slices: int = 1) -> float:
    """Modelled time in microseconds. It orders candidates that nobody measured; nothing is promoted by it."""
    blocks_m, blocks_n = -(-problem.m // tile.m), -(-problem.n // tile.n)
    num_blocks = blocks_m * blocks_n * problem.batch * slices
    depth = -(-problem.k // (tile.k * slices)) * tile.k
    warp_m, warp_n, _ = tile.warp
    resident = max(1, min(tile.blocks_per_sm(math_, target), -(-num_blocks // target.num_sms)))
    # A warp's tile decides how often an item that was read from shared memory is used; four warps keep the units busy.
    reuse = warp_m * warp_n / (warp_m + warp_n)
    busy = min(1.0, resident * tile.num_threads / 128)
    efficiency = 0.9 * reuse / (reuse + 5.0) * busy * _HIDDEN.get(tile.stages, 1.0)
    sm_flops_per_us = target.tensor_tflops * 1e6 * math_.rate / target.num_sms
    rounds = math.ceil(num_blocks / target.num_sms)
    product_us = rounds * 2.0 * tile.m * tile.n * depth / (sm_flops_per_us * efficiency)
    fill_us = _FILL_US * math.ceil(rounds / resident)
    input_bytes = num_blocks * (tile.m + tile.n) * depth * math_.element_bytes
    output_bytes = problem.batch * problem.m * problem.n * (problem.output_bytes + 8 * (slices - 1))
    least_bytes = problem.batch * (problem.m + problem.n) * problem.k * math_.element_bytes + output_bytes
    bytes_per_us = target.memory_gbps * 1e3
    memory_us = max(least_bytes / bytes_per_us, input_bytes / (bytes_per_us * _L2_OVER_MEMORY))
    return max(product_us, memory_us) + fill_us + _LAUNCH_US


def best_tiles(
    tiles: Sequence[Tile], math_: Math, problem: Problem, target: CudaTarget, limit: int
) -> list[tuple[float, Tile]]:
    """The cheapest by the model, of each block shape two at most: the model's errors are not to decide alone."""
    priced = sorted(((cost_us(tile, math_, problem, target), tile) for tile in tiles), key=lambda pair: pair[0])
    taken: list[tuple[float, Tile]] = []
    per_shape: dict[tuple[int, int], int] = {}
    for cost, tile in priced:
        shape = (tile.m, tile.n)
        if per_shape.get(shape, 0) < 2 and len(taken) < limit:
            per_shape[shape] = per_shape.get(shape, 0) + 1
            taken.append((cost, tile))
    return taken


def alignment_bytes(dtype: str, items: int) -> int:
    return DTYPE_BYTES[dtype] * items
