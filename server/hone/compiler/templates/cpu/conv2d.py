"""Direct convolution over blocked channels, its accumulators in vector registers.

One vector holds a block of output channels. A tile of `rows` x `columns` output pixels times `blocks` channel blocks
stays in registers while the reduction runs around it: every step loads `blocks` weight vectors and broadcasts
`rows` x `columns` inputs. Bias, residual and activation are applied as the tile is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm import te, tirx
from tvm.s_tir import Schedule

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.tile import tile_cost
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 40


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Shapes of a blocked convolution. `block_in` is 0 where the input has plain NCHW layout."""

    batch: int
    blocks_in: int
    block_in: int
    height: int
    width: int
    blocks_out: int
    block_out: int
    kernel_h: int
    kernel_w: int
    out_h: int
    out_w: int
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]

    @property
    def channels_in(self) -> int:
        return self.blocks_in * max(self.block_in, 1)

    @property
    def multiply_adds(self) -> int:
        outputs = self.batch * self.blocks_out * self.block_out * self.out_h * self.out_w
        return outputs * self.channels_in * self.kernel_h * self.kernel_w


def sizes_of(workload: Workload) -> _Sizes:
    data, weight = workload.inputs[0].shape, workload.inputs[1].shape
    blocked = len(data) == 5
    _, blocks_out, out_h, out_w, block_out = workload.output.shape
    return _Sizes(
        batch=data[0],
        blocks_in=data[1],
        block_in=data[4] if blocked else 0,
        height=data[2],
        width=data[3],
        blocks_out=blocks_out,
        block_out=block_out,
        kernel_h=weight[2],
        kernel_w=weight[3],
        out_h=out_h,
        out_w=out_w,
        strides=workload.attribute("strides"),
        padding=workload.attribute("padding"),
        dilation=workload.attribute("dilation"),
    )


