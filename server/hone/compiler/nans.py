"""Maxima and minima of items that keep what is not a number, as ONNX Runtime's do.

A maximum is compiled as `a > b ? a : b`, which gives `b` where one of the two is NaN: a NaN in `a` is lost, and a
broken input would be answered with plain numbers. On GPUs it becomes a function that loses either. Reductions are left
alone: what ONNX Runtime's make of a NaN depends on where it stands, and a softmax is NaN without its maximum being so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx
from tvm_ffi.structural import structural_map, structural_walk

_EXTREMA: dict[type, Callable[[Any, Any], Any]] = {tirx.Max: tirx.max, tirx.Min: tirx.min}


def maximum(a: Any, b: Any) -> Any:
    """NaN where a or b is, on CPUs."""
    return _extremum(tirx.max, a, b)


def minimum(a: Any, b: Any) -> Any:
    return _extremum(tirx.min, a, b)


def keep_nan(func: Any, *, on_gpu: bool = False) -> Any:
    """A scheduled PrimFunc whose maxima and minima of floats are NaN where an operand is."""
    reduced: set[int] = set()
    """Addresses of the buffers that a reduction updates."""

    def see(store: Any) -> None:
        value: Any = store.value
        if type(value) in _EXTREMA:
            reduced.update({_buffer_of(value.a), _buffer_of(value.b)} & {store.buffer.__chandle__()})

    structural_walk(func, (tirx.stmt.BufferStore, see))

    def keep(node: Any) -> Any:
        if not str(node.ty.dtype).startswith(("float", "bfloat")):
            return node
        if not reduced.isdisjoint((_buffer_of(node.a), _buffer_of(node.b))):
            return node
        extremum = _EXTREMA[type(node)]
        return _extremum_on_gpu(extremum, node.a, node.b) if on_gpu else _extremum(extremum, node.a, node.b)

    return structural_map(func, (tuple(_EXTREMA), keep))


def _extremum(extremum: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if _is_number(a):
        return extremum(a, b)
    if _is_number(b):
        return extremum(b, a)
    # The one that is looked at is written out twice: rather a value from memory than what is computed.
    first, second = (a, b) if _is_plain(a) or not _is_plain(b) else (b, a)
    return _checked(first, lambda value: extremum(value, second))


def _extremum_on_gpu(extremum: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if _is_number(a):
        return _checked(b, lambda value: extremum(a, value))
    if _is_number(b):
        return _checked(a, lambda value: extremum(value, b))
    return _checked(a, lambda one: _checked(b, lambda two: extremum(one, two)))


def _checked(value: Any, otherwise: Callable[[Any], Any]) -> Any:
    """The value where it is NaN, else what is made of it."""
    if _is_plain(value):
        return tirx.Select(tirx.isnan(value), value, otherwise(value))
    name = tirx.Var("kept", str(value.ty.dtype))
    return tirx.Let(name, value, tirx.Select(tirx.isnan(name), name, otherwise(name)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, ir.TensorLoad | ir.Var)


def _is_number(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm)


def _buffer_of(value: Any) -> int:
    """The address of the buffer that a value is read from; 0 where it is computed."""
    return int(value.source.__chandle__()) if isinstance(value, ir.TensorLoad) else 0
