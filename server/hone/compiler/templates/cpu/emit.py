"""Kernels written loop by loop: what templates share that say each loop themselves and schedule nothing.

Where a window hangs over the border of an image, columns are peeled: every tile near a border is written out with the
taps that it has, all others share one loop without conditions. So no image is copied to be padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hone.compiler.templates.cpu import nests
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.workload import TensorType, Workload


def prim_func(inputs: Sequence[TensorType], output: TensorType, body: Callable[[list[Any], Any], None]) -> Any:
    """A function of the inputs and the output whose statements `body` emits."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True})
        buffers = [T.arg(f"input{at}", T.buffer(t.shape, t.dtype)) for at, t in enumerate(inputs)]
        body(buffers, T.arg("out", T.buffer(output.shape, output.dtype)))
    return builder.get()


def lanes(width: int) -> Any:
    """A loop that is one vector operation."""
    return T.vectorized(0, width)


def loop(extent: int, *, parallel: bool) -> Any:
    return T.parallel(0, extent) if parallel else T.serial(0, extent)


class Registers:
    """Vectors of accumulators, read and stored like an array whose last index is the lane; all others are numbers."""

    def __init__(self, shape: Sequence[int]) -> None:
        *outer, width = shape
        places = list(itertools.product(*(range(extent) for extent in outer)))
        self._vectors = dict(zip(places, nests.vectors(len(places), width), strict=True))

    def __getitem__(self, indices: tuple[Any, ...]) -> Any:
        return self._vectors[indices[:-1]][indices[-1]]

    def store(self, value: Any, indices: Sequence[Any]) -> None:
        T.buffer_store(self._vectors[tuple(indices[:-1])], value, [indices[-1]])


def local(*shape: int) -> Registers:
    """Accumulators in registers; the last dimension is one vector's."""
    return Registers(shape)


def store(buffer: Any, value: Any, *indices: Any) -> None:
    if isinstance(buffer, Registers):
        buffer.store(value, indices)
    else:
        T.buffer_store(buffer, value, list(indices))


def finish(workload: Workload, inputs: Sequence[Any], result: Any, indices: Sequence[Any]) -> Any:
    """The epilogue's value at `indices` of the output."""

    def reader(buffer: Any) -> Callable[..., Any]:
        return lambda *at: buffer[at]

    return apply_epilogue(workload, result, [reader(buffer) for buffer in inputs], indices)


@dataclass(frozen=True, slots=True)
class Axis:
    """How a window moves along rows or columns: output i reads i*stride + tap*dilation - before, within `size`."""

    size: int
    out: int
    stride: int
    kernel: int
    dilation: int
    before: int

    def first(self, at: Any) -> Any:
        """What the first tap reads."""
        return at * self.stride - self.before

    @property
    def inner(self) -> tuple[int, int]:
        """The outputs, from and to, all of whose taps lie within; empty where there are none."""
        low = -(-self.before // self.stride)
        high = (self.size - 1 - (self.kernel - 1) * self.dilation + self.before) // self.stride + 1
        low, high = min(max(low, 0), self.out), min(max(high, 0), self.out)
        return (low, high) if low < high else (low, low)

    def has(self, at: int, tap: int) -> bool:
        return 0 <= at * self.stride - self.before + tap * self.dilation < self.size

    def taps(self, at: Any) -> tuple[Any, Any]:
        """From and to which tap an output reads within, at run time."""
        first = self.first(at)
        low = (self.dilation - 1 - first) // self.dilation
        high = (self.size - first + self.dilation - 1) // self.dilation
        return T.max(0, low), T.min(self.kernel, high)


#: Steps of tiles that are written out, at most: what TVM does with more takes seconds, then minutes.
MAX_WRITTEN = 1400


def num_edges(axis: Axis) -> int:
    """Outputs some of whose taps lie outside: each is a tile of its own."""
    low, high = axis.inner
    return axis.out - (high - low)


def written_steps(axis: Axis, width: int) -> int:
    """Steps (an output by a tap) that are written out along an axis: those of one tile inside, and all at the edges."""
    return (min(width, axis.out - num_edges(axis)) + num_edges(axis)) * axis.kernel


@dataclass(frozen=True, slots=True)
class Tiles:
    """`count` tiles of `width` columns from `start`. Where `inner`, all their taps lie within the image."""

    start: int
    width: int
    count: int
    inner: bool


def tiles_of(axis: Axis, width: int) -> Iterator[Tiles]:
    """Tiles that cover an axis: borders one by one, inner ones together, a narrower one at the end."""
    low, high = axis.inner
    start = 0
    while start < axis.out:
        step = min(width, axis.out - start)
        if low <= start and start + step <= high:
            count = max(1, (high - start) // step)
            yield Tiles(start, step, count, inner=True)
            start += step * count
        else:
            yield Tiles(start, step, 1, inner=False)
            start += step


def each_tile(axis: Axis, width: int, body: Callable[[Any, int, Callable[[int, int], bool]], None]) -> None:
    """Emit `body(start, width, has)` for every tile; `has(column, tap)` tells at once whether a tap lies within."""
    for tiles in tiles_of(axis, width):
        if tiles.count == 1:
            start = tiles.start

            def has(column: int, tap: int, start: int = start) -> bool:
                return axis.has(start + column, tap)

            body(start, tiles.width, has)
            continue
        with T.serial(0, tiles.count) as tile:
            body(tiles.start + tile * tiles.width, tiles.width, lambda _column, _tap: True)
