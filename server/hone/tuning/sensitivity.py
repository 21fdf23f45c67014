"""Which layers of a model must stay in float32 for its outputs to stay within the tolerance: found by measuring.

Two ways. Where asking what a set of layers does to the outputs is cheap (bfloat16: operands are rounded in a model that
is built once), each layer is measured alone, those that do the most harm for the least arithmetic are kept until the
rest passes, and then given back one by one as long as it still does. Where every question costs a compilation,
stretches of layers take the place of single ones. In the child only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hone.specialization import Signature
from hone.tuning.gate import check_outputs
from hone.tuning.trial import Evidence
from hone.types import Array, EngineInstance, TensorSpec

#: Stretches that are measured by themselves at first.
_NUM_STRETCHES = 8

#: The error with these layers kept in float32, as a share of what is allowed; None: there is no time for another one.
Error = Callable[[frozenset[int]], float | None]


@dataclass(frozen=True, slots=True)
class Kept:
    """The layers that stay in float32, and what the model's error then is, as a share of what is allowed."""

    layers: frozenset[int]
    error: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`effects` are the errors with one layer lowered and all others in float32, by layer, as shares of what is
    allowed; `whole` is the error with all lowered."""

    effects: tuple[float, ...]
    whole: float


def measure_effects(num_layers: int, error: Error) -> Sensitivity | None:
    """Each layer's effect; None where time was up before. `error` is asked `num_layers` + 1 times."""
    everything = frozenset(range(num_layers))
    whole = error(frozenset())
    effects = [error(everything - {layer}) for layer in range(num_layers)] if whole is not None else []
    told = [effect for effect in effects if effect is not None]
    return None if whole is None or len(told) < num_layers else Sensitivity(tuple(told), whole)


def find_smallest(sensitivity: Sensitivity, costs: Sequence[float], error: Error, goal: float) -> Kept | None:
    """The layers to keep for an error of at most `goal`, of little cost in all (their arithmetic, say): those first
    that do the most harm for their cost. None where only float32 throughout would do, or time was up before a first
    answer.

    Errors of layers add up by their squares, about; so the sum says where to look first, and `error` what holds: it is
    asked some 2 log2(layers) times, and then once for each layer that may be given back.
    """
    effects = sensitivity.effects
    # What is too far off alone has to be kept whatever it costs.
    order = sorted(
        range(len(effects)), key=lambda at: (effects[at] <= goal, -(effects[at] ** 2) / max(costs[at], 1.0), at)
    )
    left = [math.hypot(*(effects[at] for at in order[num:])) for num in range(len(order) + 1)]
    low, high = 0, len(order)  # keeping `low` is not enough; keeping `high`, all of them, is no low precision
    at = min(max(1, next(num for num, share in enumerate(left) if share <= goal)), high - 1)
    found: Kept | None = None
    while low < at < high:
        kept = frozenset(order[:at])
        share = error(kept)
        if share is None:
            return found
        if share <= goal:
            found, high = Kept(kept, share), at
        else:
            low = at
        at = (low + high) // 2
    if found is None:
        return None
    for layer in sorted(found.layers, key=lambda layer: -costs[layer]):
        fewer = found.layers - {layer}
        share = error(fewer) if fewer else math.inf
        if share is None:
            break
        if share <= goal:
            found = Kept(fewer, share)
    return found


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far an engine's outputs are from the baseline's, as a share of the tolerance: at most 1 passes the gate."""

    evidence: Evidence
    outputs: Sequence[TensorSpec]
    signature: Signature
    precision: str
    tolerance: float | None

    def __call__(self, engine: EngineInstance) -> float:
        """Raises HoneError when the engine fails."""
        names = [spec.name for spec in self.outputs]
        return self.of(lambda arrays: engine.run(arrays, names))

    def of(self, run: Callable[[Mapping[str, Array]], Sequence[Array]]) -> float:
        """The same for anything that makes the outputs of inputs, in their order."""
        names = [spec.name for spec in self.outputs]
        datatypes: Mapping[str, str] = {spec.name: spec.datatype for spec in self.outputs}
        worst = 0.0
        for one, expected in zip(self.evidence.sets, self.evidence.expected, strict=True):
            checks = check_outputs(
                names,
                datatypes,
                expected,
                run(one.arrays),
                precision=self.precision,
                tolerance=self.tolerance,
                inputs=one.name,
            )
            for check in checks:
                if check.tolerance:
                    worst = max(worst, check.max_error / check.tolerance)
                elif not check.passed:
                    worst = math.inf
        return worst


def find_kept(num_layers: int, error: Error) -> Kept | None:
    """The layers to keep, when keeping none is not enough; None where keeping some does not help, or time is up.

    `error` costs a compilation: about `_NUM_STRETCHES` + 2 log2(layers) are asked for. Raises what it raises.
    """
    everything = frozenset(range(num_layers))
    stretches = _cut(sorted(everything), min(_NUM_STRETCHES, num_layers))
    effects: list[tuple[float, Sequence[int]]] = []
    for stretch in stretches:
        alone = error(everything - frozenset(stretch))
        if alone is None:
            return None
        effects.append((alone, stretch))
    effects.sort(key=lambda pair: -pair[0])
    # Independent errors add up by their squares: a guess of how many stretches have to stay, verified below.
    guess = next((i for i in range(len(effects)) if math.hypot(*(e for e, _ in effects[i:])) <= 1.0), len(effects))
    found: Kept | None = None
    for num_kept in range(max(1, guess), len(effects)):
        kept = frozenset(layer for _, stretch in effects[:num_kept] for layer in stretch)
        share = error(kept)
        if share is None:
            return None
        if share <= 1.0:
            found = Kept(kept, share)
            break
    if found is None:
        return None  # only float32 throughout would do
    return _give_back(found, [stretch for _, stretch in effects if set(stretch) <= found.layers], error)


def _give_back(found: Kept, stretches: Sequence[Sequence[int]], error: Error) -> Kept:
    """Halves of the kept stretches that may be lowered after all, the least harmful stretches first."""
    pending = [half for stretch in reversed(stretches) for half in _cut(stretch, 2)]
    while pending:
        part = pending.pop(0)
        fewer = found.layers - frozenset(part)
        share = error(fewer) if fewer else math.inf  # to keep none was too far off: why this is asked
        if share is None:
            break
        if share <= 1.0:
            found = Kept(fewer, share)
        elif len(part) > 1:
            pending += _cut(part, 2)
    return found


def _cut(layers: Sequence[int], num: int) -> list[Sequence[int]]:
    """Neighbours together, in about equal parts; none is empty."""
    num = min(num, len(layers))
    return [layers[len(layers) * i // num : len(layers) * (i + 1) // num] for i in range(num)]
