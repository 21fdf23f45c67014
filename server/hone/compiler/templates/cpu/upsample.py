"""Linear resize by whole factors over blocked channels: every phase of a pixel mixes the same neighbours by numbers.

Between two pixels lie `factor` outputs whose weights repeat, so they are constants, and nothing is looked up. Beyond
the border the border's pixel is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import floor
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.emit import finish, lanes, local, loop, prim_func, store
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload


class LinearUpsampling(TirTemplate):
    """Data and output NCHW{b}c; attribute `factors` of rows and columns; float32.

    With `half_pixel`, coordinates are at the middle of pixels (ONNX's default), else at their corner ("asymmetric").
    """

    name = "cpu.upsample_linear_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        if workload.op != "upsample_linear" or len(workload.inputs[0].shape) != 5 or len(workload.output.shape) != 5:
            return False
        (_, blocks, h, w, width), (_, blocks_out, out_h, out_w, width_out) = (
            workload.inputs[0].shape,
            workload.output.shape,
        )
        factors = workload.attribute("factors")
        return (
            (blocks, width) == (blocks_out, width_out)
            and (out_h, out_w) == (h * factors[0], w * factors[1])
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        columns = workload.inputs[0].shape[3]
        fitting = [num for num in (4, 2, 8, 1) if num <= columns and num + 6 <= target.num_vector_registers]
        return [Candidate.of(self.name, columns=num) for num in fitting or [1]]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        batch, blocks, height, width, block = workload.inputs[0].shape
        down, across = workload.attribute("factors")
        half_pixel = bool(workload.attribute("half_pixel"))
        num = candidate["columns"]
        parallel = target.is_worth_threads(8 * workload.output.num_elements, 8 * workload.output.num_elements)

        def body(inputs: list[Any], out: Any) -> None:
            data = inputs[0]

            def pixels(n: Any, c: Any, h: Any, phase: int, count: int, start: Any) -> None:
                """The outputs of one row between the pixels around `count` columns."""
                shift, weight = neighbours(phase, down, half_pixel)
                above, below = _within(h + shift, height), _within(h + shift + 1, height)
                # Rows are mixed first, once for all columns that need them.
                rows = local(count + 2, block)
                for at in range(count + 2):
                    x = _within(start + at - 1, width)
                    with lanes(block) as i:
                        mixed = _mix(data[n, c, above, x, i], data[n, c, below, x, i], weight)
                        store(rows, mixed, at, i)
                for at in range(count):
                    for column in range(across):
                        left, share = neighbours(column, across, half_pixel)
                        with lanes(block) as i:
                            value = _mix(rows[at + 1 + left, i], rows[at + 2 + left, i], share)
                            place = (n, c, h * down + phase, (start + at) * across + column, i)
                            store(out, finish(workload, inputs, value, place), *place)

            with loop(batch * blocks * height, parallel=parallel) as at:
                n, c, h = at // (blocks * height), at // height % blocks, at % height
                for phase in range(down):
                    row = partial(pixels, n, c, h, phase)
                    if width >= num:
                        with T.serial(0, width // num) as tile:
                            row(num, tile * num)
                    if width % num:
                        row(width % num, width - width % num)

        return prim_func(workload.inputs, workload.output, body)


def neighbours(phase: int, factor: int, half_pixel: bool) -> tuple[int, float]:
    """Of output `phase` of a pixel: how far its left neighbour is (-1 or 0), and the right neighbour's share."""
    place = (phase + 0.5) / factor - 0.5 if half_pixel else phase / factor
    return floor(place), place - floor(place)


def _mix(left: Any, right: Any, share: float) -> Any:
    return left if share == 0.0 else left * _f32(1 - share) + right * _f32(share)


def _within(at: Any, size: int) -> Any:
    return tirx.max(0, tirx.min(at, size - 1))


def _f32(value: float) -> Any:
    return tirx.const(value, "float32")
