"""A Relax function as a graph: what a variable is bound to, and who uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax


class Bindings:
    """Of one function. Variables that the function returns or that leave a dataflow block have an outside user."""

    def __init__(self, function: Any) -> None:
        self._values: dict[Any, Any] = {}
        self._users: dict[Any, list[Any]] = {}
        self.in_order: list[Any] = []
        for block in function.body.blocks:
            for binding in block.bindings:
                self.in_order.append(binding)
                self._values[binding.var] = binding.value
                for used in relax.analysis.free_vars(binding.value):
                    self._users.setdefault(used, []).append(binding.var)
                if not isinstance(binding.var, relax.DataflowVar):
                    self._users.setdefault(binding.var, []).append(None)

    def call(self, expression: Any, *operators: str) -> Any | None:
        """The call of one of these operators that a variable is bound to, else None."""
        value = self._values.get(expression) if isinstance(expression, relax.Var) else None
        return value if operator_of(value) in operators else None

    def used_once(self, expression: Any) -> bool:
        return len(self._users.get(expression, ())) == 1

    def only_user(self, expression: Any) -> Any | None:
        """The variable whose value alone uses this one."""
        users = self._users.get(expression, ())
        return users[0] if len(users) == 1 else None


def operator_of(value: Any) -> str:
    """The name of the operator that an expression calls; empty for what is no such call."""
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return str(value.op.name) if is_call else ""


def number_of(expression: Any) -> float | None:
    """The number that an expression always is: a literal, or a constant tensor of equal items."""
    if isinstance(expression, tvm.ir.GenericConst):
        array = np.asarray(expression.value.numpy())
        if array.size and array.dtype.kind == "f" and (array == array.flat[0]).all():
            return float(array.flat[0])
        return None
    if isinstance(expression, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return float(expression.value)
    return None
