"""Pairs: two operators back to back in one persistent kernel, what is between them never leaving the chip.

A pair is two groups of which the second reads the first's result as its data, alone, and works on each row (each pixel)
of it by itself: a product with a weight, or a convolution of 1x1 with stride 1 and no padding. Whether a pair is fused
is a choice by measurement: without one, its groups stay two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from hone.compiler.cuda.groups import Group, Matches
from hone.compiler.workload import Operand, Step, TensorType, Workload

_DATA, _WEIGHT = 0, 1


def find_pairs(groups: Sequence[Group], readers: dict[Any, int], matches: Matches) -> list[tuple[int, int, Group]]:
    """Places of two groups, and the group that they are together; a group may be in two pairs.

    `readers` says how often each variable is read.
    """
    made_by = {group.result: at for at, group in enumerate(groups)}
    found = []
    for second, group in enumerate(groups):
        data = group.inputs[_DATA] if group.inputs else None
        first = made_by.get(data) if isinstance(data, relax.Var) else None
        if first is None or readers.get(data, 0) != 1 or not isinstance(data, relax.DataflowVar):
            continue
        pair = _pair(groups[first], group)
        if pair is not None and matches(pair.workload):
            found.append((first, second, pair))
    return found


def choose_pairs(groups: Sequence[Group], pairs: Sequence[tuple[int, int, Group]], chosen: set[str]) -> list[Group]:
    """The groups with those pairs made one whose workloads' digests are in `chosen`, as far as none shares a group."""
    fused: dict[int, Group] = {}
    gone: set[int] = set()
    for first, second, pair in pairs:
        if pair.workload.digest in chosen and not {first, second} & (gone | fused.keys()):
            fused[second] = pair
            gone.add(first)
    return [fused.get(at, group) for at, group in enumerate(groups) if at not in gone]


def _pair(first: Group, second: Group) -> Group | None:
    one, two = first.workload, second.workload
    if one.op not in ("matmul", "conv2d") or two.op not in ("matmul", "conv2d"):
        return None
    if not _has_weight(one) or not _has_weight(two) or two.inputs[_DATA] != one.output:
        return None
    if one.op == "matmul" and two.op == "matmul":
        return _joined("matmul_matmul", first, second, dict(one.attributes), dict(two.attributes))
    if one.op == "conv2d" and _is_pointwise(two):
        weight = second.inputs[_WEIGHT]
        kernel = two.inputs[_WEIGHT]
        if two.op == "matmul":
            if not dict(two.attributes).get("transpose_b", False):
                return None
            # The matrix is the convolution's weight without its two dimensions of 1.
            kernel = TensorType((kernel.shape[0], 1, 1, kernel.shape[1]), kernel.dtype)
            if isinstance(weight, relax.Call):  # the reshape that made the matrix of it
                weight = weight.args[0]
            else:
                weight = relax.BlockBuilder().normalize(relax.op.reshape(weight, kernel.shape))
        return _joined("conv2d_conv2d", first, second, dict(one.attributes), {}, kernel, weight)
    return None


def _joined(
    op: str,
    first: Group,
    second: Group,
    attributes: dict[str, Any],
    attributes1: dict[str, Any],
    kernel: TensorType | None = None,
    weight: Any = None,
) -> Group:
    """Inputs: data, both weights, then what the first's and what the second's epilogue read."""
    one, two = first.workload, second.workload
    inputs = [first.inputs[_DATA], first.inputs[_WEIGHT], second.inputs[_WEIGHT] if weight is None else weight]
    types = [one.inputs[_DATA], one.inputs[_WEIGHT], two.inputs[_WEIGHT] if kernel is None else kernel]
    base0 = len(inputs)
    inputs += first.inputs[2:]
    types += one.inputs[2:]
    base1 = len(inputs)
    inputs += second.inputs[2:]
    types += two.inputs[2:]
    told = {
        **{name: value for name, value in attributes.items() if name not in ("weights", "transpose_b")},
        "epilogue0": tuple(_frozen(step.fields()) for step in _moved(one.epilogue, base0)),
        "intermediate": one.output.dtype,
        "weights": (1, 2),
    }
    for name, of in (("transpose_b", attributes), ("transpose_b1", attributes1)):
        if of.get("transpose_b"):
            told[name] = True
    workload = Workload(
        op=op,
        inputs=tuple(types),
        output=two.output,
        attributes=tuple(sorted(told.items())),
        epilogue=_moved(two.epilogue, base1),
    )
    return Group([*first.bindings, *second.bindings], workload, inputs)


def first_epilogue(workload: Workload) -> tuple[Step, ...]:
    """What stands between the two operators of a pair."""
    fields = {**workload.fields(), "epilogue": workload.fields()["attributes"]["epilogue0"]}
    return Workload.from_fields(fields).epilogue


def _moved(steps: Sequence[Step], base: int) -> tuple[Step, ...]:
    """The steps, whose inputs follow two of the operator's own, with their inputs from `base` on."""
    return tuple(
        Step(
            step.op,
            tuple(
                Operand("input", operand.at - 2 + base) if operand.kind == "input" else operand
                for operand in step.operands
            ),
        )
        for step in steps
    )


def _has_weight(workload: Workload) -> bool:
    return _WEIGHT in workload.weights and len(workload.inputs[_DATA].shape) >= 2


def _is_pointwise(workload: Workload) -> bool:
    if workload.op == "matmul":
        return len(workload.inputs[_DATA].shape) == 4 and len(workload.inputs[_WEIGHT].shape) == 2
    told = dict(workload.attributes)
    kernel = workload.inputs[_WEIGHT].shape
    return kernel[1:3] == (1, 1) and set(told["strides"]) == {1} and set(told["padding"]) == {0} and told["groups"] == 1


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def read_counts(function: Any) -> dict[Any, int]:
    """Variable -> by how many bindings it is read; what is returned has one reader more."""
    counts: dict[Any, int] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            for var in relax.analysis.free_vars(binding.value):
                counts[var] = counts.get(var, 0) + 1
    for var in relax.analysis.free_vars(function.body.body):
        counts[var] = counts.get(var, 0) + 1
    return counts
