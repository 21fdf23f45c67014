"""Depthwise convolution over blocked channels: a vector holds a block, a tile of output columns stays in registers.

Channels never mix, so every tap is one multiply-add of vectors. Neighbouring columns read the same pixels: written out
side by side, a pixel is loaded once for all taps of a row of the window. Borders are peeled (`emit.py`), and bias,
activation and residual are applied as a tile is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx
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
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

_MAX_COLUMNS = 14
#: Multiply-adds written out for one tile, at most: beyond, code outgrows its cache and compiling takes long.
_MAX_UNROLLED = 256


class DepthwiseConvolution(TirTemplate):
    """Data NCHW{b}c, weights O1HW packed as {blocks}HW{b}, output NCHW{b}c: output channel i from input channel i."""

    name = "cpu.depthwise_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        if workload.op != "depthwise_conv2d" or len(workload.inputs[0].shape) != 5 or len(workload.output.shape) != 5:
            return False
        data, out = workload.inputs[0].shape, workload.output.shape
        return (
            (data[1], data[4]) == (out[1], out[4])
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
            and written_steps(axes(workload)[1], 1) <= MAX_WRITTEN
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        rows, columns = axes(workload)
        vectors = max(1, workload.output.shape[4] // target.lanes)
        found: list[tuple[float, Candidate]] = []
        for width in range(1, min(_MAX_COLUMNS, columns.out) + 1):
            # Beside the accumulators: a pixel and a weight.
            if (width + 2) * vectors > target.num_vector_registers and width > 1:
                continue
            written = written_steps(columns, width)
            for unroll in (0, 1):
                if written * (rows.kernel if unroll else 1) > MAX_WRITTEN:
                    continue
                if unroll and width * rows.kernel * columns.kernel > _MAX_UNROLLED and width > 1:
                    continue
                loads = (width - 1) * columns.stride + (columns.kernel - 1) * columns.dilation + 1 + columns.kernel
                work = width * columns.kernel
                waste = -(-columns.out // width) * width / columns.out
                few = max(1.0, 8 / (width * vectors))  # additions wait for each other
                cost = waste * max(work * few, loads) / work + 0.02 * loads / work + 0.02 * unroll
                found.append((cost, Candidate.of(self.name, columns=width, unroll=unroll)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        channels, _, kernel_h, kernel_w = workload.inputs[1].shape
        _, blocks, _, _, width = workload.output.shape
        shape = (blocks, kernel_h, kernel_w, width)

        def pack(weight: Any) -> Any:
            def item(b: Any, y: Any, x: Any, i: Any) -> Any:
                channel = b * width + i
                inside = weight(channel, 0, y, x)
                if channels == blocks * width:
                    return inside
                return tirx.if_then_else(channel < channels, inside, tirx.const(0.0, "float32"))

            return te.compute(shape, item, name="blocks")

        return {1: Packing(TensorType(shape, "float32"), pack)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        rows, columns = axes(workload)
        batch, blocks, out_h, _, width = workload.output.shape
        work = workload.output.num_elements * rows.kernel * columns.kernel
        parallel = target.is_worth_threads(work, 4 * (workload.inputs[0].num_elements + workload.output.num_elements))
        unroll = bool(candidate["unroll"])
        packed = self.packing(workload, candidate, target)[1].result

        def body(inputs: list[Any], out: Any) -> None:
            data, weight = inputs[0], inputs[1]

            def tile(n: Any, c: Any, h: Any, start: Any, num: int, has: Any, inner_row: bool) -> None:
                sums = local(num, width)
                for column in range(num):
                    with lanes(width) as i:
                        store(sums, T.float32(0), column, i)

                def row(tap: Any) -> None:
                    y = rows.first(h) + tap * rows.dilation
                    for across in range(columns.kernel):
                        for column in range(num):
                            if has(column, across):
                                x = columns.first(start + column) + across * columns.dilation
                                with lanes(width) as i:
                                    product = data[n, c, y, x, i] * weight[c, tap, across, i]
                                    store(sums, sums[column, i] + product, column, i)

                if inner_row:
                    for tap in range(rows.kernel):
                        row(tap)
                else:
                    low, high = rows.taps(h)
                    with T.serial(low, high) as tap:
                        row(tap)
                for column in range(num):
                    with lanes(width) as i:
                        at = (n, c, h, start + column, i)
                        store(out, finish(workload, inputs, sums[column, i], at), *at)

            def whole_row(n: Any, c: Any, h: Any, *, inner: bool) -> None:
                each_tile(columns, candidate["columns"], lambda s, num, has: tile(n, c, h, s, num, has, inner))

            with loop(batch * blocks * out_h, parallel=parallel) as at:
                n, c, h = at // (blocks * out_h), at // out_h % blocks, at % out_h
                low, high = rows.inner
                if unroll and (low, high) == (0, out_h):
                    whole_row(n, c, h, inner=True)
                elif unroll and low < high:
                    with T.If(tirx.all(h >= low, h < high)):
                        with T.Then():
                            whole_row(n, c, h, inner=True)
                        with T.Else():
                            whole_row(n, c, h, inner=False)
                else:
                    whole_row(n, c, h, inner=False)

        return prim_func([workload.inputs[0], packed, *workload.inputs[2:]], workload.output, body)


def axes(workload: Workload) -> tuple[Axis, Axis]:
    """How the window moves along rows and columns."""
    height, width = workload.inputs[0].shape[2:4]
    _, _, kernel_h, kernel_w = workload.inputs[1].shape
    _, _, out_h, out_w, _ = workload.output.shape
    strides, dilation, padding = (workload.attribute(name) for name in ("strides", "dilation", "padding"))
    return (
        Axis(height, out_h, strides[0], kernel_h, dilation[0], padding[0]),
        Axis(width, out_w, strides[1], kernel_w, dilation[1], padding[1]),
    )
