"""Epilogues: which Relax operators may ride behind a template's kernel, and how their steps are computed in TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from hone.compiler import mathematics as m
from hone.compiler.workload import Operand, Step

#: Relax operator -> step. Operators with attributes or special arguments have a case in `phases/partition.py`.
STEP_OF_OPERATOR = {
    "relax.add": "add",
    "relax.subtract": "subtract",
    "relax.multiply": "multiply",
    "relax.divide": "divide",
    "relax.maximum": "maximum",
    "relax.minimum": "minimum",
    "relax.nn.relu": "relu",
    "relax.nn.relu6": "relu6",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.erf": "erf",
    "relax.exp": "exp",
    "relax.sqrt": "sqrt",
    "relax.abs": "abs",
    "relax.negative": "negative",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.softplus": "softplus",
    "relax.nn.leakyrelu": "leakyrelu",
    "relax.clip": "clip",
}

_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": tirx.max,
    "minimum": tirx.min,
    "relu": lambda a: tirx.max(a, m.f32(0.0)),
    "relu6": lambda a: tirx.min(tirx.max(a, m.f32(0.0)), m.f32(6.0)),
    "sigmoid": m.sigmoid,
    "tanh": m.tanh,
    "erf": m.erf,
    "exp": m.exp,
    "sqrt": tirx.sqrt,
    "abs": lambda a: tirx.abs(a),
    "negative": lambda a: m.f32(0.0) - a,
    "silu": lambda a: a * m.sigmoid(a),
    "gelu": lambda a: m.f32(0.5) * a * (m.f32(1.0) + m.erf(a * m.f32(0.7071067811865476))),
    "leakyrelu": lambda a, slope: tirx.Select(a > m.f32(0.0), a, a * slope),
    "clip": lambda a, low, high: tirx.min(tirx.max(a, low), high),
}
