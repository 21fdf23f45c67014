"""Precision: which layers compute in bfloat16 or with integers, and which values between them are kept in bfloat16.

A layer is a group of the partition whose workload a low-precision template takes. It is lowered by asking for the
precision in its workload; templates do the rest. "bf16" rounds operands; a value that only lowered layers read is
stored so: it is rounded there anyway, and half the memory moves. "int8" takes layers that the model quantised itself,
whose operands are known to be multiples of scales, and leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tvm import relax

from hone.compiler.phases.quantization import definitions, find_multiples, find_quantized_weight
from hone.compiler.phases.types import tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp import bf16, int8
from hone.compiler.templates.registry import LOW_PRECISION_TEMPLATES
from hone.compiler.workload import TensorType, Workload

_WEIGHT = 1
#: Along which axis of a weight the outputs lie.
_OUTPUT_AXES = {"conv2d": 0, "matmul": 1}


@dataclass(frozen=True, slots=True)
class Precision:
    """How exact arithmetic has to be: "f32", or "bf16" or "int8" for every layer that a template takes but those
    `kept`, by their places in `lowerable`'s list."""

    name: str = "f32"
    kept: frozenset[int] = frozenset()
    kept_in: str = "f32"
    """What products of those kept are computed in, on GPUs: "f32" or "tf32"."""


F32 = Precision()
#: What layers can be lowered to, and the extensions that this takes.
LOW_PRECISIONS = {"bf16": bf16.FEATURES, "int8": int8.FEATURES}


def unsupported(precision: str, target: CpuTarget) -> str:
    """Why no layer can have this precision on this CPU; empty where some can."""
    if precision == F32.name:
        return ""
    if precision not in LOW_PRECISIONS:
        known = ", ".join((F32.name, *LOW_PRECISIONS))
        return f"precision '{precision}' is not compiled for CPUs, only {known}"
    missing = [name for name in LOW_PRECISIONS[precision] if name not in target.features]
    if missing:
        return f"precision '{precision}' needs {', '.join(missing)}, which this CPU ({target.mcpu}) does not have"
    return ""


class Group(Protocol):
    """What this phase needs of the partition's groups."""

    bindings: list[Any]
    workload: Workload
    inputs: list[Any]


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a group becomes."""

    workload: Workload
    inputs: list[Any]


def lowerable(function: Any, groups: Sequence[Group], target: CpuTarget, precision: str) -> dict[int, Lowered]:
    """Groups that can be lowered, by their places, in the order of the graph: layer i is the i-th of these."""
    defined = definitions(function)
    found = {}
    for at, group in enumerate(groups):
        lowered = _rounded(group) if precision == "bf16" else _quantized(group, defined)
        if lowered is not None and _is_taken(lowered.workload, target):
            found[at] = lowered
    return found


def lower(function: Any, groups: Sequence[Group], target: CpuTarget, precision: Precision) -> None:
    """Change the groups' workloads to the precision asked for, and their operands and results where that pays."""
    if precision.name == F32.name:
        return
    chosen = []
    for layer, (at, lowered) in enumerate(lowerable(function, groups, target, precision.name).items()):
        if layer not in precision.kept:
            groups[at].workload, groups[at].inputs = lowered.workload, lowered.inputs
            chosen.append(groups[at])
    if precision.name == "bf16":
        _store(function, chosen, target)


def is_lowered(workload: Workload) -> bool:
    return "precision" in dict(workload.attributes)


def _rounded(group: Group) -> Lowered:
    return Lowered(_asking(group.workload, precision="bf16"), group.inputs)


def _quantized(group: Group, defined: Mapping[Any, Any]) -> Lowered | None:
    """With the integers that data and weight are made of; None where they are not."""
    workload = group.workload
    if workload.op not in _OUTPUT_AXES or len(group.inputs) <= _WEIGHT:
        return None
    multiples = find_multiples(group.inputs[0], defined)
    weight = find_quantized_weight(group.inputs[_WEIGHT], defined, _OUTPUT_AXES[workload.op])
    if multiples is None or weight is None:
        return None
    inputs = [group.inputs[0], weight.values, *group.inputs[2:]]
    types = [workload.inputs[0], replace(workload.inputs[_WEIGHT], dtype="int8"), *workload.inputs[2:]]
    told: dict[str, Any] = {"x_scale": multiples.scale, "x_low": multiples.low}
    if isinstance(weight.scale, float):
        told["w_scale"] = weight.scale
    else:
        scale = tensor_type(weight.scale)
        assert scale is not None, "weights have types"
        told["w_scale_at"] = len(inputs)
        inputs.append(weight.scale)
        types.append(scale)
    return Lowered(replace(_asking(workload, precision="int8", **told), inputs=tuple(types)), inputs)


def _asking(workload: Workload, **told: Any) -> Workload:
    return replace(workload, attributes=tuple(sorted({**dict(workload.attributes), **told}.items())))


def _is_taken(workload: Workload, target: CpuTarget) -> bool:
    return any(template.matches(workload, target) for template in LOW_PRECISION_TEMPLATES)


def _store(function: Any, groups: Sequence[Group], target: CpuTarget) -> None:
    """Results that only the lowered groups read, and not as weights, become bfloat16, as far as templates take that."""
    holders = {binding.var: group for group in groups for binding in group.bindings}
    readers = _readers(function)
    stored = {
        group.bindings[-1].var: group
        for group in groups
        if isinstance(group.bindings[-1].var, relax.DataflowVar)
        and all(
            (reader := holders.get(user)) is not None and not _reads_as_weight(reader, group.bindings[-1].var)
            for user in readers.get(group.bindings[-1].var, ())
        )
    }
    while True:  # a value goes back to float32 where one side cannot have it so; that may concern others
        workloads = {id(group): _with_stored(group, stored) for group in groups}
        refused = [group for group in groups if not _is_taken(workloads[id(group)], target)]
        if not refused:
            break
        before = len(stored)
        for group in refused:
            for var in (group.bindings[-1].var, *group.inputs):
                if isinstance(var, relax.Var):
                    stored.pop(var, None)
        assert len(stored) < before, "a group with float32 operands alone is taken"
    for group in groups:
        group.workload = workloads[id(group)]


def _readers(function: Any) -> Mapping[Any, list[Any]]:
    """Variable -> the variables of the bindings that read it."""
    found: dict[Any, list[Any]] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            for var in relax.analysis.free_vars(binding.value):
                found.setdefault(var, []).append(binding.var)
    return found


def _reads_as_weight(group: Group, var: Any) -> bool:
    return len(group.inputs) > _WEIGHT and group.inputs[_WEIGHT].same_as(var)


def _with_stored(group: Group, stored: Mapping[Any, Any]) -> Workload:
    def typed(tensor: TensorType, value: Any) -> TensorType:
        return replace(tensor, dtype="bfloat16") if isinstance(value, relax.Var) and value in stored else tensor

    return replace(
        group.workload,
        inputs=tuple(typed(tensor, value) for tensor, value in zip(group.workload.inputs, group.inputs, strict=True)),
        output=typed(group.workload.output, group.bindings[-1].var),
    )
