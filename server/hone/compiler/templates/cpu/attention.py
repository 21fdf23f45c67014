"""Attention of a head, softmax(Q K^T scale + mask) V, without its scores ever leaving the cache.

A task takes one head and a run of its queries. It packs the head's keys (transposed) and values once; then, for a few
queries at a time, it computes all their scores, makes weights of them, and sums the values, each step as a product with
its sums in vector registers. Heads are read where they lie inside of a longer row, so nothing is transposed before or
after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from tvm import tirx

from hone.compiler.mathematics import exp_nonpositive
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpu.nests import (
    f32,
    fold,
    function,
    let,
    loop,
    parallel,
    scratch,
    store,
    vector,
    vectors,
    when,
)
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.templates.tir import TirTemplate
from hone.compiler.workload import Workload

MAX_CANDIDATES = 8
_ROWS = (8, 6, 4, 10, 3, 12, 2, 1)
_UNROLL = 4


class Attention(TirTemplate):
    """Queries, keys and values of many heads; float32.

    Attribute `layouts` tells each of the first three inputs' dimensions by letters, b(atch) h(ead) s(equence) d(epth),
    or by a digit where only that index of a dimension is meant; `output_layout` the output's. Attribute `scale`
    multiplies scores. Where `masked`, the fourth input is broadcast to (batch, head, query, key) and added to them.
    """

    name = "cpu.attention"

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return workload.op == "attention" and all(
            tensor.dtype == "float32" for tensor in (*workload.inputs, workload.output)
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        s = Sizes.of(workload)
        found = []
        for rows in _ROWS:
            # At least two panels side by side, or the loads of the rows' items cost more than the arithmetic.
            if rows == 1 or (rows <= s.queries and (target.num_vector_registers - 1) // (rows + 1) >= 2):
                found.append(Candidate.of(self.name, rows=rows))
        if s.queries == 1:
            found = found[-1:]
        return found[:MAX_CANDIDATES]

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        kernel = _Kernel(workload, candidate, target)
        return function([*workload.inputs, workload.output], kernel.body)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the problem that an attention workload poses."""

    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    depth_values: int

    @classmethod
    def of(cls, workload: Workload) -> Sizes:
        layouts = workload.attribute("layouts")
        query, key, value = (
            {letter: dim for letter, dim in zip(layout, tensor.shape, strict=True) if letter.isalpha()}
            for layout, tensor in zip(layouts, workload.inputs, strict=False)
        )
        return cls(query.get("b", 1), query["h"], query["s"], key["s"], query["d"], value["d"])

    @property
    def multiply_adds(self) -> int:
        return self.batch * self.heads * self.queries * self.keys * (self.depth + self.depth_values)


