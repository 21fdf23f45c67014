"""Products of two activations, alone or in a batch: columns are packed as they are used, since nothing can be at load.

A task takes one product of the batch and a run of its rows. A few vectors of columns at a time, it copies them into a
buffer that stays in the nearest caches, and multiplies all its rows with that, sums in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.finish import Finish
from hone.compiler.templates.cpu.matmul import tile_cost
from hone.compiler.templates.cpu.nests import (
    f32,
    function,
    let,
    loop,
    parallel,
    scratch,
    store,
    unravel,
    vector,
    vectors,
    when,
)
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload

MAX_CANDIDATES = 12
_UNROLL = 4


class BatchedMatmul(TirTemplate):
    """x [..., M, K] times y [..., K, N], leading dimensions broadcast as numpy does; float32."""

    name = "cpu.batched_matmul"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        if workload.op != "matmul" or any(t.dtype != "float32" for t in (*workload.inputs, workload.output)):
            return False
        if workload.weights == (1,) and len(workload.inputs[1].shape) == 2:
            return False  # a weight: it is packed at load, by another template
        x, y, out = workload.inputs[0].shape, workload.inputs[1].shape, workload.output.shape
        return (
            len(x) >= 2
            and len(y) >= 2
            and out[-2:] == (x[-2], y[-1])
            and x[-1] == y[-2]
            and min(*x, *y, *out) > 0
            and all(dim in (1, full) for shape in (x, y) for dim, full in zip(shape[-3::-1], out[-3::-1], strict=False))
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        rows, columns = workload.output.shape[-2:]
        found = []
        for panels in (1, 2, 3, 4, 6, 8):
            width = panels * target.lanes
            fitting = (target.num_vector_registers - panels - 1) // panels
            if fitting < 1 or (panels > 1 and width >= 2 * columns):
                continue
            padded = ceil(columns / width) * width / columns
            heights = {min(rows, height) for height in (1, 2, 4, 6, 8, 9, 12, 14, fitting) if height <= fitting}
            for height in heights:
                wasted = ceil(rows / height) * height / rows
                cost = tile_cost(height, panels) * padded * wasted
                found.append((cost, Candidate.of(self.name, rows=height, panels=panels)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found[:MAX_CANDIDATES]]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        kernel = _Kernel(workload, candidate, target)
        return function([*workload.inputs, workload.output], kernel.body)


class _Kernel:
    def __init__(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> None:
        self._workload, self._target = workload, target
        self._lanes = target.lanes
        self._rows, self._panels = candidate["rows"], candidate["panels"]
        self._width = self._panels * self._lanes
        self._m, self._n = workload.output.shape[-2:]
        self._k = workload.inputs[0].shape[-1]
        self._leading = workload.output.shape[:-2]

    def body(self, *buffers: Any) -> None:
        self._x, self._y = buffers[:2]
        self._finish = Finish(self._workload, buffers[:-1], buffers[-1])
        batch, tiles = prod(self._leading), ceil(self._m / self._rows)
        operations = batch * self._m * self._n * self._k
        is_parallel = self._target.is_worth_threads(operations, 0)
        chunks = self._chunks(batch, tiles)
        per_chunk = ceil(tiles / chunks)
        groups = ceil(self._n / self._width)
        with parallel(batch * chunks, is_parallel) as task:
            number = let(task // chunks)
            first_tile = let(task % chunks * per_chunk)
            self._at = [let(index) for index in unravel(number, self._leading)]
            self._packed = scratch(self._k, self._width)
            places = [(r, p) for r in range(self._rows) for p in range(self._panels)]
            self._sums = dict(zip(places, vectors(len(places), self._lanes), strict=True))
            self._finish.registers(self._lanes)
            rest = self._n % self._width
            full = groups - (1 if rest else 0)
            if full:
                with loop(full) as group:
                    self._columns(number, first_tile, per_chunk, group * self._width, self._width)
            if rest:
                self._columns(number, first_tile, per_chunk, full * self._width, rest)

    def _chunks(self, batch: int, tiles: int) -> int:
        """Parts that a product's rows are cut into, so that threads get equal numbers of tasks."""
        threads = self._target.num_threads
        if threads < 2 or batch % threads == 0 or batch >= 8 * threads:
            return 1
        return min(tiles, threads)

    def _columns(self, number: Any, first_tile: Any, num_tiles: int, start: Any, columns: int) -> None:
        """All rows of the task times some columns."""
        y = self._workload.inputs[1].shape
        with loop(self._k) as k:
            for panel in range(ceil(columns / self._lanes)):
                inside = min(self._lanes, columns - panel * self._lanes)
                with vector(inside) as lane:
                    at = panel * self._lanes + lane
                    store(self._packed, self._y[(*self._aligned(y), k, start + at)], k, at)
                if inside < self._lanes:
                    with vector(self._lanes - inside) as lane:
                        store(self._packed, f32(0.0), k, columns + lane)
        full, rest = divmod(self._m, self._rows)
        with loop(num_tiles) as tile:
            at = let(first_tile + tile)
            if full:
                with when(at < full):
                    self._tile(number, at * self._rows, self._rows, start, columns)
            if rest:
                with when(at == full):
                    self._tile(number, full * self._rows, rest, start, columns)

    def _aligned(self, shape: Sequence[int]) -> list[Any]:
        """Leading indices of an operand for this task's product."""
        leading = shape[:-2]
        own = self._at[len(self._at) - len(leading) :]
        return [0 if dim == 1 else index for dim, index in zip(leading, own, strict=True)]

    def _tile(self, number: Any, first_row: Any, rows: int, start: Any, columns: int) -> None:
        lanes, leading = self._lanes, self._aligned(self._workload.inputs[0].shape)
        places = [(r, p) for r, p in self._sums if r < rows and p * lanes < columns]
        for place in places:
            with vector(lanes) as lane:
                store(self._sums[place], f32(0.0), lane)

        def step(k: Any) -> None:
            for r, p in places:
                with vector(lanes) as lane:
                    item = self._x[(*leading, first_row + r, k)]
                    store(self._sums[r, p], self._sums[r, p][lane] + item * self._packed[k, p * lanes + lane], lane)

        with loop(self._k // _UNROLL) as at:
            for u in range(_UNROLL):
                step(at * _UNROLL + u)
        for k in range(self._k - self._k % _UNROLL, self._k):
            step(k)
        for r, p in places:
            row, value = number * self._m + first_row + r, self._sums[r, p].__getitem__
            self._finish.store(row, start + p * lanes, min(lanes, columns - p * lanes), value)
