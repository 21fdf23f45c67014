"""Values stacked along channels, each pixel repeated by a whole factor where asked: concatenation and nearest resize.

Blocks need not end where a part does: an output block is put together of runs of channels, each a vector copy, as long
as runs start and end at a multiple of their length. An upsampled part is never written before it is stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm.script.ir_builder import tirx as T

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.emit import finish, lanes, local, loop, prim_func, store
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """`length` neighbouring channels of one block of a part, and where they go in the output's block."""

    part: int
    block: int
    offset: int
    to: int
    length: int


class StackedChannels(TirTemplate):
    """Parts NCHW{b}c with as many real channels as attribute `channels` says, output NCHW{o}c; float32."""

    name = "cpu.stack_channels"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "stack_channels"
            and len(workload.output.shape) == 5
            and all(len(tensor.shape) == 5 for tensor in workload.inputs[: len(workload.attribute("channels"))])
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        return [Candidate.of(self.name, columns=columns) for columns in (4, 1, 8)]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        batch, blocks, height, width, block = workload.output.shape
        parallel = target.is_worth_threads(0, 8 * workload.output.num_elements)
        factors = workload.attribute("factors")
        plan = [list(runs_of(workload, at)) for at in range(blocks)]

        def body(inputs: list[Any], out: Any) -> None:
            def pixels(runs: list[Run], n: Any, c: int, h: Any, start: Any, num: int) -> None:
                values = local(num, block)
                for column in range(num):
                    for run in runs:
                        factor, part = factors[run.part], inputs[run.part]
                        with lanes(run.length) as i:
                            y, x = h // factor, (start + column) // factor
                            store(values, part[n, run.block, y, x, run.offset + i], column, run.to + i)
                    filled = sum(run.length for run in runs)
                    for empty in range(filled, block):
                        store(values, T.float32(0), column, empty)
                for column in range(num):
                    with lanes(block) as i:
                        at = (n, c, h, start + column, i)
                        store(out, finish(workload, inputs, values[column, i], at), *at)

            def row(n: Any, c: int, h: Any) -> None:
                columns = min(candidate["columns"], width)
                if width >= columns:
                    with T.serial(0, width // columns) as tile:
                        pixels(plan[c], n, c, h, tile * columns, columns)
                if width % columns:
                    pixels(plan[c], n, c, h, width - width % columns, width % columns)

            with loop(batch * height, parallel=parallel) as at:
                for c in range(blocks):
                    row(at // height, c, at % height)

        return prim_func(workload.inputs, workload.output, body)


def runs_of(workload: Workload, block: int) -> Iterator[Run]:
    """What an output block is made of, in order of its channels; short where the last block is not full."""
    width = workload.output.shape[4]
    first = block * width
    channels: tuple[int, ...] = workload.attribute("channels")
    begin = 0
    for part, count in enumerate(channels):
        inside = workload.inputs[part].shape[4]
        at, end = max(begin, first), min(begin + count, first + width)
        while at < end:
            source, to = at - begin, at - first
            # As long as neither block ends, and aligned in both.
            longest = min(end - at, inside - source % inside)
            length = longest if longest == min(inside, width) else _aligned(longest, source % inside, to)
            yield Run(part, source // inside, source % inside, to, length)
            at += length
        begin += count


def _aligned(longest: int, *offsets: int) -> int:
    """The longest power of two that starts at a multiple of itself at every offset."""
    length = 1 << (longest.bit_length() - 1)
    while length > 1 and any(gcd(offset, length) != length for offset in offsets if offset):
        length //= 2
    return length
