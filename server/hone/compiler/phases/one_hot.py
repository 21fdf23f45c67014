"""Products with one-hot rows, equal(index, 0 1 2 ...) times a table, are rows of the table: no product is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.phases.graph import Bindings, operator_of
from hone.compiler.phases.types import tensor_type


def find_one_hot(function: Any) -> dict[Any, Any]:
    """Variables that are a product with one-hot rows -> the rows of the table, zeros where no item is hot."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        if operator_of(binding.value) == "relax.matmul":
            rows = _rows_of(binding.value, graph)
            if rows is not None:
                found[binding.var] = rows
    return found


def _rows_of(call: Any, graph: Bindings) -> Any | None:
    table = tensor_type(call.args[1])
    cast = graph.call(call.args[0], "relax.astype")
    hot = graph.call(cast.args[0], "relax.equal") if cast is not None else None
    if cast is None or hot is None or table is None or len(table.shape) != 2 or table.dtype != str(cast.attrs.dtype):
        return None
    for index, places in (hot.args, hot.args[::-1]):
        indices = tensor_type(index)
        if indices is None or indices.shape[-1:] != (1,) or not indices.dtype.startswith("int"):
            continue
        if _counts_to(places, table.shape[0]):
            position = relax.op.reshape(index, indices.shape[:-1])
            last = relax.const(np.array(table.shape[0] - 1, indices.dtype))
            inside = relax.op.minimum(relax.op.maximum(position, relax.const(np.array(0, indices.dtype))), last)
            rows = relax.op.take(call.args[1], inside, axis=0, mode="clip")
            is_inside = relax.op.reshape(relax.op.equal(position, inside), indices.shape)
            return relax.op.where(is_inside, rows, relax.const(np.zeros((), table.dtype)))
    return None


def _counts_to(places: Any, length: int) -> bool:
    """Whether it is the constant 0, 1, ... along its last axis."""
    if not isinstance(places, tvm.ir.GenericConst):
        return False
    array = np.asarray(places.value.numpy())
    return array.shape[-1:] == (length,) and array.size == length and bool((array.ravel() == np.arange(length)).all())
