"""Which layers of a model in bfloat16 stay in float32 so that it holds its tolerance, and why. In the child only.

Effects are measured layer by layer on a model that rounds operands when told to (`compiler/rounding.py`), and the
smallest set that passes there is looked for; whether it passes as it is compiled is then up to the real engine, and
where it does not, more layers are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.compiler.onnx_import import ImportedModel
from hone.compiler.rounding import RoundedModel
from hone.compiler.target import CpuTarget
from hone.tuning.sensitivity import Error, Kept, OutputError, Sensitivity, find_smallest, measure_effects
from hone.tuning.specialize import Told
from hone.types import Array

#: What is aimed at on the rounding model, as a share of what is allowed; less where the engine then is too far off.
_GOAL, _STRICTER = 0.85, 0.75
#: Sets of layers that are compiled and compared.
_NUM_ATTEMPTS = 3
#: Layers that a note names.
_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """`layer` is its place among those that could be lowered; `effect` the error with it alone lowered, as a share of
    what is allowed."""

    layer: int
    what: str
    effect: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Lowering:
    """What an artifact's manifest says of its precision. `whole` is the error with all layers lowered, `error` that
    with these kept, both as shares of what is allowed."""

    precision: str
    num_layers: int
    whole: float
    error: float
    kept: tuple[KeptLayer, ...]

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(one.layer for one in self.kept)

    @property
    def note(self) -> str:
        """For people: the most harmful first."""
        worst = sorted(self.kept, key=lambda one: -one.effect)
        told = [f"{one.layer} ({one.what}: {one.effect:.2g} alone)" for one in worst[:_MAX_NAMED]]
        more = f" and {len(worst) - _MAX_NAMED} more" if len(worst) > _MAX_NAMED else ""
        return (
            f"kept in f32: {len(worst)} of {self.num_layers} layers: {', '.join(told)}{more};"
            f" in {self.precision} throughout, outputs are off by {self.whole:.2g} times what is allowed"
        )

    def to_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("precision", "num_layers", "whole", "error")}
        return {**told, "kept": [one.to_json() for one in self.kept]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Lowering:
        """Raises KeyError, TypeError and ValueError for what `to_json` did not tell."""
        return cls(
            str(told["precision"]),
            int(told["num_layers"]),
            float(told["whole"]),
            float(told["error"]),
            tuple(KeptLayer(int(one["layer"]), str(one["what"]), float(one["effect"])) for one in told["kept"]),
        )


def find_lowering(
    imported: ImportedModel,
    target: CpuTarget,
    error_of: OutputError,
    attempt: Callable[[Lowering], float | None],
    *,
    whole: float,
    deadline: float,
    num_builders: int,
    tell: Told,
) -> Lowering | None:
    """The layers to keep where lowering all makes an error of `whole`; None where nothing was found by the deadline (of
    the monotonic clock). `attempt` compiles with them, keeps what it made, and gives its error, or None where it could
    not. Raises HoneError, BuildFailed and LinkFailed."""
    tell(0.75, "measuring what each layer does to the outputs")
    model = RoundedModel(imported, target, num_builders)
    names = [spec.name for spec in imported.inputs]
    num_layers = len(model.layers)
    num_tried = 0

    def error(kept: frozenset[int]) -> float | None:
        nonlocal num_tried
        if time.monotonic() > deadline:
            return None
        num_tried += 1
        if num_tried % 10 == 0:
            tell(0.75, f"looking for layers to keep in f32: {num_tried} sets tried", num_tried=num_tried)
        lowered = [layer for layer in range(num_layers) if layer not in kept]

        def run(arrays: Mapping[str, Array]) -> Sequence[Array]:
            return model.run([arrays[name] for name in names], lowered)

        return error_of.of(run)

    sensitivity = measure_effects(num_layers, error)
    return None if sensitivity is None else _attempts(model, sensitivity, error, attempt, whole, tell)


def _attempts(
    model: RoundedModel,
    sensitivity: Sensitivity,
    error: Error,
    attempt: Callable[[Lowering], float | None],
    whole: float,
    tell: Told,
) -> Lowering | None:
    goal = _GOAL
    tried: set[frozenset[int]] = set()
    while len(tried) < _NUM_ATTEMPTS:
        kept = find_smallest(sensitivity, model.operations, error, goal)
        if kept is None:
            return None
        if kept.layers in tried:
            goal = kept.error * _STRICTER
            continue
        tried.add(kept.layers)
        lowering = _lowering_of(kept, sensitivity, model, whole)
        tell(0.8, f"keeping {len(kept.layers)} of {len(model.layers)} layers in f32")
        share = attempt(lowering)
        if share is None:
            return None
        if share <= 1.0:
            return replace(lowering, error=share)
        goal *= _STRICTER / share
    return None


def _lowering_of(kept: Kept, sensitivity: Sensitivity, model: RoundedModel, whole: float) -> Lowering:
    layers = tuple(KeptLayer(at, str(model.layers[at]), sensitivity.effects[at]) for at in sorted(kept.layers))
    return Lowering("bf16", len(model.layers), whole, kept.error, layers)
