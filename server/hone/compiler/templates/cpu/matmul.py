"""Product of activations and packed weights: a tile of the result in vector registers, blocks that fit the caches.

Weights lie in groups of a few vectors' width, so that the inner loop reads them in order whatever the number of columns
is; what does not fill a group is padded with zeros when packing. A block of a group (`depth` deep) stays in the nearest
cache while all tiles of rows go by; the next block, which follows it in memory, is fetched meanwhile where weights are
too many to stay in the cache from one run to the next. One row (a dense layer at batch 1) is a matter of memory: many
columns at once keep many loads in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import te, tirx

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.finish import Finish
from hone.compiler.templates.cpu.nests import (
    choose,
    f32,
    function,
    let,
    loop,
    parallel,
    prefetch,
    scratch,
    store,
    vector,
    vectors,
    view,
    when,
)
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 24
#: Tiles of registers that are tried with each depth of blocks.
_MAX_TILES = 8
#: Of tiles of one width, so many heights.
_MAX_ROWS = 2
#: Steps of the inner loop that are written out.
_UNROLL = 4
#: float32 items in a line of the cache.
_LINE = 16


class PackedMatmul(TirTemplate):
    """x [..., M, K] times a weight [K, N], packed as [groups, K, group]; float32."""

    name = "cpu.matmul_packed"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == "matmul"
            and 1 in workload.weights
            and 0 not in workload.weights
            and len(workload.inputs[0].shape) == len(workload.output.shape) >= 2
            and len(workload.inputs[1].shape) == 2
            and workload.inputs[0].shape[-1] == workload.inputs[1].shape[0]
            and prod(workload.output.shape) > 0
            and workload.inputs[1].num_elements > 0
            and all(tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        s = _Sizes.of(workload)
        tiles: list[tuple[float, int, int]] = []
        for panels in (1, 2, 3, 4, 5, 6, 8, 12):
            width = panels * target.lanes
            padded = ceil(s.columns / width) * width
            fitting = (target.num_vector_registers - panels - 1) // panels
            if fitting < 1 or (panels > 1 and width >= 2 * s.columns):
                continue
            ranked = [
                (_tile_rank(s, rows, panels) * padded / s.columns, rows, panels)
                for rows in range(1, min(s.rows, fitting) + 1)
            ]
            tiles.extend(sorted(ranked)[:_MAX_ROWS])
        tiles.sort()
        found = [
            (cost * (1 + 0.001 * at), Candidate.of(self.name, rows=rows, panels=panels, depth=depth))
            for cost, rows, panels in tiles[:_MAX_TILES]
            for at, depth in enumerate(self._depths(s, rows, panels, target))
        ]
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def _depths(self, s: _Sizes, rows: int, panels: int, target: CpuTarget) -> list[int]:
        """Depths of blocks, the likely best first."""
        if s.rows <= rows:  # nothing is used twice
            return [s.depth]
        row_bytes = 4 * panels * target.lanes
        found = []
        for cache_bytes in (target.l1_bytes, target.l1_bytes // 2):
            num_blocks = ceil(s.depth / max(cache_bytes // row_bytes, _UNROLL))
            found.append(min(ceil(s.depth / num_blocks / _UNROLL) * _UNROLL, s.depth))
        # All at once, with no sums put aside, where that leaves most of the second cache to the rows.
        found.insert(0 if s.depth * row_bytes <= target.l2_bytes // 4 else 2, s.depth)
        return list(dict.fromkeys(found))

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        depth, columns = workload.inputs[1].shape
        width = candidate["panels"] * target.lanes
        shape = (ceil(columns / width), depth, width)

        def panels(weight: Any) -> Any:
            def item(group: Any, k: Any, lane: Any) -> Any:
                column = group * width + lane
                if columns % width == 0:
                    return weight(k, column)
                return tirx.if_then_else(column < columns, weight(k, column), f32(0.0))

            return te.compute(shape, item, name="panels")

        return {1: Packing(TensorType(shape, "float32"), panels)}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        packed = self.packing(workload, candidate, target)[1].result
        return _Kernel(workload, candidate, target, packed).prim_func()


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int
    depth: int
    columns: int

    @classmethod
    def of(cls, workload: Workload) -> _Sizes:
        depth, columns = workload.inputs[1].shape
        return cls(prod(workload.output.shape[:-1]), depth, columns)


def _tile_rank(s: _Sizes, rows: int, panels: int) -> float:
    """Estimated cycles per multiply-add that counts, whole tiles and what is left of the rows together."""
    full, rest = divmod(s.rows, rows)
    cost = full * rows * panels * tile_cost(rows, panels)
    if rest:
        cost += rest * panels * tile_cost(rest, panels)
    return cost / (s.rows * panels)


def tile_cost(rows: int, panels: int) -> float:
    """Cycles per multiply-add of a tile: two units multiply, two ports load a vector or an item for each step.

    With less than eight sums the units wait for their own latency of four cycles. Of tiles that are equal there, the
    one that loads least is best; weights come from farther away than items of a row.
    """
    sums, loads = rows * panels, rows + panels
    return max(sums / 2, loads / 2, 4.0) / sums + 0.05 * (3 / rows + 1 / panels)


class _Kernel:
    """The loop nest of one candidate."""

    def __init__(self, workload: Workload, candidate: Candidate, target: CpuTarget, packed: TensorType) -> None:
        self._workload, self._target, self._packed = workload, target, packed
        self._s = s = _Sizes.of(workload)
        self._rows, self._panels, self._depth = candidate["rows"], candidate["panels"], candidate["depth"]
        self._lanes = target.lanes
        self._num_groups, _, self._width = packed.shape
        self._num_blocks = ceil(s.depth / self._depth)
        self._full_tiles, self._rest = divmod(s.rows, self._rows)
        self._num_tiles = self._full_tiles + (1 if self._rest else 0)
        self._tiles_at_once = self._tiles_per_task()
        self._fetch_ahead = packed.num_elements * 4 > target.l2_bytes and s.rows > 1

    def _tiles_per_task(self) -> int:
        """As many tiles of rows as keep their inputs in half of the second cache, and all threads busy."""
        threads = self._target.num_threads
        fitting = self._target.l2_bytes // 2 // (4 * self._s.depth * self._rows)
        num = max(1, min(self._num_tiles, fitting))
        tasks = self._num_groups * ceil(self._num_tiles / num)
        if threads > 1 and tasks % threads and tasks < 8 * threads:
            # Too few to be shared evenly: so few tiles that each thread gets several tasks.
            num = max(1, min(num, ceil(self._num_tiles / (2 * threads))))
        return ceil(self._num_tiles / ceil(self._num_tiles / num))

    def prim_func(self) -> Any:
        arguments = [self._workload.inputs[0], self._packed, *self._workload.inputs[2:], self._workload.output]
        return function(arguments, self._body)

    def _body(self, *buffers: Any) -> None:
        s = self._s
        self._x, self._weight = view(buffers[0], s.rows, s.depth), buffers[1]
        self._finish = Finish(self._workload, buffers[:-1], buffers[-1])
        is_parallel = self._target.is_worth_threads(s.rows * s.depth * s.columns, 4 * s.depth * s.columns)
        num_tasks = ceil(self._num_tiles / self._tiles_at_once) * self._num_groups
        with parallel(num_tasks, is_parallel) as task:
            group = let(task % self._num_groups)
            first_tile = let(task // self._num_groups * self._tiles_at_once)
            places = [(r, p) for r in range(self._rows) for p in range(self._panels)]
            self._sums = dict(zip(places, vectors(len(places), self._lanes), strict=True))
            self._finish.registers(self._lanes)
            if self._num_blocks > 1:
                self._partial = scratch(self._tiles_at_once * self._rows, self._width)
            with loop(self._num_blocks) as depth_block, loop(self._tiles_at_once) as tile:
                self._tile(group, first_tile, tile, depth_block)

    def _tile(self, group: Any, first_tile: Any, tile: Any, depth_block: Any) -> None:
        number = let(first_tile + tile)
        if self._full_tiles:
            with when(number < self._full_tiles):
                self._micro(group, number, tile, depth_block, self._rows)
        if self._rest:
            with when(number == self._full_tiles):
                self._micro(group, number, tile, depth_block, self._rest)

    def _micro(self, group: Any, number: Any, tile: Any, depth_block: Any, rows: int) -> None:
        """One tile of registers through one block of the depth."""
        s, lanes = self._s, self._lanes
        first_row, start = number * self._rows, depth_block * self._depth
        places = [place for place in self._sums if place[0] < rows]

        def step(k: Any) -> None:
            for r, p in places:
                with vector(lanes) as lane:
                    product = self._x[first_row + r, k] * self._weight[group, k, p * lanes + lane]
                    store(self._sums[r, p], self._sums[r, p][lane] + product, lane)

        def clear() -> None:
            for place in places:
                with vector(lanes) as lane:
                    store(self._sums[place], f32(0.0), lane)

        def restore() -> None:
            for r, p in places:
                with vector(lanes) as lane:
                    store(self._sums[r, p], self._partial[tile * self._rows + r, p * lanes + lane], lane)

        def save() -> None:
            for r, p in places:
                with vector(lanes) as lane:
                    store(self._partial, self._sums[r, p][lane], tile * self._rows + r, p * lanes + lane)

        def finish() -> None:
            for k in range(s.depth - s.depth % unroll, s.depth):
                step(k)
            self._finish_tile(group, first_row, places)

        unroll = min(_UNROLL, self._depth)
        deep = self._depth if s.depth % self._depth == 0 else tirx.min(self._depth, s.depth - start)
        choose(self._num_blocks == 1 or depth_block == 0, clear, restore)
        with loop(deep // unroll) as k:
            for at in range(unroll):
                step(start + k * unroll + at)
            if self._fetch_ahead:
                self._prefetch(group, start, tile, k)
        choose(self._num_blocks == 1 or depth_block == self._num_blocks - 1, finish, save)

    def _prefetch(self, group: Any, start: Any, tile: Any, step: Any) -> None:
        """This step's share of the block that comes next in memory: tiles and steps share it evenly."""
        num_lines = ceil(self._depth * self._width / _LINE)
        per_tile = ceil(num_lines / self._tiles_at_once)
        per_step = ceil(per_tile / max(1, self._depth // _UNROLL))
        for at in range(per_step):
            ahead = (tile * per_tile + step * per_step + at) * _LINE
            prefetch(self._weight, group, start + self._depth, ahead)

    def _finish_tile(self, group: Any, first_row: Any, places: Sequence[tuple[int, int]]) -> None:
        lanes = self._lanes

        def finish(columns: int) -> None:
            """Of a group of which so many columns are of the result."""
            for r, p in places:
                if p * lanes < columns:
                    column = group * self._width + p * lanes
                    value = self._sums[r, p].__getitem__
                    self._finish.store(first_row + r, column, min(lanes, columns - p * lanes), value)

        ragged = self._s.columns % self._width
        full = self._num_groups - (1 if ragged else 0)
        if full == 0:
            finish(ragged)
        else:
            choose(not ragged or group < full, lambda: finish(self._width), lambda: finish(ragged))
