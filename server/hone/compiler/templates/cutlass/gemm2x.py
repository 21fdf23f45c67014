"""Products on tensor cores by CUTLASS 2.x: plain, batched, with the depth in slices, or balanced over the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.elements import ELEMENTS, arguments_of
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram, largest_power
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Matmul, matmul_of
from hone.compiler.templates.cutlass.second_opinion import proposed_tiles
from hone.compiler.templates.cutlass.tiles import (
    SIMT,
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
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 32
#: Of so many best tiles, swizzles and ways to split the depth are tried too.
_NUM_REFINED = 3
_SLICES = (2, 4, 8, 16)
_SWIZZLES = (2, 8)
#: `slices` of a candidate that balances the depth over the device instead of cutting it evenly.
STREAM_K = 0
_ALIGN = 128


class Gemm2x(CutlassTemplate):
    """a [..., M, K] times b [K, N] or [..., K, N] (or their last two exchanged: attribute `transpose_b`).

    float16, bfloat16 (from 8.0 on), float32 (attribute `math`: "tf32", else strict), int8 and uint8 with int8 weights.
    Integer products want b K by K: a weight is packed so at load.
    """

    name = "cutlass.gemm2x"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        problem = matmul_of(workload)
        if problem is None or target.arch not in ("75", "80", "86", "89", "90a"):
            return False
        program = EpilogueProgram.of(workload)
        a, b = workload.inputs[0].dtype, workload.inputs[1].dtype
        if program is None or workload.output.dtype not in ELEMENTS:
            return False
        if a != b or not maths_for(a, _math(workload), target):
            return False
        if a == "int8":
            k_major = problem.transpose_b or _is_packed(workload)
            widths = (largest_power(problem.k, 16), program.alignment(problem.n))
            return k_major and widths[0] >= 4 and (program.output != "int8" or widths[1] >= 4)
        return a != "uint8" and program.output != "int32"

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        problem, program = self._checked(workload, target)
        access = Access(
            min(_alignments(workload, problem)), program.alignment(problem.n), DTYPE_BYTES[workload.output.dtype]
        )
        sizes = _sizes(workload, problem)
        found: list[tuple[float, Candidate]] = []
        for math_ in maths_for(workload.inputs[0].dtype, _math(workload), target):
            tiles = list(legal_tiles(math_, target, access, pipelined=math_.code == SIMT))
            best = best_tiles(tiles, math_, sizes, target, MAX_CANDIDATES)
            if math_.code == TENSOR:
                best += self._proposed(workload, math_, problem, access, target, best)
            found += [(cost, _candidate(self.name, tile, math_, slices=1, swizzle=1)) for cost, tile in best]
            for _, tile in best[:_NUM_REFINED]:
                found += self._refined(tile, math_, sizes, problem, target)
            if problem.batch == 1 and math_.code != SIMT:
                balanced = [pair for _, tile in best if (pair := self._balanced(tile, math_, sizes, target))]
                found += sorted(balanced, key=lambda pair: pair[0])[:_NUM_REFINED]
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Mapping[int, Packing]:
        if not _is_packed(workload):
            return {}
        weight = workload.inputs[1]
        *lead, k, n = weight.shape
        shape = (*lead, n, k)

        def transpose(source: Any) -> Any:
            return te.compute(shape, lambda *at: source(*at[:-2], at[-1], at[-2]), name="transposed")

        return {1: Packing(TensorType(shape, weight.dtype), transpose)}

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int:
        problem, _ = self._checked(workload, target)
        slices = candidate["slices"]
        if target.twin or slices == 1:
            return 0
        tile = _tile(candidate)
        if slices == STREAM_K:
            # Every block that is resident may leave a part of two tiles for others, and a flag.
            math_ = _math_of(workload, candidate, target)
            blocks = target.num_sms * max(1, tile.blocks_per_sm(math_, target) + 1)
            return _aligned(blocks * 2 * tile.m * tile.n * 4) + _aligned(blocks * 4 * 64)
        flags = -(-problem.m // tile.m) * -(-problem.n // tile.n) * 4
        return _aligned(flags) + problem.m * problem.n * 4

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        problem, program = self._checked(workload, target)
        math_ = _math_of(workload, candidate, target)
        transpose_b = problem.transpose_b or _is_packed(workload)
        # A twin reads item by item, so that one serves all alignments.
        by_items = math_.code == SIMT or target.twin
        align_a, align_b = (1, 1) if by_items else _alignments(workload, problem)
        align_output = 1 if by_items else program.alignment(problem.n)
        dtype_a, dtype_b = workload.inputs[0].dtype, workload.inputs[1].dtype
        values: dict[str, Any] = {
            "twin": target.twin,
            "items": dict(ELEMENTS),
            "arguments": arguments_of(workload, program, (align_a, align_b), align_output),
            "epilogue": program.fields(),
            "accumulator": math_.accumulator,
            "output_alignment": align_output,
            "transpose_b": transpose_b,
            "a": {"element": ELEMENTS[dtype_a], "alignment": align_a},
            "b": {"element": ELEMENTS[dtype_b], "alignment": align_b},
        }
        if target.twin:
            return Recipe("gemm2x_twin.cu", {**values, "math_element": twin_element(dtype_a, math_)})
        tile, slices = _tile(candidate), candidate["slices"]
        schedule = {1: "plain", STREAM_K: "stream_k"}.get(slices, "slices")
        values |= {
            **tile_values(tile, math_, target),
            "schedule": schedule,
            "slices": max(1, slices),
            "swizzle": candidate["swizzle"],
        }
        return Recipe("gemm2x.cu", values)

    def _proposed(
        self,
        workload: Workload,
        math_: Math,
        problem: Matmul,
        access: Access,
        target: CudaTarget,
        known: Sequence[tuple[float, Tile]],
    ) -> list[tuple[float, Tile]]:
        """What NVIDIA's heuristics would try and we do not yet; their best stands beside our best."""
        sizes, transpose_b = _sizes(workload, problem), problem.transpose_b or _is_packed(workload)
        proposed = proposed_tiles(workload.inputs[0].dtype, math_, sizes, target, access, transpose_b=transpose_b)
        tried = {tile for _, tile in known}
        first = known[0][0] if known else 0.0
        return [(first * (1 + rank / 100), tile) for rank, tile in enumerate(proposed) if tile not in tried]

    def _refined(
        self, tile: Tile, math_: Math, sizes: Problem, problem: Matmul, target: CudaTarget
    ) -> list[tuple[float, Candidate]]:
        """The tile with other orders of blocks, and with the depth shared among blocks where they are few."""
        blocks_m, blocks_n = -(-sizes.m // tile.m), -(-sizes.n // tile.n)
        plain = cost_us(tile, math_, sizes, target)
        found = []
        for swizzle in _SWIZZLES:
            # Worth a look where the inputs of a wave do not stay in the cache anyway.
            if blocks_n >= swizzle and blocks_m * blocks_n > target.num_sms:
                found.append((plain * 1.01, _candidate(self.name, tile, math_, slices=1, swizzle=swizzle)))
        if problem.batch > 1 or math_.code == SIMT:
            return found
        steps = sizes.k // tile.k
        for slices in _SLICES:
            if blocks_m * blocks_n * slices <= 2 * target.num_sms and steps >= 4 * slices:
                cost = cost_us(tile, math_, sizes, target, slices)
                found.append((cost, _candidate(self.name, tile, math_, slices=slices, swizzle=1)))
        return found

    def _balanced(self, tile: Tile, math_: Math, sizes: Problem, target: CudaTarget) -> tuple[float, Candidate] | None:
        """Stream-K: all multiprocessors finish together; what it costs is the exchange of unfinished tiles."""
        num_blocks = -(-sizes.m // tile.m) * -(-sizes.n // tile.n)
        full = num_blocks / target.num_sms
        if sizes.k // tile.k < 8 or full >= 4 or not full % 1:
            return None
        exchanged_us = 2 * 2 * target.num_sms * tile.m * tile.n * 4 / (target.memory_gbps * 1e3)
        cost = 1.1 * cost_us(tile, math_, sizes, target) * full / math.ceil(full) + exchanged_us + 2.0
        return cost, _candidate(self.name, tile, math_, slices=STREAM_K, swizzle=1)

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Matmul, EpilogueProgram]:
        """Raises ValueError for a workload that is not its kind."""
        problem, program = matmul_of(workload), EpilogueProgram.of(workload)
        if problem is None or program is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return problem, program


def tile_values(tile: Tile, math_: Math, target: CudaTarget) -> dict[str, Any]:
    """A tile as sources want it."""
    modern = target.compute_capability >= 80
    return {
        "tile": [tile.m, tile.n, tile.k],
        "warp": list(tile.warp),
        "instruction": list(math_.instruction),
        "stages": tile.stages,
        "op_class": math_.op_class,
        "arch_tag": "Sm50" if math_.code == SIMT else "Sm80" if modern else "Sm75",
        "math_operator": math_.operator,
        "max_shared_bytes": target.max_shared_memory_per_block,
    }


def twin_element(dtype: str, math_: Math) -> str:
    """What a twin multiplies: half floats exactly as float32; float32 rounded to tf32 where tensor cores do that."""
    if math_.name == "tf32":
        return "cutlass::tfloat32_t"
    return "float" if dtype in ("float16", "bfloat16") else ELEMENTS[dtype]


def tile_parameters(tile: Tile, math_: Math) -> dict[str, int]:
    return {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "warps_m": tile.warps_m,
        "warps_n": tile.warps_n,
        "stages": tile.stages,
        "math": math_.code,
    }


def _candidate(name: str, tile: Tile, math_: Math, *, slices: int, swizzle: int) -> Candidate:
    return Candidate.of(name, **tile_parameters(tile, math_), slices=slices, swizzle=swizzle)


def tile_of(candidate: Candidate) -> Tile:
    names = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages")
    return Tile(*(candidate[name] for name in names))


_tile = tile_of


def _math(workload: Workload) -> str:
    return str(dict(workload.attributes).get("math", "f32"))


def _math_of(workload: Workload, candidate: Candidate, target: CudaTarget) -> Math:
    """Raises ValueError for a candidate of another dtype or architecture."""
    for math_ in maths_for(workload.inputs[0].dtype, _math(workload), target):
        if math_.code == candidate["math"]:
            return math_
    raise ValueError(f"{candidate} is for other dtypes or architectures than {workload} on sm_{target.arch}")


def _is_packed(workload: Workload) -> bool:
    """Whether the weight is turned K by K at load: integers must, and others gain where N is odd and K is even."""
    problem = matmul_of(workload)
    if problem is None or problem.transpose_b or 1 not in workload.weights:
        return False
    dtype = workload.inputs[1].dtype
    widest = MAX_ACCESS_BYTES // DTYPE_BYTES[dtype]
    return dtype in ("int8", "uint8") or largest_power(problem.n, widest) < largest_power(problem.k, widest)


def _alignments(workload: Workload, problem: Matmul) -> tuple[int, int]:
    """Items of a and of b that may be read at once."""
    widest = MAX_ACCESS_BYTES // DTYPE_BYTES[workload.inputs[0].dtype]
    align_k = largest_power(problem.k, widest)
    k_major = problem.transpose_b or _is_packed(workload)
    return align_k, align_k if k_major else largest_power(problem.n, widest)


def _sizes(workload: Workload, problem: Matmul) -> Problem:
    return Problem(problem.m, problem.n, problem.k, problem.batch, DTYPE_BYTES[workload.output.dtype])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
