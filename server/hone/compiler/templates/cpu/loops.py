"""Loops and tasks of kernels with several stages, beside `emit`: tasks, conditions, scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T


def zero() -> Any:
    return tirx.const(0.0, "float32")


@contextmanager
def tasks(extent: int, *, parallel: bool) -> Iterator[Any]:
    """A loop over independent tasks, spread over the threads in contiguous parts."""
    with T.parallel(0, extent) if parallel and extent > 1 else T.serial(0, extent) as at:
        yield at


@contextmanager
def loop(begin: Any, end: Any | None = None) -> Iterator[Any]:
    """From 0 to `begin`, or from `begin` to `end`."""
    with T.serial(0, begin) if end is None else T.serial(begin, end) as at:
        yield at


def choose(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """One of two pieces of code."""
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            otherwise()


def let(value: Any) -> Any:
    """A scalar computed once."""
    return T.Bind(value)


def scratch(*shape: int) -> Any:
    """Memory of the task (or, outside of parallel loops, of the kernel), uninitialised."""
    return T.alloc_buffer(shape, "float32", scope="global")
