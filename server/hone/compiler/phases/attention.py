"""Attention: softmax(Q K^T * scale + mask) V, found between two products, with the transposes around them taken in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from hone.compiler.phases.anchors import anchor_call
from hone.compiler.phases.graph import Bindings, number_of, operator_of
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.workload import TensorType


def find_attention(function: Any) -> dict[Any, Any]:
    """Variables that are the result of an attention -> the anchor of its workload."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        if operator_of(binding.value) == "relax.matmul":
            attention = _attention_of(binding.var, binding.value, graph)
            if attention is not None:
                var, anchor = attention
                found[var] = anchor
    return found


@dataclass(frozen=True, slots=True)
class _Scores:
    query: Any
    key: Any
    scale: float
    mask: Any | None


@dataclass(frozen=True, slots=True)
class _Operand:
    """A tensor as it lies in memory: `layout` tells its dimensions by letters."""

    tensor: Any
    layout: str


def _attention_of(result: Any, call: Any, graph: Bindings) -> tuple[Any, Any] | None:
    """The variable that an attention ends in and the anchor for it, if this product is an attention's second one."""
    weights, values = call.args
    softmax = graph.call(weights, "relax.nn.softmax")
    shape = tensor_type(result)
    if softmax is None or shape is None or shape.dtype != "float32" or not graph.used_once(weights):
        return None
    rank = len(shape.shape)
    if rank not in (3, 4) or int(softmax.attrs.axis) not in (-1, rank - 1):
        return None
    scores = _scores_of(softmax.args[0], graph, rank)
    if scores is None:
        return None
    letters = "bhsd"[4 - rank :]
    query, query_scale = _scaled(scores.query, graph)
    key, key_scale = _scaled(scores.key, graph)
    operands = [
        _in_place(query, letters, graph),
        _in_place(key, letters[:-2] + "ds", graph),
        _in_place(values, letters, graph),
    ]
    sizes = [
        {letter: dim for letter, dim in zip(one.layout, _shape(one.tensor), strict=True) if letter.isalpha()}
        for one in operands
    ]
    if any(len({size.get(letter) for size in sizes}) != 1 for letter in "bh"):
        return None  # heads that share keys, or batches that do
    mask_fits = scores.mask is None or _broadcasts(_shape(scores.mask), _shape(softmax.args[0]))
    if not mask_fits or sizes[1]["s"] != sizes[2]["s"] or sizes[0]["d"] != sizes[1]["d"]:
        return None
    end, output_layout, output = result, letters, shape
    user = graph.only_user(result)
    transposed = graph.call(user, "relax.permute_dims") if user is not None else None
    if transposed is not None and transposed.attrs.axes is not None:
        end = user
        output_layout = "".join(letters[axis] for axis in ints(transposed.attrs.axes))
        output = TensorType(_shape(user), shape.dtype)
    anchor = anchor_call(
        "attention",
        [*(one.tensor for one in operands), *([] if scores.mask is None else [scores.mask])],
        {
            "layouts": [one.layout for one in operands],
            "masked": scores.mask is not None,
            "output_layout": output_layout,
            "scale": scores.scale * query_scale * key_scale,
        },
        output,
    )
    return end, anchor


def _scores_of(scores: Any, graph: Bindings, rank: int) -> _Scores | None:
    """The first product, and what was done to it: from outside, an optional mask, then scales."""
    scale, mask = 1.0, None
    while True:
        if not graph.used_once(scores):
            return None
        call = graph.call(scores, "relax.add", "relax.multiply", "relax.divide", "relax.matmul")
        if call is None:
            return None
        if operator_of(call) == "relax.matmul":
            return _Scores(call.args[0], call.args[1], scale, mask) if len(_shape(scores)) == rank else None
        if operator_of(call) == "relax.add":
            inner = next((at for at, operand in enumerate(call.args) if _leads_to_product(operand, graph)), None)
            if inner is None or mask is not None or scale != 1.0:
                return None
            scores, mask = call.args[inner], call.args[1 - inner]
            if tensor_type(mask) is None:
                return None
            continue
        factor = _factor_of(call)
        if factor is None:
            return None
        scores, times = factor
        scale *= times


def _leads_to_product(expression: Any, graph: Bindings) -> bool:
    """Whether it is a product of two tensors, perhaps scaled."""
    while graph.used_once(expression):
        if graph.call(expression, "relax.matmul") is not None:
            return True
        call = graph.call(expression, "relax.multiply", "relax.divide")
        factor = _factor_of(call) if call is not None else None
        if factor is None:
            return False
        expression = factor[0]
    return False


def _factor_of(call: Any) -> tuple[Any, float] | None:
    """What a number multiplies, and the number."""
    numbers = [number_of(argument) for argument in call.args]
    if operator_of(call) == "relax.divide":
        return (call.args[0], 1 / numbers[1]) if numbers[1] else None
    if numbers[1] is not None:
        return call.args[0], numbers[1]
    return (call.args[1], numbers[0]) if numbers[0] is not None else None


def _scaled(operand: Any, graph: Bindings) -> tuple[Any, float]:
    """The operand without the number that multiplies it."""
    call = graph.call(operand, "relax.multiply", "relax.divide") if graph.used_once(operand) else None
    factor = _factor_of(call) if call is not None else None
    return factor if factor is not None and _shape(factor[0]) == _shape(operand) else (operand, 1.0)


def _in_place(operand: Any, letters: str, graph: Bindings) -> _Operand:
    """The tensor that an operand is a transpose or one part of, with its own order of dimensions."""
    layout = letters
    while True:
        call = graph.call(operand, "relax.permute_dims", "relax.take")
        if call is None:
            return _Operand(operand, layout)
        rank = len(_shape(operand))
        if operator_of(call) == "relax.take":
            part = _part(call)
            if part is None:
                return _Operand(operand, layout)
            axis, index = part
            layout = layout[:axis] + str(index) + layout[axis:]
        else:
            axes = ints(call.attrs.axes) if call.attrs.axes is not None else range(rank)[::-1]
            # Dimension i of the transpose is dimension axes[i] of what it is made of.
            back = [axis % rank for axis in axes]
            layout = "".join(layout[back.index(at)] for at in range(rank))
        operand = call.args[0]


def _part(take: Any) -> tuple[int, int] | None:
    """The axis and the index of a part (of a tensor that holds keys beside queries, say); None for what is none."""
    index = take.args[1]
    if not isinstance(index, tvm.ir.GenericConst) or take.attrs.axis is None:
        return None
    array = np.asarray(index.value.numpy())
    shape = _shape(take.args[0])
    axis = int(take.attrs.axis) % max(len(shape), 1)
    if array.shape != () or not shape or not 0 <= int(array) < min(shape[axis], 10):
        return None
    return axis, int(array)


def _broadcasts(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    return len(shape) <= len(onto) and all(
        dim in (1, full) for dim, full in zip(reversed(shape), reversed(onto), strict=False)
    )


def _shape(expression: Any) -> tuple[int, ...]:
    tensor = tensor_type(expression)
    return tensor.shape if tensor is not None else ()
