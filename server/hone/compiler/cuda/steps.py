"""Steps of epilogues in one spelling, so that models which compute the same call the same kernels.

A kernel's name is a digest of its source, and its source holds the epilogue's expressions. Exporters write one
activation in many ways (HardSwish alone in four), and a sum with its operands either way round; each of them would be
a kernel of its own, which nobody built ahead of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hone.compiler.workload import Operand, Step

#: Steps whose operands may change places: what comes out is the same number, bit by bit.
_COMMUTATIVE = frozenset({"add", "multiply"})
_KINDS = ("value", "input", "constant")

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _softplus(x: Any) -> Any:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


#: What one step computes of its operands.
_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negative": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "erf": _erf,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "clip": lambda a, low, high: np.minimum(np.maximum(a, low), high),
    "relu": lambda a: np.maximum(a, 0.0),
    "relu6": lambda a: np.clip(a, 0.0, 6.0),
    "silu": lambda a: a * _sigmoid(a),
    "gelu": lambda a: 0.5 * a * (1.0 + _erf(a / math.sqrt(2.0))),
    "gelu_tanh": lambda a: 0.5 * a * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3))),
    "hardsigmoid": lambda a: np.clip(a / 6.0 + 0.5, 0.0, 1.0),
    "hardswish": lambda a: a * np.clip(a / 6.0 + 0.5, 0.0, 1.0),
    "softplus": _softplus,
    "mish": lambda a: a * np.tanh(_softplus(a)),
}
#: What several steps may be together.
_COMPOUNDS = ("relu", "relu6", "silu", "gelu", "gelu_tanh", "hardsigmoid", "hardswish", "softplus", "mish")
#: Where functions are compared: densely where activations bend, and far outside, where a bound would show itself that
#: is there to keep values within a dtype. At none do float64 and float32 differ much.
_POINTS = np.concatenate([np.linspace(-9.1, 9.3, 93), *([-far, far] for far in (23.0, 71.0, 7e4, 1e9, 2e38))])
#: Unit roundoff of the dtype that a model's constants were rounded to with everything else.
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-9}


@lru_cache(maxsize=1024)
def canonical_steps(steps: tuple[Step, ...], dtype: str) -> tuple[Step, ...]:
    """The same program with known functions of one value as one step each, operands in order, and nothing unused.

    `dtype` is the one that the model is stored in: constants in it are as exact as that, and no comparison is stricter.
    """
    roundoff = _ROUNDOFF.get(dtype, 2.0**-24)
    written = list(steps)
    # From the end on, so that an activation is found before what it is made of.
    for at in range(len(written), 0, -1):
        found = _compound(written, at, roundoff)
        if found is not None:
            written[at - 1] = found
    return _without_unused([_ordered(step) for step in written])


def _ordered(step: Step) -> Step:
    if step.op not in _COMMUTATIVE:
        return step
    return Step(step.op, tuple(sorted(step.operands, key=lambda operand: (_KINDS.index(operand.kind), operand.at))))


def _compound(steps: Sequence[Step], at: int, roundoff: float) -> Step | None:
    """Value `at` as one step of an earlier value, where it is a known function of that value alone."""
    if steps[at - 1].op in _COMPOUNDS:
        return None
    with np.errstate(all="ignore"):
        for source in range(at):
            made = _evaluate(steps, at, {source: _POINTS})
            if made is None:
                continue
            errors = {name: _error(made, _COMPUTE[name](_POINTS), roundoff) for name in _COMPOUNDS}
            nearest = min(errors, key=lambda name: errors[name])
            if errors[nearest] <= 1.0:
                return Step(nearest, (Operand("value", source),))
    return None


def _error(found: Any, wanted: Any, roundoff: float) -> float:
    """The largest difference, as a part of what rounded constants explain; infinite where one is no number."""
    allowed = (1e-6 + 8 * roundoff) * np.abs(wanted) + 1e-7 + 4 * roundoff
    errors = np.abs(found - wanted) / allowed
    return float(errors.max()) if np.isfinite(errors).all() else math.inf


def _evaluate(steps: Sequence[Step], at: int, known: dict[int, Any]) -> Any | None:
    """Value `at` computed from the known values; None where it depends on more than those and constants."""
    if at in known:
        return known[at]
    if at == 0 or steps[at - 1].op not in _COMPUTE:
        return None
    arguments = []
    for operand in steps[at - 1].operands:
        if operand.kind == "input":
            return None
        value = operand.constant if operand.kind == "constant" else _evaluate(steps, operand.at, known)
        if value is None:
            return None
        arguments.append(value)
    known[at] = _COMPUTE[steps[at - 1].op](*arguments)
    return known[at]


def _without_unused(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that the last one needs, renumbered."""
    used = {len(steps)}
    for at in range(len(steps), 0, -1):
        if at in used:
            used.update(operand.at for operand in steps[at - 1].operands if operand.kind == "value")
    number = {0: 0}
    kept: list[Step] = []
    for at, step in enumerate(steps, 1):
        if at in used:
            operands = (
                Operand("value", number[operand.at]) if operand.kind == "value" else operand
                for operand in step.operands
            )
            kept.append(Step(step.op, tuple(operands)))
            number[at] = len(kept)
    return tuple(kept)
