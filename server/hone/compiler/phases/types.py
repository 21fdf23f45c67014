"""Reading Relax: shapes that are numbers, attributes that are lists of them."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from hone.compiler.workload import TensorType

#: TVM's number for functions that fuse with nothing, as attribute `op_pattern`.
OPAQUE = 8


def tensor_type(expression: Any) -> TensorType | None:
    """Shape and dtype of a Relax expression, where both are known numbers."""
    ty = getattr(expression, "ty", None)
    if not isinstance(ty, relax.TensorType) or ty.shape is None or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    dims = list(ty.shape.values)
    if not all(isinstance(dim, tvm.tirx.IntImm) for dim in dims):
        return None
    return TensorType(tuple(int(dim) for dim in dims), str(ty.dtype))


def ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
