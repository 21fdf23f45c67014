"""Winograd convolution: 3x3 filters over blocked channels with 2.25 to 4 times fewer multiplications.

An image is cut into tiles of m x m outputs. Three stages (Lavin & Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016): the input of every tile is transformed to V (n x n points, n = m + 2), every point is a product of
matrices M = U V over channels with the weights U transformed at load, and M is transformed back, with the epilogue.

Tiles are worked on in blocks, so that what goes between stages stays in the second cache. M never leaves it; V is
either a block's own (`fused`: many tiles, few channels), or made for the whole image first, where threads share it and
split the output channels (few tiles, many channels: the weights are the traffic, and each thread reads its part once).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from tvm import te, tirx

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.conv2d import sizes_of
from hone.compiler.templates.cpu.emit import finish, lanes, prim_func, store
from hone.compiler.templates.cpu.linear import multiply
from hone.compiler.templates.cpu.loops import choose, let, loop, scratch, tasks, zero
from hone.compiler.templates.cpu.nests import vectors
from hone.compiler.templates.cpu.tile import tile_cost
from hone.compiler.templates.cpu.winograd_matrices import POINTS, Filtering, filtering
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 24
#: With fewer channels the transforms cost more than the products save.
MIN_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """A workload cut as a candidate says."""

    outputs: int  # m, along one side of a tile
    batch: int
    tiles_h: int
    tiles_w: int
    block_tiles: int  # tiles worked on at once
    tile_rows: int  # of them in registers
    channels_in: int  # real ones: the last block may hold more, whose values nobody vouches for
    blocks_in: int
    block_in: int
    groups_out: int  # output channel blocks, `blocks` at a time in registers
    blocks: int
    block_out: int

    @property
    def points(self) -> int:
        return (self.outputs + 2) ** 2

    @property
    def tiles(self) -> int:
        return self.batch * self.tiles_h * self.tiles_w

    @property
    def num_blocks(self) -> int:
        return ceil(self.tiles / self.block_tiles)

    @property
    def input_stride(self) -> int:
        """Items between V's points. One cache line more than they need, or all points would share a few sets."""
        return self.blocks_in * self.block_tiles * self.block_in + 16

    @property
    def product_stride(self) -> int:
        return self.block_tiles * self.blocks * self.block_out + 16

    def packed(self) -> tuple[int, ...]:
        """U: output group, point, input channel, output channels of the group."""
        return (self.groups_out, self.points, self.channels_in, self.blocks * self.block_out)


def _plan(workload: Workload, candidate: Candidate) -> _Plan:
    s = sizes_of(workload)
    outputs = candidate["outputs"]
    return _Plan(
        outputs=outputs,
        batch=s.batch,
        tiles_h=ceil(s.out_h / outputs),
        tiles_w=ceil(s.out_w / outputs),
        block_tiles=candidate["block_tiles"],
        tile_rows=candidate["tile_rows"],
        channels_in=workload.inputs[1].shape[1],
        blocks_in=s.blocks_in,
        block_in=s.block_in,
        groups_out=s.blocks_out // candidate["blocks"],
        blocks=candidate["blocks"],
        block_out=s.block_out,
    )