class _Kernel:
    def __init__(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> None:
        self._workload, self._target = workload, target
        self._s = s = Sizes.of(workload)
        self._lanes = target.lanes
        self._rows = candidate["rows"]
        self._scale = float(workload.attribute("scale"))
        self._key_panels = ceil(s.keys / self._lanes)
        self._value_panels = ceil(s.depth_values / self._lanes)
        # Registers: sums, one panel's vectors, one item of a row.
        self._panels = max(1, (target.num_vector_registers - 1) // (self._rows + 1))

    def body(self, *buffers: Any) -> None:
        s, lanes = self._s, self._lanes
        inputs, output = buffers[:-1], buffers[-1]
        layouts = self._workload.attribute("layouts")
        self._query, self._key, self._value = (
            _reader(buffer, layout) for buffer, layout in zip(inputs, layouts, strict=False)
        )
        masked = self._workload.attribute("masked")
        self._mask = _broadcast(inputs[3], self._workload.inputs[3].shape) if masked else None
        self._readers = [_reader_of(buffer) for buffer in inputs]
        self._output, self._output_layout = output, self._workload.attribute("output_layout")
        tiles = ceil(s.queries / self._rows)
        chunks = self._chunks(tiles)
        per_chunk = ceil(tiles / chunks)
        is_parallel = self._target.is_worth_threads(s.multiply_adds, 0)
        with parallel(s.batch * s.heads * chunks, is_parallel) as task:
            chunk = let(task % chunks)
            head = let(task // chunks % s.heads)
            batch = let(task // (chunks * s.heads))
            keys = scratch(s.depth, self._key_panels * lanes)
            values = scratch(s.keys, self._value_panels * lanes)
            scores = scratch(self._rows, self._key_panels * lanes)
            self._sums = vectors(self._rows * self._panels, lanes)
            self._steps = vectors(len(self._workload.epilogue), lanes)
            self._at = (batch, head)
            self._pack_keys(keys)
            self._pack_values(values)
            self._inverse = scratch(self._rows)
            with loop(per_chunk) as tile:
                first = let((chunk * per_chunk + tile) * self._rows)
                rest = s.queries % self._rows
                if s.queries >= self._rows:
                    with when(first + self._rows <= s.queries):
                        self._tile(first, self._rows, keys, values, scores)
                if rest:
                    with when(first == s.queries - rest):
                        self._tile(first, rest, keys, values, scores)

    def _chunks(self, tiles: int) -> int:
        """Parts that a head's queries are cut into, so that threads get equal numbers of tasks."""
        heads, threads = self._s.batch * self._s.heads, self._target.num_threads
        if threads < 2 or heads % threads == 0 or heads >= 8 * threads:
            return 1
        return min(tiles, threads)

    def _pack_keys(self, keys: Any) -> None:
        s, lanes = self._s, self._lanes
        batch, head = self._at
        padded = self._key_panels * lanes - s.keys
        with loop(s.keys) as key, loop(ceil(s.depth / 8)) as part:
            for at in range(8):
                d = part * 8 + at
                if s.depth % 8 == 0:
                    store(keys, self._key(batch, head, key, d), d, key)
                else:
                    with when(d < s.depth):
                        store(keys, self._key(batch, head, key, d), d, key)
        if padded:
            with loop(s.depth) as d, vector(padded) as lane:
                store(keys, f32(0.0), d, s.keys + lane)

    def _pack_values(self, values: Any) -> None:
        s, lanes = self._s, self._lanes
        batch, head = self._at
        with loop(s.keys) as key:
            for panel in range(self._value_panels):
                inside = min(lanes, s.depth_values - panel * lanes)
                with vector(inside) as lane:
                    store(values, self._value(batch, head, key, panel * lanes + lane), key, panel * lanes + lane)
                if inside < lanes:
                    with vector(lanes - inside) as lane:
                        store(values, f32(0.0), key, panel * lanes + inside + lane)

    def _tile(self, first: Any, rows: int, keys: Any, values: Any, scores: Any) -> None:
        s, lanes = self._s, self._lanes
        batch, head = self._at

        def score(row: int, d: Any) -> Any:
            return self._query(batch, head, first + row, d)

        def keep_score(row: int, panel: Any, at: Any, lane: Any) -> None:
            column = panel * lanes + lane
            result = at[lane] * f32(self._scale) if self._scale != 1 else at[lane]
            if self._mask is not None:
                result = result + self._mask(batch, head, first + row, tirx.min(column, s.keys - 1))
            store(scores, result, row, column)

        self._product(rows, self._key_panels, s.depth, score, keys, keep_score)
        padded = self._key_panels * lanes - s.keys
        if padded:
            for row in range(rows):
                with vector(padded) as lane:
                    store(scores, f32(float("-inf")), row, s.keys + lane)
        with loop(rows) as row:
            self._weigh(row, scores)

        def weight(row: int, key: Any) -> Any:
            return scores[row, key]

        def keep(row: int, panel: int, at: Any, lane: Any) -> None:
            place = {"b": batch, "h": head, "s": first + row, "d": panel * lanes + lane}
            indices = [place[letter] for letter in self._output_layout]
            free = iter(self._steps)

            def hold(result: Any) -> Any:
                register = next(free)
                store(register, result, lane)
                return register[lane]

            result = at[lane] * self._inverse[row]
            store(self._output, apply_epilogue(self._workload, result, self._readers, indices, hold), *indices)

        self._product(rows, self._value_panels, s.keys, weight, values, keep, width=s.depth_values)

    def _weigh(self, row: Any, scores: Any) -> None:
        """Scores become exponentials of how much they are below the row's largest one; the sum's inverse is kept."""
        lanes = self._lanes
        largest, total = vectors(2, lanes)
        with vector(lanes) as lane:
            store(largest, scores[row, lane], lane)
        with loop(self._key_panels - 1) as panel, vector(lanes) as lane:
            store(largest, _larger(largest[lane], scores[row, (panel + 1) * lanes + lane]), lane)
        fold([largest], lanes, _larger)
        with vector(lanes) as lane:
            store(total, f32(0.0), lane)
        with loop(self._key_panels) as panel, vector(lanes) as lane:
            column = panel * lanes + lane
            store(scores, exp_nonpositive(scores[row, column] - largest[0]), row, column)
            store(total, total[lane] + scores[row, column], lane)
        fold([total], lanes, lambda a, b: a + b)
        store(self._inverse, f32(1.0) / total[0], row)

    def _product(
        self,
        rows: int,
        panels: int,
        depth: int,
        left: Callable[[int, Any], Any],
        right: Any,
        keep: Callable[[int, Any, Any, Any], None],
        width: int | None = None,
    ) -> None:
        """rows x depth times depth x panels, a few panels at a time; `keep(row, panel, sums, lane)` takes the results.

        Only the first `width` columns are results.
        """
        lanes = self._lanes
        groups = ceil(panels / self._panels)
        at_once = ceil(panels / groups)
        whole = panels // at_once
        if width is None and whole > 1:
            with loop(whole) as group:
                self._panel_product(rows, group * at_once, at_once, depth, left, right, keep, [lanes] * at_once)
        else:
            for group in range(whole):
                widths = _widths(group * at_once, at_once, lanes, width)
                self._panel_product(rows, group * at_once, at_once, depth, left, right, keep, widths)
        rest = panels - whole * at_once
        if rest:
            widths = _widths(whole * at_once, rest, lanes, width)
            self._panel_product(rows, whole * at_once, rest, depth, left, right, keep, widths)

    def _panel_product(
        self,
        rows: int,
        first: Any,
        panels: int,
        depth: int,
        left: Callable[[int, Any], Any],
        right: Any,
        keep: Callable[[int, Any, Any, Any], None],
        widths: Sequence[int],
    ) -> None:
        lanes = self._lanes
        places = [(row, panel) for row in range(rows) for panel in range(panels)]
        sums = dict(zip(places, self._sums, strict=False))
        for place in places:
            with vector(lanes) as lane:
                store(sums[place], f32(0.0), lane)

        def step(k: Any) -> None:
            for row, panel in places:
                with vector(lanes) as lane:
                    product = left(row, k) * right[k, (first + panel) * lanes + lane]
                    store(sums[row, panel], sums[row, panel][lane] + product, lane)

        with loop(depth // _UNROLL) as k:
            for at in range(_UNROLL):
                step(k * _UNROLL + at)
        for k in range(depth - depth % _UNROLL, depth):
            step(k)
        for row, panel in places:
            with vector(widths[panel]) as lane:
                keep(row, first + panel, sums[row, panel], lane)


def _larger(a: Any, b: Any) -> Any:
    """The larger of two numbers; NaN where b is NaN."""
    return tirx.Select(a > b, a, b)


def _widths(first: int, panels: int, lanes: int, width: int | None) -> list[int]:
    """Of each panel, how many lanes are results."""
    if width is None:
        return [lanes] * panels
    return [min(lanes, width - (first + panel) * lanes) for panel in range(panels)]


def _reader(buffer: Any, layout: str) -> Callable[[Any, Any, Any, Any], Any]:
    def read(batch: Any, head: Any, position: Any, depth: Any) -> Any:
        places = {"b": batch, "h": head, "s": position, "d": depth}
        return buffer[tuple(places[letter] if letter.isalpha() else int(letter) for letter in layout)]

    return read


def _reader_of(buffer: Any) -> Callable[..., Any]:
    return lambda *indices: buffer[indices]


def _broadcast(buffer: Any, shape: Sequence[int]) -> Callable[..., Any]:
    def read(*indices: Any) -> Any:
        aligned = indices[len(indices) - len(shape) :]
        return buffer[tuple(0 if dim == 1 else index for dim, index in zip(shape, aligned, strict=True))]

    return read
