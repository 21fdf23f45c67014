"""Grouped convolution loop by loop over blocked channels: groups of any size, rows of any length.

A block of output channels may hold several groups, or be part of one. Either way it reads one run of input channels:
those of its groups. The reduction goes over that run, with zero weights where a channel is of another group of the
block; large groups waste nothing so, and small ones as little as a vector must.

Borders are peeled and rows end in narrower tiles.
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
from hone.compiler.templates.cpu.depthwise import axes
from hone.compiler.templates.cpu.emit import (
    MAX_WRITTEN,
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
class Groups:
    """Which input channels a block of output channels reads: `run` of them, from `first(block)`."""

    channels_in: int
    channels_out: int
    groups: int
    block: int

    @property
    def ins(self) -> int:
        return self.channels_in // self.groups

    @property
    def outs(self) -> int:
        return self.channels_out // self.groups

    @property
    def run(self) -> int:
        """The longest that any block needs; the others read it too."""
        num_blocks = -(-self.channels_out // self.block)
        most = 0
        for at in range(num_blocks):
            low, high = at * self.block, min((at + 1) * self.block, self.channels_out) - 1
            most = max(most, (high // self.outs - low // self.outs + 1) * self.ins)
        return most

    def first(self, block: Any) -> Any:
        """By a number, or in TIR."""
        return tirx.min(block * self.block // self.outs * self.ins, self.channels_in - self.run)


def groups_of(workload: Workload) -> Groups:
    channels_out, ins, _, _ = workload.inputs[1].shape
    groups: int = workload.attribute("groups")
    return Groups(ins * groups, channels_out, groups, workload.output.shape[4])


class GroupedConvolution(TirTemplate):
    """Data NCHW{i}c, weights OIHW packed as {blocks}HW{run}{o}, output NCHW{o}c; float32."""

    name = "cpu.grouped_conv2d_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "conv2d"
            and workload.attribute("groups") > 1
            and len(workload.inputs[0].shape) == len(workload.output.shape) == 5
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
            and written_steps(axes(workload)[1], 1) <= MAX_WRITTEN
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        groups = groups_of(workload)
        columns = workload.output.shape[3]
        vectors = max(1, groups.block // target.lanes)
        found: list[tuple[float, Candidate]] = []
        for together, num in itertools.product((1, 2, 3), range(1, min(columns, 14) + 1)):
            fits = together * (num + 2) * vectors + 1 <= target.num_vector_registers
            if together * written_steps(axes(workload)[1], num) > MAX_WRITTEN:
                continue
            # Blocks side by side must read the same channels.
            if (together > 1 and groups.outs % (together * groups.block)) or not (fits or (together, num) == (1, 1)):
                continue
            waste = -(-columns // num) * num / columns
            cost = waste * tile_cost(together * vectors, num)
            found.append((cost, Candidate.of(self.name, blocks=together, columns=num)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:_MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        groups = groups_of(workload)
        _, _, kernel_h, kernel_w = workload.inputs[1].shape
        shape = (workload.output.shape[1], kernel_h, kernel_w, groups.run, groups.block)

        def pack(weight: Any) -> Any:
            def item(b: Any, y: Any, x: Any, k: Any, i: Any) -> Any:
                channel = b * groups.block + i
                inside = groups.first(b) + k - channel // groups.outs * groups.ins
                held = tirx.all(channel < groups.channels_out, inside >= 0, inside < groups.ins)
                return tirx.if_then_else(held, weight(channel, inside, y, x), tirx.const(0.0, "float32"))

            return te.compute(shape, item, name="blocks")

        return {1: Packing(TensorType(shape, "float32"), pack)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        groups = groups_of(workload)
        rows, columns = axes(workload)
        batch, blocks, out_h, _, width = workload.output.shape
        block_in, together = workload.inputs[0].shape[4], candidate["blocks"]
        work = workload.output.num_elements * groups.run * rows.kernel * columns.kernel
        parallel = target.is_worth_threads(work, 4 * workload.output.num_elements)
        packed = self.packing(workload, candidate, target)[1].result

        def body(inputs: list[Any], out: Any) -> None:
            data, weight = inputs[0], inputs[1]

            def tile(n: Any, c: Any, h: Any, start: Any, num: int, has: Any) -> None:
                sums = local(together, num, width)
                for b, column in itertools.product(range(together), range(num)):
                    with lanes(width) as i:
                        store(sums, T.float32(0), b, column, i)
                low, high = rows.taps(h)
                with T.serial(low, high) as tap:
                    y = rows.first(h) + tap * rows.dilation
                    for across in range(columns.kernel):
                        held = [column for column in range(num) if has(column, across)]
                        if not held:
                            continue
                        with T.serial(0, groups.run) as k:
                            channel = groups.first(c) + k
                            for b, column in itertools.product(range(together), held):
                                x = columns.first(start + column) + across * columns.dilation
                                with lanes(width) as i:
                                    pixel = data[n, channel // block_in, y, x, channel % block_in]
                                    taken = weight[c + b, tap, across, k, i]
                                    store(sums, sums[b, column, i] + pixel * taken, b, column, i)
                for b, column in itertools.product(range(together), range(num)):
                    with lanes(width) as i:
                        at = (n, c + b, h, start + column, i)
                        store(out, finish(workload, inputs, sums[b, column, i], at), *at)

            num = blocks // together
            with loop(batch * num * out_h, parallel=parallel) as at:
                n, c, h = at // (num * out_h), at // out_h % num * together, at % out_h
                each_tile(columns, candidate["columns"], partial(tile, n, c, h))

        return prim_func([workload.inputs[0], packed, *workload.inputs[2:]], workload.output, body)