class WinogradConvolution(TirTemplate):
    """Data NCHW{i}c, weights OIHW known at load, output NCHW{o}c; 3x3, stride 1, one group; float32."""

    name = "cpu.conv2d_winograd"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "conv2d"
            and workload.attribute("groups") == 1
            and 1 in workload.weights
            and len(workload.inputs[0].shape) == len(workload.output.shape) == 5
            and workload.inputs[1].shape[2:] == (3, 3)
            and workload.inputs[1].shape[0] >= MIN_CHANNELS <= workload.inputs[1].shape[1]
            and workload.attribute("strides") == (1, 1)
            and workload.attribute("dilation") == (1, 1)
            and min(workload.output.shape[2:4]) >= min(POINTS)
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        """The cheapest few by `_cost` of each kind (size of tile, fused or not), taken in turns so that a search that
        ends early has seen all kinds: costs tell candidates of one kind apart better than kinds."""
        s = sizes_of(workload)
        kinds: list[list[tuple[float, Candidate]]] = []
        for outputs, fused in itertools.product(POINTS, (0, 1)):
            if outputs > min(s.out_h, s.out_w):
                continue
            tiles = s.batch * ceil(s.out_h / outputs) * ceil(s.out_w / outputs)
            kind = []
            for block_tiles in sorted({ceil(tiles / parts) for parts in (1, 2, 4, 8, 16, 28, 56)}):
                for blocks, tile_rows in _register_tiles(s.blocks_out, block_tiles, s.block_out, target):
                    candidate = Candidate.of(
                        self.name,
                        outputs=outputs,
                        fused=fused,
                        block_tiles=block_tiles,
                        blocks=blocks,
                        tile_rows=tile_rows,
                    )
                    kind.append((_cost(workload, target, candidate), candidate))
            kind.sort(key=lambda pair: (pair[0], str(pair[1])))
            kinds.append(kind[: MAX_CANDIDATES // (2 * len(POINTS))])
        kinds.sort(key=lambda kind: (kind[0][0], str(kind[0][1])))
        turns = itertools.zip_longest(*kinds)
        return [pair[1] for turn in turns for pair in turn if pair is not None]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        plan = _plan(workload, candidate)
        return {1: Packing(TensorType(plan.packed(), "float32"), lambda w: _transformed_weight(w, plan))}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        plan = _plan(workload, candidate)
        parallel = target.is_worth_threads(sizes_of(workload).multiply_adds / 2, 0)
        kernel = _Kernel(workload, plan, parallel)
        types = [workload.inputs[0], TensorType(plan.packed(), "float32"), *workload.inputs[2:]]
        return prim_func(types, workload.output, kernel.fused if candidate["fused"] else kernel.shared)


def _register_tiles(blocks_out: int, block_tiles: int, block_out: int, target: CpuTarget) -> list[tuple[int, int]]:
    """Output blocks and tiles whose sums fit the registers, beside a step's weights, the next step's, and an input."""
    vectors = max(1, block_out // target.lanes)
    found = []
    for blocks in (1, 2, 3, 4):
        most = (target.num_vector_registers - 1 - 2 * blocks * vectors) // (blocks * vectors)
        if blocks_out % blocks == 0 and most >= 1:
            steps = ceil(block_tiles / most)
            found += sorted({(blocks, ceil(block_tiles / steps)), (blocks, min(most, block_tiles))})
    return found


def _cost(workload: Workload, target: CpuTarget, candidate: Candidate) -> float:
    """A rough number of cycles on one thread: products, transforms, and what does not fit the second cache."""
    p = _plan(workload, candidate)
    vectors = max(1, p.block_out // target.lanes)
    steps = ceil(p.block_tiles / p.tile_rows) * p.tile_rows * p.num_blocks
    per_step = tile_cost(p.blocks * vectors, p.tile_rows)
    channels_in, blocks_out = p.blocks_in * p.block_in, p.groups_out * p.blocks
    products = p.points * steps * channels_in * blocks_out * vectors * per_step
    transforms = 6.0 * p.points * p.tiles * (p.blocks_in + blocks_out)
    weights = 4.0 * p.points * channels_in * blocks_out * p.block_out
    block = 4.0 * p.points * p.block_tiles * p.blocks * p.block_out
    inputs = 4.0 * p.points * channels_in * (p.block_tiles if candidate["fused"] else p.tiles)
    room = 0.8 * target.l2_bytes
    repeats = p.num_blocks if weights / (1 if candidate["fused"] else p.groups_out) > room else 1
    beyond = weights * repeats + (2 * inputs if not candidate["fused"] else 0) * (inputs > room)
    if candidate["fused"] and block + inputs > room:
        beyond += p.num_blocks * (block + inputs)
    elif block > room:
        beyond += 2 * block * p.groups_out * p.num_blocks
    tasks = p.num_blocks if candidate["fused"] else p.num_blocks * p.groups_out
    uneven = ceil(tasks / target.num_threads) * target.num_threads / tasks
    return (products + transforms) * uneven + beyond / 8.0


def _transformed_weight(weight: Any, plan: _Plan) -> Any:
    """G g G^T for every filter, zero for outputs that only fill a block."""
    channels_out = int(weight.shape[0])
    matrix = filtering(plan.outputs).filter
    n = plan.outputs + 2

    def tap(o: Any, i: Any, y: int, x: int) -> Any:
        if channels_out == plan.groups_out * plan.blocks * plan.block_out:
            return weight(o, i, y, x)
        return tirx.if_then_else(o < channels_out, weight(o, i, y, x), zero())

    def combine(row: Any, values: Sequence[Any]) -> Any:
        """One row of G, chosen by a variable, times three values."""
        total = zero()
        for at, coefficients in enumerate(matrix):
            term = multiply((coefficients,), values)[0]
            total = tirx.Select(row == at, term, total)
        return total

    half = te.compute(
        (n, 3, plan.groups_out, plan.channels_in, plan.blocks * plan.block_out),
        lambda p, x, g, i, o: combine(p, [tap(g * plan.blocks * plan.block_out + o, i, y, x) for y in range(3)]),
        name="half",
    )
    return te.compute(
        plan.packed(),
        lambda g, point, i, o: combine(point % n, [half(point // n, x, g, i, o) for x in range(3)]),
        name="transformed",
    )


class _Kernel:
    """Writes the stages. V holds [block][point][input block][tile][channel], M [point][tile][output block][channel]."""

    def __init__(self, workload: Workload, plan: _Plan, is_parallel: bool) -> None:
        self._workload, self._plan, self._parallel = workload, plan, is_parallel
        self._sizes = sizes_of(workload)
        self._matrices: Filtering = filtering(plan.outputs)

    def shared(self, inputs: Sequence[Any], out: Any) -> None:
        """V of everything first; then blocks of output channels times blocks of tiles."""
        plan, data, weight = self._plan, inputs[0], inputs[1]
        transformed = scratch(plan.num_blocks * plan.points * plan.input_stride)
        rows = plan.batch * plan.tiles_h
        with tasks(plan.blocks_in * rows, parallel=self._parallel) as task:
            block_in, row = let(task // rows), let(task % rows)
            with loop(plan.tiles_w) as column:
                tile = let(row * plan.tiles_w + column)
                into = let(tile // plan.block_tiles * (plan.points * plan.input_stride))
                self._transform_input(data, transformed, into, tile % plan.block_tiles, tile, block_in)
        with tasks(plan.groups_out * plan.num_blocks, parallel=self._parallel) as task:
            group, block = let(task // plan.num_blocks), let(task % plan.num_blocks)
            products = scratch(plan.points * plan.product_stride)
            self._multiply(transformed, block * (plan.points * plan.input_stride), weight, group, products)
            self._transform_outputs(products, block, group, inputs, out)

    def fused(self, inputs: Sequence[Any], out: Any) -> None:
        """A block of tiles through all stages."""
        plan, data, weight = self._plan, inputs[0], inputs[1]
        with tasks(plan.num_blocks, parallel=self._parallel) as block:
            transformed = scratch(plan.points * plan.input_stride)
            products = scratch(plan.points * plan.product_stride)
            with loop(plan.blocks_in) as block_in, loop(self._tiles_of(block)) as at:
                self._transform_input(data, transformed, 0, at, block * plan.block_tiles + at, block_in)
            with loop(plan.groups_out) as group:
                self._multiply(transformed, 0, weight, group, products)
                self._transform_outputs(products, block, group, inputs, out)

    def _tiles_of(self, block: Any) -> Any:
        """How many tiles a block has: the last one may be short."""
        plan = self._plan
        if plan.tiles % plan.block_tiles == 0:
            return plan.block_tiles
        return tirx.min(plan.block_tiles, plan.tiles - block * plan.block_tiles)

    def _place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Image, and the first output row and column of a tile."""
        plan = self._plan
        per_image = plan.tiles_h * plan.tiles_w
        image = let(tile // per_image)
        row = let(tile % per_image // plan.tiles_w * plan.outputs)
        return image, row, let(tile % plan.tiles_w * plan.outputs)

    def _transform_input(self, data: Any, inputs: Any, into: Any, at: Any, tile: Any, block_in: Any) -> None:
        plan, s = self._plan, self._sizes
        n, width = plan.outputs + 2, plan.block_in
        image, row, column = self._place(tile)
        top, left = let(row - s.padding[0]), let(column - s.padding[1])
        base = let(into + block_in * (plan.block_tiles * width) + at * width)

        def transform(read: Any) -> None:
            half = vectors(n * n, width)
            for x in range(n):
                with lanes(width) as lane:
                    column_values = [read(y, x, lane) for y in range(n)]
                    for y, value in enumerate(multiply(self._matrices.input, column_values)):
                        store(half[y * n + x], value, lane)
            for y in range(n):
                with lanes(width) as lane:
                    row_values = [half[y * n + x][lane] for x in range(n)]
                    for x, value in enumerate(multiply(self._matrices.input, row_values)):
                        store(inputs, value, base + (y * n + x) * plan.input_stride + lane)

        def inside() -> None:
            transform(lambda y, x, lane: data[image, block_in, top + y, left + x, lane])

        def across_the_border() -> None:
            patch = scratch(n * n * width)
            with loop(n * n) as place, lanes(width) as lane:
                store(patch, zero(), place * width + lane)
            first_y, first_x = tirx.max(0, -top), tirx.max(0, -left)
            rows, columns = (first_y, tirx.min(n, s.height - top)), (first_x, tirx.min(n, s.width - left))
            with loop(*rows) as y, loop(*columns) as x, lanes(width) as lane:
                store(patch, data[image, block_in, top + y, left + x, lane], (y * n + x) * width + lane)
            transform(lambda y, x, lane: patch[(y * n + x) * width + lane])

        reach_h, reach_w = plan.tiles_h * plan.outputs + 2, plan.tiles_w * plan.outputs + 2
        if s.padding[:2] == (0, 0) and reach_h <= s.height and reach_w <= s.width:
            inside()
        else:
            bounds = (top >= 0, left >= 0, top + n <= s.height, left + n <= s.width)
            choose(tirx.all(*bounds), inside, across_the_border)

    def _multiply(self, inputs: Any, start: Any, weight: Any, group: Any, products: Any) -> None:
        """M = U V for a group of output channels and a block of tiles, a register tile at a time."""
        plan = self._plan
        width, row_items = plan.block_out, plan.blocks * plan.block_out
        full, rest = divmod(plan.block_tiles, plan.tile_rows)

        def tile_of(point: Any, first: Any, rows: int) -> None:
            sums = vectors(rows * plan.blocks, width)
            for held in sums:
                with lanes(width) as lane:
                    store(held, zero(), lane)
            base = let(start + point * plan.input_stride + first * plan.block_in)

            def add(outer: Any, inner: Any) -> None:
                for row in range(rows):
                    value = inputs[base + outer * (plan.block_tiles * plan.block_in) + row * plan.block_in + inner]
                    for block in range(plan.blocks):
                        held = sums[row * plan.blocks + block]
                        with lanes(width) as lane:
                            factor = weight[group, point, outer * plan.block_in + inner, block * width + lane]
                            store(held, held[lane] + value * factor, lane)

            full_blocks, left = divmod(plan.channels_in, plan.block_in)
            if full_blocks:
                with loop(full_blocks) as outer, loop(plan.block_in) as inner:
                    add(outer, inner)
            if left:
                with loop(left) as inner:
                    add(full_blocks, inner)
            for row in range(rows):
                for block in range(plan.blocks):
                    with lanes(width) as lane:
                        target = point * plan.product_stride + (first + row) * row_items + block * width + lane
                        store(products, sums[row * plan.blocks + block][lane], target)

        with loop(plan.points) as point:
            if full:
                with loop(full) as step:
                    tile_of(point, step * plan.tile_rows, plan.tile_rows)
            if rest:
                tile_of(point, full * plan.tile_rows, rest)

    def _transform_outputs(self, products: Any, block: Any, group: Any, inputs: Sequence[Any], out: Any) -> None:
        with loop(self._tiles_of(block)) as at, loop(self._plan.blocks) as block_out:
            tile = let(block * self._plan.block_tiles + at)
            self._transform_output(products, at, block_out, tile, group * self._plan.blocks + block_out, inputs, out)

    def _transform_output(
        self, products: Any, at: Any, block_out: Any, tile: Any, channel: Any, inputs: Sequence[Any], out: Any
    ) -> None:
        plan, s = self._plan, self._sizes
        m, n, width = plan.outputs, plan.outputs + 2, plan.block_out
        image, row, column = self._place(tile)
        base = let((at * plan.blocks + block_out) * width)

        def put(value: Any, y: Any, x: Any, lane: Any) -> None:
            place = (image, channel, row + y, column + x, lane)
            store(out, finish(self._workload, inputs, value, place), *place)

        half = vectors(m * n, width)
        for x in range(n):
            with lanes(width) as lane:
                column_values = [products[base + (y * n + x) * plan.product_stride + lane] for y in range(n)]
                for y, value in enumerate(multiply(self._matrices.output, column_values)):
                    store(half[y * n + x], value, lane)

        def row_of(y: int, lane: Any) -> list[Any]:
            return multiply(self._matrices.output, [half[y * n + x][lane] for x in range(n)])

        def whole() -> None:
            for y in range(m):
                results = vectors(m, width)
                with lanes(width) as lane:
                    for x, value in enumerate(row_of(y, lane)):
                        store(results[x], value, lane)
                for x in range(m):
                    with lanes(width) as lane:
                        put(results[x][lane], y, x, lane)

        def cut_off() -> None:
            results = scratch(m * m * width)
            for y in range(m):
                with lanes(width) as lane:
                    for x, value in enumerate(row_of(y, lane)):
                        store(results, value, (y * m + x) * width + lane)
            rows, columns = tirx.min(m, s.out_h - row), tirx.min(m, s.out_w - column)
            with loop(rows) as y, loop(columns) as x, lanes(width) as lane:
                put(results[(y * m + x) * width + lane], y, x, lane)

        if s.out_h % m == 0 and s.out_w % m == 0:
            whole()
        else:
            choose(tirx.all(row + m <= s.out_h, column + m <= s.out_w), whole, cut_off)
