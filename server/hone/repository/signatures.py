"""Signatures as a configuration names them, for tuning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hone.specialization import Signature
from hone.types import Shape, TensorSpec

_TENSOR = re.compile(r"(?P<name>[^,;]+):(?P<dims>scalar|[1-9][0-9]*(x[1-9][0-9]*)*)")


def parse_signatures(text: str, inputs: Sequence[TensorSpec]) -> list[Signature]:
    """The accelerator's parameter `signatures`: `NAME:1x3x224x224,OTHER:1x5; ...`, dims as the engine takes them.

    Inputs of fixed shape may be left out. Raises ValueError saying what is wrong.
    """
    specs = {spec.name: spec for spec in inputs}
    return [_parse_one(part.strip(), specs) for part in text.split(";") if part.strip()]


def _parse_one(text: str, specs: Mapping[str, TensorSpec]) -> Signature:
    shapes: dict[str, Shape] = {}
    for part in text.split(","):
        found = _TENSOR.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"expected NAME:DIMxDIM, as in 'IN:1x3x224x224', found '{part.strip()}'")
        name, dims = found["name"], found["dims"]
        if name not in specs:
            raise ValueError(f"unknown input '{name}', expected one of {sorted(specs)!r}")
        if name in shapes:
            raise ValueError(f"input '{name}' is given twice")
        shape = () if dims == "scalar" else tuple(int(dim) for dim in dims.split("x"))
        want = specs[name].shape
        if len(want) != len(shape) or any(w not in (-1, s) for w, s in zip(want, shape, strict=True)):
            raise ValueError(f"input '{name}': expected a shape that fits {list(want)}, found {list(shape)}")
        shapes[name] = shape
    for name, spec in specs.items():
        if name not in shapes:
            if -1 in spec.shape:
                raise ValueError(f"input '{name}' of variable shape {list(spec.shape)} is missing in '{text}'")
            shapes[name] = spec.shape
    return Signature.of((name, specs[name].datatype, shape) for name, shape in shapes.items())
