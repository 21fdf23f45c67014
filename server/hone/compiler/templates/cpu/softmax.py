"""Softmax along contiguous rows: the largest item, exponentials and their sum, quotients; a row stays in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tvm import tirx

from hone.compiler.mathematics import exp_nonpositive
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.finish import Finish
from hone.compiler.templates.cpu.nests import f32, fold, function, let, loop, parallel, store, vector, vectors, view
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload

#: Cycles of an exponential and what is around it, for one vector: for the decision on threads.
_OPERATIONS = 40


class RowSoftmax(TirTemplate):
    """Over the last axis of a float32 tensor. `vectors` is how many are worked on side by side."""

    name = "cpu.softmax"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "softmax"
            and len(workload.output.shape) >= 1
            and workload.output.num_elements > 0
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        whole = workload.output.shape[-1] // target.lanes
        fitting = [count for count in (4, 2, 8, 1) if count <= max(whole, 1)]
        return [Candidate.of(self.name, vectors=count) for count in fitting]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        columns, lanes = workload.output.shape[-1], target.lanes
        rows = prod(workload.output.shape[:-1])
        side_by_side = candidate["vectors"]

        def along(body: Callable[[int, Any, int], None]) -> None:
            """`body(which of the vectors side by side, column, lanes)` along a row."""
            rounds, rest = divmod(columns, side_by_side * lanes)
            with loop(rounds) as at:
                for one in range(side_by_side):
                    body(one, (at * side_by_side + one) * lanes, lanes)
            for start in range(columns - rest, columns, lanes):
                body(0, start, min(lanes, columns - start))

        def body(*buffers: Any) -> None:
            x, out = view(buffers[0], rows, columns), view(buffers[-1], rows, columns)
            finish = Finish(workload, buffers[:-1], buffers[-1])
            with parallel(rows, target.is_worth_threads(rows * columns * _OPERATIONS, 8 * rows * columns)) as task:
                row = let(task)
                finish.registers(lanes)
                largest, total = vectors(side_by_side, lanes), vectors(side_by_side, lanes)
                for one in range(side_by_side):
                    with vector(lanes) as lane:
                        store(largest[one], f32(float("-inf")), lane)
                        store(total[one], f32(0.0), lane)

                def compare(one: int, column: Any, width: int) -> None:
                    with vector(width) as lane:
                        item, most = x[row, column + lane], largest[one][lane]
                        # NaN is passed on: all of its row is NaN.
                        store(largest[one], tirx.Select(item < most, most, item), lane)

                def exponentiate(one: int, column: Any, width: int) -> None:
                    with vector(width) as lane:
                        store(out, exp_nonpositive(x[row, column + lane] - largest[0][0]), row, column + lane)
                        store(total[one], total[one][lane] + out[row, column + lane], lane)

                def divide(_: int, column: Any, width: int) -> None:
                    finish.store(row, column, width, lambda lane: out[row, column + lane] * total[0][0])

                along(compare)
                fold(largest, lanes, lambda a, b: tirx.Select(a > b, a, b))
                along(exponentiate)
                fold(total, lanes, lambda a, b: a + b)
                store(total[0], f32(1.0) / total[0][0], 0)
                along(divide)

        return function([*workload.inputs, workload.output], body)
