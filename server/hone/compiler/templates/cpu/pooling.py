"""Pooling over blocked channels: a vector holds a block, and channels never mix.

Windows are peeled at borders like a convolution's (`emit.py`). Over whole images, several vectors of partial results
run along a row, since one alone would wait for its own last operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.emit import (
    MAX_WRITTEN,
    Axis,
    each_tile,
    finish,
    lanes,
    local,
    loop,
    prim_func,
    store,
    written_steps,
)
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload

_COLUMNS = (8, 4, 12, 2, 1)
_PARTIAL = (8, 4, 1)


def _start(kind: str) -> Any:
    limits = {"max": tirx.min_value("float32"), "min": tirx.max_value("float32")}
    return limits.get(kind, tirx.const(0.0, "float32"))


_JOIN: dict[str, Callable[[Any, Any], Any]] = {
    "max": tirx.max,
    "min": tirx.min,
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: a + b,
}


class Pooling(TirTemplate):
    """Data and output NCHW{b}c; attribute `kind` is "max", or "mean" over the pixels of the window within the image
    (with `counts_padding`: over all of it)."""

    name = "cpu.pool2d_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return workload.op == "pool2d" and _is_blocked(workload) and bool(self._widths(workload, target))

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        return [Candidate.of(self.name, columns=width) for width in self._widths(workload, target)]

    def _widths(self, workload: Workload, target: CpuTarget) -> list[int]:
        rows, columns = axes(workload)
        written_rows = rows.kernel if rows.inner == (0, rows.out) else 1
        fitting = [width for width in _COLUMNS if width <= columns.out and width + 2 <= target.num_vector_registers]
        return [width for width in fitting or [1] if written_steps(columns, width) * written_rows <= MAX_WRITTEN]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        kind, (kernel_h, kernel_w) = workload.attribute("kind"), workload.attribute("window")
        rows, columns = axes(workload)
        batch, blocks, out_h, _, width = workload.output.shape
        num_bytes = 4 * (workload.inputs[0].num_elements + workload.output.num_elements)
        parallel = target.is_worth_threads(workload.output.num_elements * kernel_h * kernel_w, num_bytes)
        join = _JOIN[kind]

        def body(inputs: list[Any], out: Any) -> None:
            data = inputs[0]

            def tile(n: Any, c: Any, h: Any, start: Any, num: int, has: Any, inner_row: bool) -> None:
                values = local(num, width)
                for column in range(num):
                    with lanes(width) as i:
                        store(values, _start(kind), column, i)

                def row(tap: Any) -> None:
                    y = rows.first(h) + tap * rows.dilation
                    for across in range(kernel_w):
                        for column in range(num):
                            if has(column, across):
                                x = columns.first(start + column) + across * columns.dilation
                                with lanes(width) as i:
                                    store(values, join(values[column, i], data[n, c, y, x, i]), column, i)

                low, high = (0, kernel_h) if inner_row else rows.taps(h)
                if inner_row:
                    for tap in range(kernel_h):
                        row(tap)
                else:
                    with T.serial(low, high) as tap:
                        row(tap)
                for column in range(num):
                    taps = sum(has(column, across) for across in range(kernel_w))
                    if workload.attribute("counts_padding"):
                        taps, high, low = kernel_w, kernel_h, 0
                    with lanes(width) as i:
                        value = values[column, i]
                        if kind == "mean":
                            value = value / _float((high - low) * taps)
                        at = (n, c, h, start + column, i)
                        store(out, finish(workload, inputs, value, at), *at)

            with loop(batch * blocks * out_h, parallel=parallel) as at:
                n, c, h = at // (blocks * out_h), at // out_h % blocks, at % out_h
                inner = rows.inner == (0, out_h)
                each_tile(columns, candidate["columns"], lambda s, num, has: tile(n, c, h, s, num, has, inner))

        return prim_func(workload.inputs, workload.output, body)


class GlobalPooling(TirTemplate):
    """Data NCHW{b}c, output N{blocks}11{b}; attribute `kind` is "mean", "sum", "max" or "min"."""

    name = "cpu.global_pool_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return workload.op == "global_pool" and _is_blocked(workload) and workload.output.shape[2:4] == (1, 1)

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        columns = workload.inputs[0].shape[3]
        fitting = [num for num in _PARTIAL if num <= columns and num + 2 <= target.num_vector_registers]
        return [Candidate.of(self.name, partial=num) for num in fitting or [1]]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        kind, num = workload.attribute("kind"), candidate["partial"]
        batch, blocks, height, columns, width = workload.inputs[0].shape
        parallel = target.is_worth_threads(0, 4 * workload.inputs[0].num_elements)
        join = _JOIN[kind]

        def body(inputs: list[Any], out: Any) -> None:
            data = inputs[0]
            with loop(batch * blocks, parallel=parallel) as block:
                n, c = block // blocks, block % blocks
                values = local(num, width)

                def take(at: int, h: Any, w: Any) -> None:
                    with lanes(width) as i:
                        store(values, join(values[at, i], data[n, c, h, w, i]), at, i)

                for at in range(num):
                    with lanes(width) as i:
                        store(values, _start(kind), at, i)
                with T.serial(0, height) as h:
                    with T.serial(0, columns // num) as w:
                        for at in range(num):
                            take(at, h, w * num + at)
                    for at in range(columns % num):
                        take(at, h, columns - columns % num + at)
                left = num
                while left > 1:
                    left //= 2
                    for at in range(left):
                        with lanes(width) as i:
                            store(values, join(values[at, i], values[at + left, i]), at, i)
                with lanes(width) as i:
                    value = values[0, i]
                    if kind == "mean":
                        value = value * tirx.const(1.0 / (height * columns), "float32")
                    store(out, finish(workload, inputs, value, (n, c, 0, 0, i)), n, c, 0, 0, i)

        return prim_func(workload.inputs, workload.output, body)


def _float(count: Any) -> Any:
    return tirx.const(float(count), "float32") if isinstance(count, int) else tirx.Cast("float32", count)


def _is_blocked(workload: Workload) -> bool:
    data, out = workload.inputs[0].shape, workload.output.shape
    if len(data) != 5 or len(out) != 5 or (data[1], data[4]) != (out[1], out[4]):
        return False
    return all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))


def axes(workload: Workload) -> tuple[Axis, Axis]:
    """How the window moves along rows and columns."""
    _, _, height, width, _ = workload.inputs[0].shape
    _, _, out_h, out_w, _ = workload.output.shape
    window, strides, dilation, padding = (
        workload.attribute(name) for name in ("window", "strides", "dilation", "padding")
    )
    return (
        Axis(height, out_h, strides[0], window[0], dilation[0], padding[0]),
        Axis(width, out_w, strides[1], window[1], dilation[1], padding[1]),
    )
