"""Attention on GPUs: found as on CPUs, kept where a kernel takes it as it would be stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hone.compiler.cuda.groups import Matches
from hone.compiler.phases.anchors import anchor_call, read_anchor
from hone.compiler.phases.attention import find_attention
from hone.compiler.phases.types import tensor_type
from hone.compiler.workload import TensorType, Workload


def find_fused_attention(function: Any, matches: Matches, stored: str, math: str) -> dict[Any, Any]:
    """Variables that are the result of an attention that a kernel takes -> its anchor.

    Operands are asked about in the dtype that they will be stored in; where no kernel takes them, the attention stays
    two products and a softmax.
    """
    found: dict[Any, Any] = {}
    for var, call in find_attention(function).items():
        anchor, result = read_anchor(call), tensor_type(var)
        types = [tensor_type(value) for value in anchor.inputs] if anchor is not None else []
        if anchor is None or result is None or any(tensor is None for tensor in types):
            continue
        attributes = dict(anchor.attributes)
        if stored == "float32" and math != "f32":
            attributes["math"] = math
        workload = Workload(
            op=anchor.op,
            inputs=tuple(replace(tensor, dtype=stored) for tensor in types if tensor is not None),
            output=TensorType(result.shape, stored),
            attributes=tuple(sorted({**attributes, "weights": ()}.items())),
        )
        if matches(workload):
            found[var] = anchor_call(anchor.op, anchor.inputs, attributes, result)
    return found
