"""Product of activations and packed weights: rows times columns, a tile of the result in vector registers.

Weights lie in panels of one vector's width, so the inner loop reads them in order whatever the number of columns. One
row (a dense layer at batch 1) makes it a matter of memory: many columns at once keep many loads in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import te
from tvm.s_tir import Schedule

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.tile import tile_cost
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload

MAX_CANDIDATES = 32


class PackedMatmul(TirTemplate):
    """x [..., M, K] times weights packed as [N/panel, K, panel]; float32."""

    name = "cpu.matmul_packed"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "matmul_packed"
            and len(workload.inputs[0].shape) == len(workload.output.shape) >= 2
            and len(workload.inputs[1].shape) == 3
            and workload.inputs[0].shape[-1] == workload.inputs[1].shape[1]
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def panel(self, columns: int, target: CpuTarget) -> int:
        """Width of the panels for so many columns; 0 where no width divides them that is worth a vector."""
        if columns % target.lanes == 0:
            return target.lanes
        narrower = range(target.lanes - 1, max(target.lanes // 2, 4) - 1, -1)
        return next((width for width in narrower if columns % width == 0), 0)

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        rows_left = workload.output.shape[-2]
        num_panels, depth, _ = workload.inputs[1].shape
        found: list[tuple[float, Candidate]] = []
        for rows, panels in itertools.product(range(1, 15), (1, 2, 3, 4, 5, 6, 7, 8, 12)):
            if rows_left % rows or num_panels % panels:
                continue
            if rows * panels + 2 * panels + 1 > target.num_vector_registers and (rows, panels) != (1, 1):
                continue
            for unroll in (1, 4) if depth % 4 == 0 else (1,):
                candidate = Candidate.of(self.name, rows=rows, panels=panels, unroll=unroll)
                found.append((tile_cost(panels, rows) - 0.001 * unroll, candidate))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        operations = prod(workload.output.shape) * workload.inputs[1].shape[1]
        parallel = target.is_worth_threads(operations, 4 * workload.inputs[1].num_elements)
        return _schedule(_compute(workload), workload, candidate, parallel=parallel)


def _compute(workload: Workload) -> Any:
    inputs = [te.placeholder(t.shape, t.dtype, name=f"input{i}") for i, t in enumerate(workload.inputs)]
    x, weight = inputs[0], inputs[1]
    _, depth, panel = workload.inputs[1].shape
    k = te.reduce_axis((0, depth), "k")

    def multiply(*at: Any) -> Any:
        *row, n = at
        return te.sum(x(*row, k) * weight(n // panel, k, n % panel), axis=[k])

    product = te.compute(workload.output.shape, multiply, name="product")
    out = te.compute(workload.output.shape, lambda *at: apply_epilogue(workload, product(*at), inputs, at), name="out")
    return te.create_prim_func([*inputs, out])


def _schedule(func: Any, workload: Workload, candidate: Candidate, *, parallel: bool) -> Any:
    schedule = Schedule(func)
    product, out = schedule.get_sblock("product"), schedule.get_sblock("out")
    panel = workload.inputs[1].shape[2]
    *batch, m, n = schedule.get_loops(out)
    m, m_in = schedule.split(m, [None, candidate["rows"]])
    n, n_in, lane = schedule.split(n, [None, candidate["panels"], panel])
    # Columns outside: their weights stay in the second cache while all rows go by.
    schedule.reorder(n, *batch, m, m_in, n_in, lane)
    outer = schedule.fuse(n, *batch, m)
    if parallel:
        schedule.parallel(outer)
    for loop in (m_in, n_in):
        schedule.unroll(loop)
    schedule.vectorize(lane)

    schedule.compute_at(product, outer, preserve_unit_loops=True)
    *_, m_in, n_in, k = schedule.get_loops(product)
    n_in, lane = schedule.split(n_in, [None, panel])
    k, k_in = schedule.split(k, [None, candidate["unroll"]])
    schedule.reorder(k, k_in, m_in, n_in, lane)
    for loop in (k_in, m_in, n_in):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.decompose_reduction(product, k)
    m_in, n_in, lane = schedule.get_loops(schedule.get_sblock("product_init"))[-3:]
    schedule.unroll(m_in)
    schedule.unroll(n_in)
    schedule.vectorize(lane)
    schedule.set_scope(product, 0, "local")
    return schedule.mod["main"]
