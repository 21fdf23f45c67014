"""Which layers of a model must stay in float32 for its outputs to stay within the tolerance: found by measuring.

All layers in low precision make an error; each stretch of layers makes a part of it. The worst stretches are kept in
float32 until the rest passes, and then given back in halves as long as it still does. In the child only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hone.specialization import Signature
from hone.tuning.gate import check_outputs
from hone.tuning.trial import Evidence
from hone.types import EngineInstance, TensorSpec

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
        datatypes: Mapping[str, str] = {spec.name: spec.datatype for spec in self.outputs}
        worst = 0.0
        for one, expected in zip(self.evidence.sets, self.evidence.expected, strict=True):
            checks = check_outputs(
                names,
                datatypes,
                expected,
                engine.run(one.arrays, names),
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
