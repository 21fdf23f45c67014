"""Means over images as sums, which a kernel's epilogue can make, times a number."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.phases.graph import operator_of
from hone.compiler.phases.types import ints, tensor_type


def means_as_sums(mod: tvm.IRModule) -> tvm.IRModule:
    """Global poolings of images in NHWC; other means stay (a norm's is part of more than a sum)."""
    functions = {
        name: _Means(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


@relax.expr_functor.mutator
class _Means(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if operator_of(call) != "relax.mean" or call.attrs.axis is None:
            return call
        data = tensor_type(call.args[0])
        if data is None or len(data.shape) != 4 or data.dtype != "float32":
            return call
        axes = sorted(axis % 4 for axis in ints(call.attrs.axis))
        if axes != [1, 2]:
            return call
        total = self.builder_.emit(relax.op.sum(call.args[0], axes, keepdims=bool(call.attrs.keepdims)))
        share = np.float32(1 / prod(data.shape[axis] for axis in axes))
        return relax.op.multiply(total, relax.const(share, "float32"))
