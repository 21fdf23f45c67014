"""Anchors: operators in the layouts that templates want, between the phases that choose layouts and call kernels.

Relax's own operators refuse blocks that are padded, and know no depthwise convolution over blocks. So a laid-out
operator is a call by name, like a kernel's, whose name tells the operator and its attributes as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from hone.compiler.workload import TensorType

_PREFIX = "hone."


@dataclass(frozen=True, slots=True)
class Anchor:
    """An operator with its operands (Relax expressions), as a workload begins with it."""

    op: str
    inputs: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...]


def anchor_call(op: str, inputs: Sequence[Any], attributes: Mapping[str, Any], result: TensorType) -> Any:
    """A Relax call that stands for the operator; `read_anchor` reads it."""
    name = f"{_PREFIX}{op} {json.dumps(dict(sorted(attributes.items())))}"
    return relax.call_dps_packed(name, relax.Tuple(list(inputs)), relax.TensorType(result.shape, result.dtype))


def read_anchor(call: Any) -> Anchor | None:
    """The operator that a call stands for; None where it is another call."""
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_dps_packed":
        return None
    name = str(call.args[0].global_symbol)
    if not name.startswith(_PREFIX):
        return None
    op, _, told = name.removeprefix(_PREFIX).partition(" ")
    attributes = tuple(sorted((key, _frozen(value)) for key, value in json.loads(told).items()))
    return Anchor(op, tuple(call.args[1].fields), attributes)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
