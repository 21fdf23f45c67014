"""Convolution of one group over blocked channels, loop by loop: rows of any length, borders peeled, nothing copied.

One vector holds a block of output channels. A tile of `pixels` neighbouring output pixels times `blocks` channel blocks
stays in registers while the reduction runs around it; every step loads `blocks` vectors of weights, which lie in the
order in which they are used, and broadcasts `pixels` inputs. A row ends in a narrower tile. Where a window is one pixel
and nothing is skipped, the whole image is one row, so that 7 x 7 pixels tile as well as any; and where the image is one
pixel (squeeze and excitation, a classifier's head), the batch is that row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu import nests
from hone.compiler.templates.cpu.depthwise import axes
from hone.compiler.templates.cpu.emit import MAX_WRITTEN, each_tile, num_edges
from hone.compiler.templates.cpu.nests import f32, loop, store, vector, when
from hone.compiler.templates.cpu.tile import tile_cost
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 24
#: Of tiles with the same blocks, so many widths.
_MAX_WIDTHS = 3
#: What it was measured to cost when sums take more than three quarters of the registers: LLVM spills some at times.
_CROWDED = 1.08
#: Steps of the reduction that are written out.
_UNROLL = 4
#: Columns of a filter that are written out; of a wider one (a spectrum's) only at the image's edges.
_MAX_UNROLLED_TAPS = 11
#: Plain input channels (a picture's) that are written out.
_MAX_UNROLLED_CHANNELS = 4
#: float32 items in a line of the cache.
_LINE = 16


@dataclass(frozen=True, slots=True)
class Places:
    """How output pixels lie: `images` times `rows` times `columns`, and whether these are the tensor's own dimensions.

    "image": they are. "merged": one row of all pixels of an image. "batch": one row of all images, of one pixel each.
    """

    kind: str
    images: int
    rows: int
    columns: int

    @classmethod
    def of(cls, workload: Workload) -> Places:
        batch, _, out_h, out_w, _ = workload.output.shape
        unit = (
            workload.inputs[1].shape[2:] == (1, 1)
            and set(workload.attribute("strides")) == {1}
            and not any(workload.attribute("padding"))
        )
        if unit and out_h * out_w == 1:
            return cls("batch", 1, 1, batch)
        if unit:
            return cls("merged", batch, 1, out_h * out_w)
        return cls("image", batch, out_h, out_w)


class DirectConvolution(TirTemplate):
    """Data NCHW or NCHW{i}c, weights OIHW packed as {groups}HWI{blocks * o}, output NCHW{o}c; one group; float32."""

    name = "cpu.conv2d_direct"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "conv2d"
            and workload.attribute("groups") == 1
            and len(workload.output.shape) == 5
            and workload.output.shape[4] <= target.lanes
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
            and _written_at_edges(workload) <= MAX_WRITTEN
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        blocks_out, columns = workload.output.shape[1], Places.of(workload).columns
        written = _written_at_edges(workload)
        found: list[tuple[float, Candidate]] = []
        for blocks in range(1, min(8, blocks_out) + 1):
            # Beside the accumulators: a step's weights and one input.
            fitting = (target.num_vector_registers - blocks - 1) // blocks
            filled = ceil(blocks_out / blocks) * blocks / blocks_out
            ranked = sorted(
                (
                    filled
                    * _row_cost(columns, pixels, blocks)
                    * (_CROWDED if blocks * pixels > target.num_vector_registers * 3 // 4 else 1.0),
                    pixels,
                )
                for pixels in range(1, min(columns, fitting) + 1)
                if written * blocks <= MAX_WRITTEN
            )
            for cost, pixels in ranked[:_MAX_WIDTHS]:
                for at, depth in enumerate(_depths(workload, blocks, pixels, target)):
                    candidate = Candidate.of(self.name, blocks=blocks, pixels=pixels, depth=depth)
                    found.append((cost * (1 + 0.02 * at), candidate))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        channels_out, channels_in, kernel_h, kernel_w = workload.inputs[1].shape
        _, blocks_out, _, _, block = workload.output.shape
        width = candidate["blocks"] * block
        shape = (ceil(blocks_out / candidate["blocks"]), kernel_h, kernel_w, channels_in, width)

        def pack(weight: Any) -> Any:
            def item(group: Any, y: Any, x: Any, k: Any, lane: Any) -> Any:
                channel = group * width + lane
                inside = weight(channel, k, y, x)
                if channels_out == shape[0] * width:
                    return inside
                return tirx.if_then_else(channel < channels_out, inside, f32(0.0))

            return te.compute(shape, item, name="panels")

        return {1: Packing(TensorType(shape, "float32"), pack)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        packed = self.packing(workload, candidate, target)[1].result
        return _Kernel(workload, candidate, target, packed).prim_func()


def _written_at_edges(workload: Workload) -> int:
    """Steps of a wide filter that are written out, for each block of output channels."""
    _, columns = axes(workload)
    if columns.kernel <= _MAX_UNROLLED_TAPS:
        return 0
    return num_edges(columns) * columns.kernel * min(int(workload.inputs[1].shape[1]), _MAX_UNROLLED_CHANNELS)


def _row_cost(columns: int, pixels: int, blocks: int) -> float:
    """Estimated cycles per multiply-add of a row, whole tiles and what is left together."""
    full, rest = divmod(columns, pixels)
    cost = full * pixels * tile_cost(blocks, pixels) + (rest * tile_cost(blocks, rest) if rest else 0.0)
    return cost / columns


def _depths(workload: Workload, blocks: int, pixels: int, target: CpuTarget) -> list[int]:
    """Input channels of a block of the reduction, the likely best first; only rows of merged pixels have several."""
    channels = workload.inputs[1].shape[1]
    places = Places.of(workload)
    if places.kind != "merged" or places.columns <= pixels or len(workload.inputs[0].shape) != 5:
        return [channels]
    inside = workload.inputs[0].shape[4]
    row_bytes = 4 * blocks * workload.output.shape[4]
    if channels * row_bytes <= target.l1_bytes:
        return [channels]
    num_blocks = ceil(channels * row_bytes / target.l1_bytes)
    part = ceil(channels / num_blocks / inside) * inside
    # All at once, with no sums put aside, where that leaves most of the second cache to the pixels.
    found = [channels, part] if channels * row_bytes <= target.l2_bytes // 2 else [part, channels]
    return list(dict.fromkeys(found))


class _Kernel:
    """The loop nest of one candidate."""

    def __init__(self, workload: Workload, candidate: Candidate, target: CpuTarget, packed: TensorType) -> None:
        self._workload, self._target, self._packed = workload, target, packed
        self._places = Places.of(workload)
        self._rows, self._columns = axes(workload)
        self._blocks, self._pixels, self._depth = candidate["blocks"], candidate["pixels"], candidate["depth"]
        _, self._blocks_out, _, self._out_w, self._lanes = workload.output.shape
        self._channels = workload.inputs[1].shape[1]
        data = workload.inputs[0].shape
        self._inside = data[4] if len(data) == 5 else 0
        self._num_groups = packed.shape[0]
        self._num_depths = ceil(self._channels / self._depth)
        self._num_tiles = ceil(self._places.columns / self._pixels)
        self._tiles_at_once = self._tiles_per_task()
        self._fetch_ahead = (
            self._places.kind == "merged"
            and self._num_tiles > 1
            and self._inside > 0
            and 4 * packed.num_elements > target.l1_bytes
        )

    def _tiles_per_task(self) -> int:
        """Of merged pixels: as many tiles as keep their inputs in half of the second cache, and all threads busy."""
        threads = self._target.num_threads
        fitting = self._target.l2_bytes // 2 // (4 * self._channels * self._pixels)
        num = max(1, min(self._num_tiles, fitting))
        tasks = self._places.images * self._num_groups * ceil(self._num_tiles / num)
        if threads > 1 and tasks % threads and tasks < 8 * threads:
            # Too few to be shared evenly: so few tiles that each thread gets several tasks.
            num = max(1, min(num, ceil(self._num_tiles / (2 * threads))))
        return ceil(self._num_tiles / ceil(self._num_tiles / num))

    def prim_func(self) -> Any:
        arguments = [self._workload.inputs[0], self._packed, *self._workload.inputs[2:], self._workload.output]
        return nests.function(arguments, self._body)

    def _body(self, *buffers: Any) -> None:
        self._inputs, self._out, self._weight = buffers[:-1], self._merged(buffers[-1]), buffers[1]
        self._data = self._merged(buffers[0])
        #: Operands of the output's shape, which are read where it is written.
        self._whole = {
            at: self._merged(buffers[at])
            for at, tensor in enumerate(self._workload.inputs)
            if at > 1 and tensor.shape == self._workload.output.shape
        }
        work = self._workload.output.num_elements * prod(self._workload.inputs[1].shape[1:])
        is_parallel = self._target.is_worth_threads(work, 4 * prod(self._packed.shape))
        if self._places.kind == "image":
            self._rows_of_images(is_parallel)
        else:
            self._row_of_pixels(is_parallel)

    def _merged(self, buffer: Any) -> Any:
        """The same image as one row, where it is taken as one."""
        if self._places.kind != "merged":
            return buffer
        images, blocks, height, width, *inside = (int(dim) for dim in buffer.shape)
        return nests.view(buffer, images, blocks, 1, height * width, *inside)

    # --- rows of images: tasks are rows

    def _rows_of_images(self, is_parallel: bool) -> None:
        out_h = self._places.rows
        with nests.parallel(self._places.images * self._num_groups * out_h, is_parallel) as task:
            n = nests.let(task // (self._num_groups * out_h))
            group, h = nests.let(task // out_h % self._num_groups), nests.let(task % out_h)
            self._registers()

            def blocks(count: int) -> None:
                def tile(start: Any, num: int, has: Callable[[int, int], bool]) -> None:
                    places = [(b, p) for b in range(count) for p in range(num)]
                    self._clear(places)
                    low, high = self._taps(h)
                    with T.serial(low, high) as tap:
                        y = self._rows.first(h) + tap * self._rows.dilation

                        def column(held: list[tuple[int, int]], across: Any) -> None:
                            x = self._columns.first(start) + across * self._columns.dilation
                            self._reduce(held, group, tap, across, 0, self._channels, (n, y, x, self._columns.stride))

                        taps = range(self._columns.kernel)
                        if len(taps) > _MAX_UNROLLED_TAPS and all(has(p, at) for p in range(num) for at in taps):
                            with loop(len(taps)) as across:
                                column(places, across)
                        else:
                            for across in taps:
                                if held := [place for place in places if has(place[1], across)]:
                                    column(held, across)
                    self._finish(places, group, lambda p: (n, h, start + p))

                each_tile(self._columns, self._pixels, tile)

            self._each_group(group, blocks)

    def _taps(self, h: Any) -> tuple[Any, Any]:
        """From and to which row of the window an output's row reads within the image."""
        everywhere = all(self._rows.has(at, tap) for at in range(self._rows.out) for tap in range(self._rows.kernel))
        return (0, self._rows.kernel) if everywhere else self._rows.taps(h)

    # --- one row of pixels or images: tasks are stretches of it

    def _row_of_pixels(self, is_parallel: bool) -> None:
        num_parts = ceil(self._num_tiles / self._tiles_at_once)
        with nests.parallel(self._places.images * num_parts * self._num_groups, is_parallel) as task:
            n = nests.let(task // (self._num_groups * num_parts))
            group = nests.let(task % self._num_groups)
            first = nests.let(task // self._num_groups % num_parts * self._tiles_at_once)
            self._registers()
            if self._num_depths > 1:
                width = self._blocks * self._lanes
                self._partial = nests.scratch(self._tiles_at_once * self._pixels, width)

            def blocks(count: int) -> None:
                with loop(self._num_depths) as depth, loop(self._tiles_at_once) as tile:
                    full, rest = divmod(self._places.columns, self._pixels)
                    number = nests.let(first + tile)
                    for num, condition in ((self._pixels, number < full), (rest, number == full)):
                        if num and (num == rest or full):
                            with when(condition):
                                self._part(n, group, number, tile, depth, count, num)

            self._each_group(group, blocks)

    def _part(self, n: Any, group: Any, number: Any, tile: Any, depth: Any, count: int, num: int) -> None:
        """One tile through one block of the reduction."""
        places = [(b, p) for b in range(count) for p in range(num)]
        start, begin = number * self._pixels, depth * self._depth
        once, batch = self._num_depths == 1, self._places.kind == "batch"

        def partial(b: int, p: int, lane: Any) -> tuple[Any, Any]:
            return tile * self._pixels + p, b * self._lanes + lane

        def restore() -> None:
            for place in places:
                with vector(self._lanes) as lane:
                    store(self._sums[place], self._partial[partial(*place, lane)], lane)

        def save() -> None:
            for place in places:
                with vector(self._lanes) as lane:
                    store(self._partial, self._sums[place][lane], *partial(*place, lane))

        def place(pixel: int) -> tuple[Any, Any, Any]:
            return (start + pixel, 0, 0) if batch else (n, 0, start + pixel)

        def finish() -> None:
            self._finish(places, group, place)

        nests.choose(once or depth == 0, lambda: self._clear(places), restore)
        at = (start, 0, 0, 0) if batch else (n, 0, start, 1)

        def reduce(channels: int) -> None:
            self._reduce(places, group, 0, 0, begin, channels, at, tile=tile)

        last = self._channels - (self._num_depths - 1) * self._depth
        if last == self._depth:
            reduce(last)
        else:
            nests.choose(once or depth == self._num_depths - 1, lambda: reduce(last), lambda: reduce(self._depth))
        nests.choose(once or depth == self._num_depths - 1, finish, save)

    # --- tiles

    def _each_group(self, group: Any, blocks: Callable[[int], None]) -> None:
        """`blocks(count)`: all groups have as many blocks, but for the last, which may have fewer."""
        ragged = self._blocks_out % self._blocks
        last = self._num_groups - 1
        if not ragged:
            blocks(self._blocks)
        elif last == 0:
            blocks(ragged)
        else:
            nests.choose(group < last, lambda: blocks(self._blocks), lambda: blocks(ragged))

    def _registers(self) -> None:
        places = [(b, p) for b in range(self._blocks) for p in range(self._pixels)]
        self._sums = dict(zip(places, nests.vectors(len(places), self._lanes), strict=True))
        self._steps = nests.vectors(len(self._workload.epilogue), self._lanes)

    def _clear(self, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            with vector(self._lanes) as lane:
                store(self._sums[place], f32(0.0), lane)

    def _reduce(
        self, places: Sequence[tuple[int, int]], group: Any, tap: Any, across: Any, begin: Any, channels: int,
        at: tuple[Any, Any, Any, int], tile: Any = None,
    ) -> None:  # fmt: skip
        """Add one tap's products of `channels` input channels from `begin`. `at`: image, row, column, and stride."""
        n, y, x, stride = at
        # The fewer of weights and pixels stay in registers, the others pass by one after the other.
        num_pixels = len({p for _, p in places})
        places = sorted(places, key=lambda bp: bp[::-1]) if len(places) <= num_pixels * num_pixels else sorted(places)

        def step(block: Any, item: Any, channel: Any) -> None:
            for b, p in places:
                image, column = (n + p, x) if self._places.kind == "batch" else (n, x + p * stride)
                where = (image, block, y, column, item) if self._inside else (image, channel, y, column)
                with vector(self._lanes) as lane:
                    weight = self._weight[group, tap, across, channel, b * self._lanes + lane]
                    store(self._sums[b, p], self._sums[b, p][lane] + self._data[where] * weight, lane)

        def steps(block: Any, count: int, first: Any) -> None:
            """So many items of a block of channels, the first of which is `first`."""
            unroll = min(_UNROLL, count)
            if count // unroll > 1:
                with loop(count // unroll) as k:
                    for i in range(unroll):
                        step(block, k * unroll + i, first + k * unroll + i)
            else:
                unroll = count
                for i in range(unroll):
                    step(block, i, first + i)
            for i in range(count - count % unroll, count):
                step(block, i, first + i)

        if not self._inside:
            if channels <= _MAX_UNROLLED_CHANNELS:
                for k in range(channels):
                    step(0, 0, begin + k)
            else:
                with loop(channels) as k:
                    step(0, 0, begin + k)
            return
        first_block = begin // self._inside
        whole, rest = divmod(channels, self._inside)
        if whole:
            with loop(whole) as at_block:
                first = begin + at_block * self._inside
                if self._fetch_ahead:
                    self._prefetch(group, begin, tile, at_block)
                steps(first_block + at_block, self._inside, first)
        if rest:
            steps(first_block + whole, rest, begin + whole * self._inside)

    def _prefetch(self, group: Any, begin: Any, tile: Any, block: Any) -> None:
        """This step's share of the weights that come next in memory: tiles and steps share it evenly."""
        num_lines = ceil(self._depth * self._blocks * self._lanes / _LINE)
        per_tile = ceil(num_lines / self._tiles_at_once)
        per_step = ceil(per_tile / max(1, self._depth // self._inside))
        for at in range(per_step):
            ahead = (tile * per_tile + block * per_step + at) * _LINE
            nests.prefetch(self._weight, group, 0, 0, begin + self._depth, ahead)

    # --- results

    def _finish(
        self, places: Sequence[tuple[int, int]], group: Any, place: Callable[[int], tuple[Any, Any, Any]]
    ) -> None:
        """Epilogue and store of a tile; `place(p)`: image, row and column of its pixel `p`."""

        def reader(at: int, n: Any, h: Any, w: Any) -> Callable[..., Any]:
            if at in self._whole:
                return lambda *indices: self._whole[at][(n, indices[1], h, w, indices[-1])]
            return lambda *indices: self._inputs[at][indices]

        for b, p in places:
            n, h, w = place(p)
            readers = [reader(at, n, h, w) for at in range(len(self._inputs))]
            # Of operands with some of the dimensions only.
            row, column = (w // self._out_w, w % self._out_w) if self._places.kind == "merged" else (h, w)
            block = group * self._blocks + b
            with vector(self._lanes) as lane:
                free = iter(self._steps)

                def keep(result: Any, free: Any = free, lane: Any = lane) -> Any:
                    register = next(free)
                    store(register, result, lane)
                    return register[lane]

                at = (n, block, row, column, lane)
                last = apply_epilogue(self._workload, self._sums[b, p][lane], readers, at, keep)
                store(self._out, last, n, block, h, w, lane)
