"""Layers that stay in float32 so that a model in low precision holds its tolerance: made, compared, made again.

Which layers those are is found by `sensitivity.find_kept`; here is what compile steps do with it, with one compilation
a try. In the child only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel
from hone.errors import HoneError
from hone.specialization import Signature
from hone.tuning.compiling import AnyEngine, Artifacts, Loaded
from hone.tuning.sensitivity import Kept, OutputError, find_kept
from hone.tuning.specialize import NotCompiled, Told

#: Layers that a note names.
_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Keeping:
    """The layers to keep (None: nothing helps, or nothing was found), and what people should know."""

    kept: Kept | None
    note: str = ""
    is_open: bool = False
    """Whether more time, or another day, may bring an answer."""


@dataclass(frozen=True, slots=True)
class Compared:
    """An engine in low precision beside the baseline, and what there is to look for a better one with."""

    imported: ImportedModel
    choices: Choices
    share: float
    """Its error, as a share of what is allowed."""
    error_of: OutputError
    deadline: float
    """Of the monotonic clock, for finding a better one."""
    tell: Told

    @property
    def holds(self) -> bool:
        return self.share <= 1.0

    @property
    def name(self) -> str:
        """Of the precision that it is in."""
        return self.choices.precision.name

    @property
    def told(self) -> str:
        return f"in {self.name} its outputs are off by {self.share:.2g} times what is allowed"

    @property
    def seconds_left(self) -> float:
        """At least a second, for what has to be done all the same."""
        return max(1.0, self.deadline - time.monotonic())


def compare(
    artifacts: Artifacts,
    signature: Signature,
    loaded: Loaded[AnyEngine],
    imported: ImportedModel,
    choices: Choices,
    deadline: float,
    tell: Told,
) -> Compared | None:
    """None where nothing can be compared: the gate says why."""
    tell(0.75, "comparing outputs in low precision")
    error_of = artifacts.output_error(signature)
    if error_of is None:
        return None
    return Compared(imported, choices, error_of(loaded.engine.instantiate()), error_of, deadline, tell)


def find_layers_to_keep(
    miss: Compared,
    layers: Sequence[object],
    make: Callable[[frozenset[int]], Loaded[AnyEngine] | NotCompiled],
    dtype: str = "f32",
) -> Keeping:
    """`make` compiles with these of the layers in float32, and may raise BuildFailed and LinkFailed. `dtype`: what
    people are told that those layers are computed in."""
    num_tried = 0
    is_open = False

    def error(kept: frozenset[int]) -> float | None:
        nonlocal num_tried, is_open
        if time.monotonic() > miss.deadline:
            is_open = True
            return None
        num_tried += 1
        miss.tell(0.75, f"looking for layers to keep in {dtype}: {num_tried} tried", num_tried=num_tried)
        made = make(kept)
        if isinstance(made, NotCompiled):
            is_open = True
            return None
        try:
            return miss.error_of(made.engine.instantiate())
        finally:
            made.close()

    try:
        kept = find_kept(len(layers), error)
    except (HoneError, BuildFailed, LinkFailed) as problem:
        return Keeping(None, f"which layers to keep in {dtype} was not found: {problem}", is_open=True)
    if kept is None:
        in_time = " in the time that there was" if is_open else ""
        return Keeping(None, f"{miss.told}, and no layers to keep in {dtype} were found{in_time}", is_open)
    miss.tell(0.9, f"keeping {len(kept.layers)} of {len(layers)} layers in {dtype}")
    return Keeping(kept, _note_of(kept, layers, dtype))


def _note_of(kept: Kept, layers: Sequence[object], dtype: str) -> str:
    told = [f"{at} ({layers[at]})" for at in sorted(kept.layers)]
    more = f" and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
    return f"kept in {dtype}: {len(told)} of {len(layers)} layers: {', '.join(told[:_MAX_NAMED])}{more}"
