"""Products by CUTLASS 3.x: tiles by TMA, warps with roles, epilogues as visitor trees; Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.elements import ELEMENTS, arguments_of
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram
from hone.compiler.templates.cutlass.gemm2x import twin_element
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.templates.cutlass.problem import Matmul, matmul_of
from hone.compiler.templates.cutlass.tiles import TENSOR, Math, Problem, maths_for
from hone.compiler.templates.cutlass.tiles3x import (
    COOPERATIVE,
    ONE_SM,
    PINGPONG,
    align_operands,
    best_tiles3x,
    cost3x_us,
    fits_tma,
    legal_tiles3x,
    takes_program,
    tile3x_parameters,
)
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 32
#: Of so many best cooperative tiles, balancing the depth over the device is tried too.
_NUM_BALANCED = 3
_ALIGN = 128
#: What one such compilation takes.
NUM_GIB = 4.0

#: Main loop's and epilogue's schedule by a candidate's `schedule`.
SCHEDULES = {
    PINGPONG: ("KernelTmaWarpSpecializedPingpong", "TmaWarpSpecialized"),
    COOPERATIVE: ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative"),
    ONE_SM: ("KernelTmaWarpSpecialized1SmSm100", "TmaWarpSpecialized1Sm"),
}


class Gemm3x(CutlassTemplate):
    """a [..., M, K] times b [K, N] or [..., K, N] (or their last two exchanged: attribute `transpose_b`).

    float16, bfloat16, float32 with attribute `math` "tf32", int8, where rows are multiples of 16 bytes. Four bytes or
    one an item want b K by K: a weight is packed so at load.
    """

    name = "cutlass.gemm3x"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        problem = matmul_of(workload)
        if problem is None or target.arch not in ("90a", "100a") or _math_of(workload, target) is None:
            return False
        a, b, output = workload.inputs[0].dtype, workload.inputs[1].dtype, workload.output.dtype
        if a != b or a == "uint8" or output not in ELEMENTS or (a != "int8" and output == "int32"):
            return False
        k_major = problem.transpose_b or _is_packed(workload)
        if DTYPE_BYTES[a] != 2 and not k_major:
            return False
        if not fits_tma(problem.k, a) or not (k_major or fits_tma(problem.n, b)):
            return False
        program = EpilogueProgram.of(workload)
        if program is None or not takes_program(program, problem.n):
            return False
        if program.column_sum and (target.arch != "90a" or not _sums_batches(workload, problem)):
            return False
        if target.arch == "100a" and sum(operand.kind == "tensor" for operand in program.operands) > 1:
            return False  # a second one would be loaded by a node that is Hopper's
        return bool(self._tiles(workload, target))

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        problem, program, math_ = self._checked(workload, target)
        sizes = Problem(problem.m, problem.n, problem.k, problem.batch, DTYPE_BYTES[workload.output.dtype])
        best = best_tiles3x(self._tiles(workload, target), math_, sizes, target, MAX_CANDIDATES)
        found = [(cost, Candidate.of(self.name, **tile3x_parameters(tile), stream_k=0)) for cost, tile in best]
        # Sums over rows are added once a tile, which blocks that share tiles do not agree on.
        shared = [tile for _, tile in best if tile.schedule == COOPERATIVE and not program.column_sum]
        for tile in shared[:_NUM_BALANCED]:
            num_blocks = -(-sizes.m // tile.m) * -(-sizes.n // tile.n) * sizes.batch
            full = num_blocks / target.num_sms
            if sizes.k >= 8 * tile.k and full < 4 and full % 1:
                cost = cost3x_us(tile, math_, sizes, target, balanced=True)
                found.append((cost, Candidate.of(self.name, **tile3x_parameters(tile), stream_k=1)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Mapping[int, Packing]:
        return {1: transposed(workload.inputs[1])} if _is_packed(workload) else {}

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int:
        problem, _, _ = self._checked(workload, target)
        if target.twin or not candidate["stream_k"]:
            return 0
        # Tiles that several blocks work on are those of less than two waves; each is left in parts, with its flags.
        m, n = candidate["tile_m"], candidate["tile_n"]
        blocks_m = _aligned(-(-problem.m // m), candidate["cluster_m"])
        blocks_n = _aligned(-(-problem.n // n), candidate["cluster_n"])
        num_tiles = min(blocks_m * blocks_n * problem.batch, 2 * target.num_sms)
        return _aligned(num_tiles * m * n * 4, _ALIGN) + _aligned(num_tiles * 2 * 4, _ALIGN) + _ALIGN

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        problem, program, math_ = self._checked(workload, target)
        dtype = workload.inputs[0].dtype
        align = 1 if target.twin else MAX_ACCESS_BYTES // DTYPE_BYTES[dtype]
        align_output = 1 if target.twin else program.alignment(problem.n)
        arguments = arguments_of(workload, program, (align, align), align_output)
        values: dict[str, Any] = {
            "twin": target.twin,
            "items": dict(ELEMENTS),
            "arguments": arguments if target.twin else align_operands(arguments, program),
            "epilogue": program.fields(),
            "accumulator": math_.accumulator,
            "output_alignment": align_output,
            "transpose_b": problem.transpose_b or _is_packed(workload),
            "a": {"element": ELEMENTS[dtype], "alignment": align},
            "b": {"element": ELEMENTS[dtype], "alignment": align},
        }
        if target.twin:
            return Recipe("gemm2x_twin.cu", {**values, "math_element": twin_element(dtype, math_)})
        kernel_schedule, epilogue_schedule = SCHEDULES[candidate["schedule"]]
        values |= {
            **tile3x_values(candidate, target),
            "kernel_schedule": kernel_schedule,
            "epilogue_schedule": epilogue_schedule,
            "scheduler": "stream_k" if candidate["stream_k"] else "persistent",
        }
        return Recipe("gemm3x.cu", values, num_gib=NUM_GIB)

    def _tiles(self, workload: Workload, target: CudaTarget) -> list[Any]:
        math_, program = _math_of(workload, target), EpilogueProgram.of(workload)
        if math_ is None or program is None:
            return []
        schedules = (ONE_SM,) if target.arch == "100a" else (PINGPONG, COOPERATIVE)
        return list(legal_tiles3x(math_, program, target, schedules))

    def _checked(self, workload: Workload, target: CudaTarget) -> tuple[Matmul, EpilogueProgram, Math]:
        """Raises ValueError for a workload that is not its kind."""
        problem, program, math_ = matmul_of(workload), EpilogueProgram.of(workload), _math_of(workload, target)
        if problem is None or program is None or math_ is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return problem, program, math_


def tile3x_values(candidate: Candidate, target: CudaTarget) -> dict[str, Any]:
    """A tile as sources want it."""
    return {
        "item_bytes": dict(DTYPE_BYTES),
        "tile": [candidate["tile_m"], candidate["tile_n"], candidate["tile_k"]],
        "cluster": [candidate["cluster_m"], candidate["cluster_n"]],
        "arch_tag": "Sm100" if target.arch == "100a" else "Sm90",
        "max_shared_bytes": target.max_shared_memory_per_block,
    }


def transposed(weight: TensorType) -> Packing:
    """The weight with its last two dimensions exchanged."""
    *lead, rows, columns = weight.shape
    shape = (*lead, columns, rows)

    def compute(source: Any) -> Any:
        return te.compute(shape, lambda *at: source(*at[:-2], at[-1], at[-2]), name="transposed")

    return Packing(TensorType(shape, weight.dtype), compute)


def _math_of(workload: Workload, target: CudaTarget) -> Math | None:
    """How tensor cores multiply it; None where they do not (strict float32), or where nothing was tried (Blackwell)."""
    dtype = workload.inputs[0].dtype
    if target.arch == "100a" and dtype not in ("float16", "bfloat16"):
        return None
    maths = maths_for(dtype, str(dict(workload.attributes).get("math", "f32")), target)
    return next((math_ for math_ in maths if math_.code == TENSOR), None)


def _sums_batches(workload: Workload, problem: Matmul) -> bool:
    """Whether sums over rows are of all of them or of each batch; rows with one B for all can be cut anywhere."""
    return problem.shared_b or workload.output.num_elements in (problem.n, problem.batch * problem.n)


def _is_packed(workload: Workload) -> bool:
    """Whether the weight is turned K by K at load: where the tensor cores want it so, or its rows are no multiples."""
    problem = matmul_of(workload)
    if problem is None or problem.transpose_b or 1 not in workload.weights:
        return False
    dtype = workload.inputs[1].dtype
    return DTYPE_BYTES[dtype] != 2 or not fits_tma(problem.n, dtype)


def _aligned(number: int, to: int) -> int:
    return -(-number // to) * to
