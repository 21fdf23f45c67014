"""Epilogues: which Relax operators may ride behind a template's kernel, and how their steps are computed in TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from hone.compiler.mathematics import gelu
from hone.compiler.nans import maximum, minimum
from hone.compiler.workload import Operand, TensorType, Workload

#: Relax operator -> step. The step's operands are the call's arguments; `leakyrelu` and `clip` add their numbers.
STEP_OF_OPERATOR = {
    "relax.add": "add",
    "relax.subtract": "subtract",
    "relax.multiply": "multiply",
    "relax.divide": "divide",
    "relax.maximum": "maximum",
    "relax.minimum": "minimum",
    "relax.nn.relu": "relu",
    "relax.nn.relu6": "relu6",
    "relax.nn.leakyrelu": "leakyrelu",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.erf": "erf",
    "relax.exp": "exp",
    "relax.sqrt": "sqrt",
    "relax.abs": "abs",
    "relax.round": "round",
    "relax.negative": "negative",
    "relax.clip": "clip",
}


def _f32(value: float) -> Any:
    return tirx.const(value, "float32")


_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": maximum,
    "minimum": minimum,
    "relu": lambda a: maximum(a, _f32(0.0)),
    "relu6": lambda a: minimum(maximum(a, _f32(0.0)), _f32(6.0)),
    "leakyrelu": lambda a, slope: tirx.Select(a > _f32(0.0), a, a * slope),
    "silu": lambda a: a * tirx.sigmoid(a),
    "gelu": gelu,
    "sigmoid": tirx.sigmoid,
    "tanh": tirx.tanh,
    "erf": tirx.erf,
    "exp": tirx.exp,
    "sqrt": tirx.sqrt,
    "abs": lambda a: tirx.max(a, _f32(0.0) - a),
    "round": tirx.nearbyint,  # halves to even
    "negative": lambda a: _f32(0.0) - a,
    "clip": lambda a, low, high: minimum(maximum(a, low), high),
}


def apply_epilogue(
    workload: Workload,
    result: Any,
    inputs: Sequence[Any],
    indices: Sequence[Any],
    keep: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """The last step's value at `indices` of the output, from the operator's `result` there and all kernel inputs.

    Each step's value goes through `keep`, which may put it into a register and give the read of that: a value that
    several steps use would otherwise be written out at each use.
    """
    values = [result]

    def read(operand: Operand) -> Any:
        if operand.kind == "value":
            return values[operand.at]
        if operand.kind == "constant":
            return _f32(operand.constant)
        return inputs[operand.at](*_broadcast(workload.inputs[operand.at], indices))

    for step in workload.epilogue:
        values.append(keep(_COMPUTE[step.op](*(read(operand) for operand in step.operands))))
    return values[-1]


def _broadcast(tensor: TensorType, indices: Sequence[Any]) -> list[Any]:
    """numpy's rule: shapes align at the right, and a dimension of 1 is read at 0."""
    aligned = indices[len(indices) - len(tensor.shape) :]
    return [0 if dim == 1 else index for dim, index in zip(tensor.shape, aligned, strict=True)]
