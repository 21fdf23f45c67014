"""Transposed convolution over blocked channels, as the plain convolutions that it is made of.

With stride s, outputs at the same place modulo s read the same taps of the window: each of those s*s phases is a small
convolution with stride 1, and none multiplies zeros that a stretched input would hold. A kernel as wide as its stride
has one tap a phase. Phases of a row are computed in turn, so that rows are read from the nearest cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from hone.compiler.templates.cpu.tile import tile_cost
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

_MAX_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class Phase:
    """Outputs at `at` modulo the stride along one axis: output at + stride*i reads input i + shifts[k] by taps[k]."""

    at: int
    out: int
    taps: tuple[int, ...]
    shifts: tuple[int, ...]

    def axis(self, size: int) -> Axis:
        """The same as a window that moves by one: its taps in the order of what they read."""
        return Axis(size, self.out, 1, len(self.taps), self._step, -self.shifts[0])

    @property
    def _step(self) -> int:
        return self.shifts[1] - self.shifts[0] if len(self.shifts) > 1 else 1


def phases_of(workload: Workload, axis: int) -> list[Phase]:
    """Of rows (0) or columns (1). A phase without taps holds zeros."""
    stride, dilation = workload.attribute("strides")[axis], workload.attribute("dilation")[axis]
    before, out = workload.attribute("padding")[axis], workload.output.shape[2 + axis]
    kernel = workload.inputs[1].shape[2 + axis]
    found = []
    for at in range(min(stride, out)):
        # Output o gets input (o + before - tap*dilation) / stride where that is whole.
        read = sorted(
            ((at + before - tap * dilation) // stride, tap)
            for tap in range(kernel)
            if (at + before - tap * dilation) % stride == 0
        )
        found.append(
            Phase(at, -(-(out - at) // stride), tuple(tap for _, tap in read), tuple(shift for shift, _ in read))
        )
    return found


def _written(workload: Workload, width: int) -> int:
    """Steps that are written out, of all pairs of phases."""
    _, _, _, width_in, _ = workload.inputs[0].shape
    num_rows = sum(len(phase.taps) for phase in phases_of(workload, 0))
    return num_rows * sum(written_steps(phase.axis(width_in), width) for phase in phases_of(workload, 1) if phase.taps)


class TransposedConvolution(TirTemplate):
    """Data NCHW{i}c, weights IOHW packed as {blocks}HWI{o}, output NCHW{o}c; one group; float32."""

    name = "cpu.conv2d_transpose_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "conv2d_transpose"
            and len(workload.inputs[0].shape) == len(workload.output.shape) == 5
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
            and _written(workload, 1) <= MAX_WRITTEN
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        _, blocks, _, _, width = workload.output.shape
        vectors = max(1, width // target.lanes)
        columns = max(phase.out for phase in phases_of(workload, 1))
        found: list[tuple[float, Candidate]] = []
        for together, num in itertools.product((1, 2, 3), range(1, min(columns, 14) + 1)):
            fits = together * (num + 2) * vectors + 1 <= target.num_vector_registers
            if together * _written(workload, num) > MAX_WRITTEN and (together, num) != (1, 1):
                continue
            if blocks % together or not (fits or (together, num) == (1, 1)):
                continue
            waste = -(-columns // num) * num / columns
            cost = waste * tile_cost(together * vectors, num)
            found.append((cost, Candidate.of(self.name, blocks=together, columns=num)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:_MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        channels_in, channels, kernel_h, kernel_w = workload.inputs[1].shape
        _, blocks, _, _, width = workload.output.shape
        shape = (blocks, kernel_h, kernel_w, channels_in, width)

        def pack(weight: Any) -> Any:
            def item(b: Any, y: Any, x: Any, k: Any, i: Any) -> Any:
                inside = weight(k, b * width + i, y, x)
                if channels == blocks * width:
                    return inside
                return tirx.if_then_else(b * width + i < channels, inside, tirx.const(0.0, "float32"))

            return te.compute(shape, item, name="blocks")

        return {1: Packing(TensorType(shape, "float32"), pack)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        batch, blocks, _, _, width = workload.output.shape
        _, _, height, width_in, inside = workload.inputs[0].shape
        channels_in = workload.inputs[1].shape[0]
        strides = workload.attribute("strides")
        rows, columns = phases_of(workload, 0), phases_of(workload, 1)
        together = candidate["blocks"]
        work = workload.inputs[0].num_elements * workload.inputs[1].num_elements // channels_in
        parallel = target.is_worth_threads(work, 4 * workload.output.num_elements)
        packed = self.packing(workload, candidate, target)[1].result

        def body(inputs: list[Any], out: Any) -> None:
            data, weight = inputs[0], inputs[1]

            def tile(n: Any, c: Any, i: Any, down: Phase, across: Phase, start: Any, num: int, has: Any) -> None:
                sums = local(together, num, width)
                for b in range(together):
                    for column in range(num):
                        with lanes(width) as lane:
                            store(sums, T.float32(0), b, column, lane)

                def accumulate(y: Any, tap: Any) -> None:
                    """All columns' taps of one row of the window."""
                    for at, (other, shift) in enumerate(zip(across.taps, across.shifts, strict=True)):
                        held = [column for column in range(num) if has(column, at)]
                        if not held:
                            continue
                        for first, extent in _runs(channels_in, inside):
                            with T.serial(0, extent) as k:
                                for b in range(together):
                                    for column in held:
                                        x = start + column + shift
                                        with lanes(width) as lane:
                                            pixel = data[n, first // inside + k // inside, y, x, k % inside]
                                            taken = weight[c + b, tap, other, first + k, lane]
                                            store(sums, sums[b, column, lane] + pixel * taken, b, column, lane)

                for tap, shift in zip(down.taps, down.shifts, strict=True):
                    y = i + shift
                    if shift >= 0 and down.out - 1 + shift < height:
                        accumulate(y, tap)
                    else:
                        with T.If(tirx.all(y >= 0, y < height)), T.Then():
                            accumulate(y, tap)
                for b in range(together):
                    for column in range(num):
                        with lanes(width) as lane:
                            x = (start + column) * strides[1] + across.at
                            at = (n, c + b, i * strides[0] + down.at, x, lane)
                            store(out, finish(workload, inputs, sums[b, column, lane], at), *at)

            def row(n: Any, c: Any, i: Any, down: Phase) -> None:
                for across in columns:
                    # Where there are no taps, tiles only hold the output.
                    axis = across.axis(width_in) if across.taps else Axis(across.out, across.out, 1, 1, 1, 0)
                    body_of = partial(tile, n, c, i, down, across)
                    each_tile(axis, candidate["columns"], body_of)

            groups, most = blocks // together, max(phase.out for phase in rows)
            with loop(batch * groups * most, parallel=parallel) as at:
                n, c, i = at // (groups * most), at // most % groups * together, at % most
                for down in rows:
                    if down.out == most:
                        row(n, c, i, down)
                    else:
                        with T.If(i < down.out), T.Then():
                            row(n, c, i, down)

        return prim_func([workload.inputs[0], packed, *workload.inputs[2:]], workload.output, body)


def _runs(channels: int, block: int) -> list[tuple[int, int]]:
    """Whole blocks of channels, then the rest."""
    whole = channels - channels % block
    return [(first, extent) for first, extent in ((0, whole), (whole, channels - whole)) if extent]