class BlockedConvolution(TirTemplate):
    """Data NCHW or NCHW{i}c, weights OIHW (packed as OIHW{o}o or OIHW{i}i{o}o), output NCHW{o}c; one group; float32."""

    name = "cpu.conv2d_nchwc"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "conv2d"
            and workload.attribute("groups") == 1
            and len(workload.output.shape) == 5
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def blocks(self, channels_in: int, channels_out: int, target: CpuTarget) -> tuple[int, int] | None:
        """Widths of the blocks in which channels go in and come out; 0 for plain ones, None: not its kind.

        Few or odd input channels (a picture's three) are read plain; odd output channels are not for this template.
        """
        block_out = channel_block(channels_out, target)
        return (channel_block(channels_in, target), block_out) if block_out else None

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        s = sizes_of(workload)
        vectors = max(1, s.block_out // target.lanes)  # registers one block takes
        # Beside the accumulators: weights, which LLVM reads one step ahead, and one input. One more, and it spills.
        found: list[tuple[float, Candidate]] = []
        for blocks, rows, columns in itertools.product((1, 2, 3, 4), (1, 2, 4, 7), range(1, 29)):
            if s.blocks_out % blocks or s.out_h % rows or s.out_w % columns:
                continue
            accumulators = blocks * rows * columns * vectors
            if accumulators + 2 * blocks * vectors + 1 > target.num_vector_registers:
                continue
            for kernel_innermost in (0, 1) if s.kernel_w > 1 and s.block_in else (0,):
                candidate = Candidate.of(
                    self.name, blocks=blocks, rows=rows, columns=columns, kernel_innermost=kernel_innermost
                )
                found.append((tile_cost(blocks * vectors, rows * columns) + 0.01 * kernel_innermost, candidate))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        return {1: _weight_blocks(workload)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        s = sizes_of(workload)
        parallel = target.is_worth_threads(s.multiply_adds, 0)
        return _schedule(_compute(workload, s), s, candidate, target, parallel=parallel)


def channel_block(channels: int, target: CpuTarget) -> int:
    """Channels in one block: a vector, or half of one where only that divides; 0 where neither does."""
    for block in (target.lanes, target.lanes // 2):
        if block >= 4 and channels % block == 0:
            return block
    return 0


def _run_of_channels(workload: Workload, s: _Sizes) -> int:
    """Input channels that lie together and divide all real ones: a block, or part of one where the last is not full."""
    return gcd(workload.inputs[1].shape[1], s.block_in) if s.block_in else 0


def _weight_blocks(workload: Workload) -> Packing:
    s = sizes_of(workload)
    o = s.block_out
    channels_out, channels_in, *_ = workload.inputs[1].shape
    i = _run_of_channels(workload, s)
    shape = (s.blocks_out, channels_in // max(i, 1), s.kernel_h, s.kernel_w)

    def real(w: Any, oc: Any, ic: Any, y: Any, x: Any) -> Any:
        """The weight, and zero for channels that fill up blocks."""
        if channels_out == s.blocks_out * o:
            return w(oc, ic, y, x)
        return tirx.if_then_else(oc < channels_out, w(oc, ic, y, x), tirx.const(0.0, "float32"))

    if i:
        return Packing(
            TensorType((*shape, i, o), "float32"),
            lambda w: te.compute(
                (*shape, i, o), lambda oo, ii, y, x, ic, oc: real(w, oo * o + oc, ii * i + ic, y, x), name="blocks"
            ),
        )
    return Packing(
        TensorType((*shape, o), "float32"),
        lambda w: te.compute((*shape, o), lambda oo, ic, y, x, oc: real(w, oo * o + oc, ic, y, x), name="blocks"),
    )


def _compute(workload: Workload, s: _Sizes) -> Any:
    types = [workload.inputs[0], _weight_blocks(workload).result, *workload.inputs[2:]]
    inputs = [te.placeholder(t.shape, t.dtype, name=f"input{i}") for i, t in enumerate(types)]
    data, weight = inputs[0], inputs[1]
    top, left, bottom, right = s.padding
    padded = data
    if any(s.padding):

        def inside(*i: Any) -> Any:
            h, w = i[2] - top, i[3] - left
            return tirx.if_then_else(
                tirx.all(h >= 0, h < s.height, w >= 0, w < s.width),
                data(i[0], i[1], h, w, *i[4:]),
                tirx.const(0.0, "float32"),
            )

        shape = (s.batch, s.blocks_in, s.height + top + bottom, s.width + left + right)
        padded = te.compute(shape + ((s.block_in,) if s.block_in else ()), inside, name="pad")
    run = _run_of_channels(workload, s)
    ic = te.reduce_axis((0, workload.inputs[1].shape[1] // max(run, 1)), "ic")
    kh, kw = te.reduce_axis((0, s.kernel_h), "kh"), te.reduce_axis((0, s.kernel_w), "kw")
    ii = te.reduce_axis((0, run), "ii") if run else None

    def convolve(n: Any, oc: Any, h: Any, w: Any, o: Any) -> Any:
        y, x = h * s.strides[0] + kh * s.dilation[0], w * s.strides[1] + kw * s.dilation[1]
        if ii is None:
            return te.sum(padded(n, ic, y, x) * weight(oc, ic, kh, kw, o), axis=[ic, kh, kw])
        block, item = ic * run // s.block_in, ic * run % s.block_in + ii
        return te.sum(padded(n, block, y, x, item) * weight(oc, ic, kh, kw, ii, o), axis=[ic, kh, kw, ii])

    conv = te.compute(workload.output.shape, convolve, name="conv")
    out = te.compute(workload.output.shape, lambda *at: apply_epilogue(workload, conv(*at), inputs, at), name="out")
    return te.create_prim_func([*inputs, out])


def _schedule(func: Any, s: _Sizes, candidate: Candidate, target: CpuTarget, *, parallel: bool) -> Any:
    schedule = Schedule(func)
    conv, out = schedule.get_sblock("conv"), schedule.get_sblock("out")
    n, oc, h, w, o = schedule.get_loops(out)
    oc, oc_in = schedule.split(oc, [None, candidate["blocks"]])
    h, h_in = schedule.split(h, [None, candidate["rows"]])
    w, w_in = schedule.split(w, [None, candidate["columns"]])
    schedule.reorder(n, oc, h, w, oc_in, h_in, w_in, o)
    outer = schedule.fuse(n, oc, h)
    if parallel:
        schedule.parallel(outer)
    for loop in (oc_in, h_in, w_in):
        schedule.unroll(loop)
    schedule.vectorize(o)

    schedule.compute_at(conv, w, preserve_unit_loops=True)
    loops = schedule.get_loops(conv)
    num_reduction = 4 if s.block_in else 3
    oc_in, h_in, w_in, o = loops[-4 - num_reduction : -num_reduction]
    ic, kh, kw = loops[-num_reduction : len(loops) - num_reduction + 3]
    inner = [loops[-1]] if s.block_in else []
    order = [ic, kh, *inner, kw] if candidate["kernel_innermost"] else [ic, kh, kw, *inner]
    schedule.reorder(*order, oc_in, h_in, w_in, o)
    for loop in (oc_in, h_in, w_in):
        schedule.unroll(loop)
    schedule.vectorize(o)
    if s.kernel_w > 1 and candidate["kernel_innermost"]:
        schedule.unroll(kw)
    schedule.decompose_reduction(conv, ic)
    *tile, lanes = schedule.get_loops(schedule.get_sblock("conv_init"))[-4:]
    for loop in tile:
        schedule.unroll(loop)
    schedule.vectorize(lanes)
    schedule.set_scope(conv, 0, "local")

    if any(s.padding):
        loops = schedule.get_loops(schedule.get_sblock("pad"))
        if s.block_in:
            schedule.vectorize(loops[-1])
        rows = schedule.fuse(*loops[:3])
        if parallel:
            schedule.parallel(rows)
    return schedule.mod["main"]
