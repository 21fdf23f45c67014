"""`optimization.execution_accelerators`: where a model says how it may be tuned (the accelerator named `tvm`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository.shapes import narrowed
from hone.repository.signatures import parse_signatures
from hone.types import TensorSpec

NAME = "tvm"
_PATH = "optimization.execution_accelerators"
_KINDS = ("cpu_execution_accelerator", "gpu_execution_accelerator")


def validate_accelerators(config: config_pb.ModelConfig, model: str) -> None:
    """Raises ConfigError naming the accelerator's field."""
    accelerators = config.optimization.execution_accelerators
    for kind in _KINDS:
        path = f"{_PATH}.{kind}"
        entries = getattr(accelerators, kind)
        for i, entry in enumerate(entries):
            _validate_entry(entry, model, f"{path}[{i}]")
        if len(entries) > 1:
            raise ConfigError(model, f"{path}[1]", f"expected one accelerator named '{NAME}', found {len(entries)}")


def check_signatures(config: config_pb.ModelConfig, inputs: Sequence[TensorSpec], model: str) -> None:
    """Those that a completed config names, against the engine's inputs. Raises ConfigError naming the field."""
    specs = narrowed(inputs, config)
    for kind in _KINDS:
        for i, entry in enumerate(getattr(config.optimization.execution_accelerators, kind)):
            try:
                parse_signatures(entry.parameters.get("signatures", ""), specs)
            except ValueError as problem:
                raise ConfigError(model, f'{_PATH}.{kind}[{i}].parameters["signatures"]', str(problem)) from problem


def _validate_entry(entry: Any, model: str, path: str) -> None:
    if entry.name != NAME:
        raise ConfigError(model, f"{path}.name", f"expected '{NAME}', found '{entry.name}'")
    for key, value in sorted(entry.parameters.items()):
        check = _PARAMETERS.get(key)
        where = f'{path}.parameters["{key}"]'
        if check is None:
            raise ConfigError(model, where, f"unknown parameter, expected one of {', '.join(sorted(_PARAMETERS))}")
        expected = check(value)
        if expected is not None:
            raise ConfigError(model, where, f"expected {expected}, found '{value}'")


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else " | ".join(allowed)


def _number(accept: Callable[[float], bool], expected: str) -> Callable[[str], str | None]:
    def check(value: str) -> str | None:
        try:
            number = float(value)
        except ValueError:
            return expected
        return None if math.isfinite(number) and accept(number) else expected

    return check


#: Parameter -> what it expects instead of the value, or None where the value is right.
_PARAMETERS: dict[str, Callable[[str], str | None]] = {
    "precision": _one_of("f32", "bf16", "int8", "f16", "tf32"),
    "tolerance": _number(lambda number: number > 0, "a number greater than 0"),
    "budget_seconds": _number(lambda number: number >= 0, "a number of 0 or more"),
    "signatures": lambda value: None if value.strip() else "a list of signatures that is not empty",
    "objective": _one_of("latency", "throughput"),
    "tuning": _one_of("off", "on", "cache"),
    "capture": _one_of("true", "false"),
}
