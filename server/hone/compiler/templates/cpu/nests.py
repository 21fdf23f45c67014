"""Writing kernels as loop nests: what a schedule cannot say (partial tiles, blocks of sums, stages that share a cache).

A kernel is a PrimFunc without blocks: buffers, loops, and stores of neighbouring items that TVM makes vectors of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as tir

from hone.compiler.workload import TensorType


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


def function(arguments: Sequence[TensorType], body: Callable[..., None]) -> Any:
    """A PrimFunc of these arguments, which do not overlap; `body` gets them as buffers and writes the statements."""
    with IRBuilder() as builder, tir.prim_func():
        tir.func_name("main")
        tir.func_attr({"tirx.noalias": True})
        buffers = [tir.arg(f"argument{at}", tir.buffer(t.shape, t.dtype)) for at, t in enumerate(arguments)]
        body(*buffers)
    return builder.get()


@contextmanager
def parallel(extent: int, is_parallel: bool = True) -> Iterator[Any]:
    """A loop over independent tasks, spread over the threads in contiguous parts."""
    with tir.parallel(0, extent) if is_parallel and extent > 1 else tir.serial(0, extent) as at:
        yield at


@contextmanager
def loop(extent: Any) -> Iterator[Any]:
    with tir.serial(0, extent) as at:
        yield at


@contextmanager
def vector(lanes: int) -> Iterator[Any]:
    """Statements inside are done for all lanes at once."""
    with tir.vectorized(0, lanes) as lane:
        yield lane


@contextmanager
def when(condition: Any) -> Iterator[None]:
    with tir.If(condition), tir.Then():
        yield


def choose(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """One of two pieces of code; a condition that is known leaves only one."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return
    with tir.If(condition):
        with tir.Then():
            then()
        with tir.Else():
            otherwise()


def let(value: Any) -> Any:
    """A scalar computed once."""
    return tir.Bind(value)


def vectors(count: int, lanes: int) -> list[Any]:
    """`count` vectors that stay in registers whatever loops are around their uses.

    Each is a small array on the stack: TVM puts arrays of scope "global" below a kilobyte there, and all others into a
    pool, where sums may be stored and read again at every step.
    """
    return [tir.alloc_buffer((lanes,), "float32", scope="global") for _ in range(count)]


def scratch(*shape: int) -> Any:
    """Memory of the task (or, outside of a parallel loop, of the kernel), uninitialised."""
    return tir.alloc_buffer(shape, "float32", scope="global")


def view(buffer: Any, *shape: int) -> Any:
    """The same memory under another shape."""
    return tir.decl_buffer(shape, str(buffer.dtype), data=buffer.data)


def store(buffer: Any, value: Any, *indices: Any) -> None:
    tir.buffer_store(buffer, value, list(indices))


def fold(registers: Sequence[Any], lanes: int, combine: Callable[[Any, Any], Any]) -> None:
    """All lanes of all vectors combined into the first lane of the first: whole vectors, then halves onto halves."""
    first = registers[0]
    for other in registers[1:]:
        with vector(lanes) as lane:
            store(first, combine(first[lane], other[lane]), lane)
    while lanes > 1:
        lanes //= 2
        with vector(lanes) as lane:
            store(first, combine(first[lane], first[lane + lanes]), lane)


def prefetch(buffer: Any, *indices: Any) -> None:
    """A hint to bring an item's line into the nearest cache; the place need not exist."""
    tir.evaluate(tirx.call_intrin("", "tirx.prefetch", tirx.address_of(buffer[indices]), 0, 3, 1))


def unravel(index: Any, shape: Sequence[int]) -> list[Any]:
    """Indices of an item from its number, without divisions where a dimension is 1 or is the outermost one."""
    found: list[Any] = []
    rest, outermost = index, next((at for at, dim in enumerate(shape) if dim != 1), -1)
    for at in range(len(shape) - 1, -1, -1):
        if shape[at] == 1:
            found.append(tirx.const(0, "int32"))
        elif at == outermost:
            found.append(rest)
        else:
            found.append(rest % shape[at])
            rest = rest // shape[at]
    return found[::-1]
