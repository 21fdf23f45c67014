"""What a model's configuration says about tuning: the parameters of its accelerator named `tvm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hone.repository import parse_signatures
from hone.specialization import Signature
from hone.types import TensorSpec

Mode = Literal["off", "cache", "on"]
MODES: tuple[Mode, ...] = ("off", "cache", "on")


@dataclass(frozen=True, slots=True)
class ModelTuning:
    """Settings of one model. None stands for the server's own."""

    mode: Mode = "on"
    precision: str = "f32"
    tolerance: float | None = None
    budget_seconds: float | None = None
    signatures: tuple[Signature, ...] = ()
    objective: str = "latency"
    capture: bool = False


def model_tuning(parameters: Mapping[str, str], inputs: Sequence[TensorSpec], server_mode: Mode) -> ModelTuning:
    """From the accelerator's parameters, whose form the repository has checked. What the server is told not to do, a
    model cannot turn on. Raises ValueError naming the parameter."""
    mode = parameters.get("tuning", "on")
    if mode not in MODES:
        raise ValueError(f"tuning: expected one of {', '.join(MODES)}, found '{mode}'")
    try:
        signatures = tuple(parse_signatures(parameters.get("signatures", ""), inputs))
    except ValueError as problem:
        raise ValueError(f"signatures: {problem}") from problem
    return ModelTuning(
        mode=min(MODES[MODES.index(mode)], server_mode, key=MODES.index),
        precision=parameters.get("precision", "f32"),
        tolerance=_number(parameters, "tolerance"),
        budget_seconds=_number(parameters, "budget_seconds"),
        signatures=signatures,
        objective=parameters.get("objective", "latency"),
        capture=parameters.get("capture", "false") == "true",
    )


def _number(parameters: Mapping[str, str], name: str) -> float | None:
    return float(parameters[name]) if name in parameters else None
