"""Operators that importers write as something else than item-wise arithmetic, as item-wise arithmetic.

Only that rides in an epilogue, and only that follows an image into another layout: ONNX's Max, Min, Sum and Mean
of several tensors come as a reduction over all of them stacked, and PRelu as an operator that knows its axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax

from hone.compiler.phases.graph import Bindings, number_of, operator_of
from hone.compiler.phases.types import ints, tensor_type

_PAIRWISE: dict[str, Callable[[Any, Any], Any]] = {
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
    "relax.sum": relax.op.add,
    "relax.mean": relax.op.add,
}


def find_itemwise(function: Any) -> dict[Any, Any]:
    """Variables -> what they are in item-wise arithmetic."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        name = operator_of(binding.value)
        if name in _PAIRWISE:
            made = _of_stacked(name, binding.value, graph)
        else:
            made = _prelu(binding.value) if name == "relax.nn.prelu" else None
        if made is not None:
            found[binding.var] = made
    return found


def _of_stacked(name: str, call: Any, graph: Bindings) -> Any | None:
    """A reduction over the dimension along which tensors were stacked for it."""
    stack = graph.call(call.args[0], "relax.stack")
    if stack is None or not isinstance(stack.args[0], relax.Tuple) or bool(call.attrs.keepdims):
        return None
    axis = 0 if stack.attrs.axis is None else int(stack.attrs.axis)
    if call.attrs.axis is None or ints(call.attrs.axis) != (axis,) or axis != 0:
        return None
    result = tensor_type(call)
    if result is None or result.dtype != "float32":
        return None
    parts = [_unspread(part, graph) for part in stack.args[0].fields]
    types = [tensor_type(part) for part in parts]
    if np.broadcast_shapes(*(tensor.shape for tensor in types if tensor is not None)) != result.shape:
        parts = list(stack.args[0].fields)
    total = reduce(_PAIRWISE[name], parts)
    return total if name != "relax.mean" else relax.op.multiply(total, _number(1.0 / len(parts)))


def _unspread(part: Any, graph: Bindings) -> Any:
    """What was spread to the others' shape, as it was: arithmetic spreads it by itself."""
    number = number_of(part)
    if number is not None:
        return _number(number)
    spread = graph.call(part, "relax.broadcast_to")
    return part if spread is None else spread.args[0]


def _number(value: float) -> Any:
    return relax.const(np.float32(value), "float32")


def _prelu(call: Any) -> Any | None:
    """max(x, 0) + slope min(x, 0)."""
    data, slope = tensor_type(call.args[0]), tensor_type(call.args[1])
    if data is None or slope is None or data.dtype != "float32":
        return None
    shape = [1] * len(data.shape)
    if slope.num_elements != 1:
        shape[int(call.attrs.axis) % len(data.shape)] = slope.num_elements
    factor = relax.op.reshape(call.args[1], shape)
    negative = relax.op.minimum(call.args[0], _number(0.0))
    return relax.op.add(relax.op.nn.relu(call.args[0]), relax.op.multiply(negative, factor))
