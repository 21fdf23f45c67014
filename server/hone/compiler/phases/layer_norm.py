"""Layer norm, (x - mean) / sqrt(variance + epsilon) * gamma + beta along the last axis, as old exporters write it."""

from __future__ import annotations

from typing import Any

from tvm import relax

from hone.compiler.phases.graph import Bindings, number_of, operator_of
from hone.compiler.phases.types import ints, tensor_type


def find_layer_norm(function: Any) -> dict[Any, Any]:
    """Variables that are a layer norm -> the call of `relax.nn.layer_norm` that they are."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        if operator_of(binding.value) == "relax.add":
            norm = _norm_of(binding.value, graph)
            if norm is not None:
                found[binding.var] = norm
    return found


def _norm_of(call: Any, graph: Bindings) -> Any | None:
    for product, beta in (call.args, call.args[::-1]):
        scaled = graph.call(product, "relax.multiply")
        if scaled is None:
            continue
        for quotient, gamma in (scaled.args, scaled.args[::-1]):
            normed = _normalized(quotient, graph)
            if normed is None:
                continue
            x, epsilon = normed
            width = _shape(x)[-1]
            scale, offset = _row(gamma, width, graph), _row(beta, width, graph)
            if scale is not None and offset is not None and tensor_type(x).dtype == "float32":  # type: ignore[union-attr]
                return relax.op.nn.layer_norm(x, scale, offset, [-1], epsilon)
    return None


def _normalized(quotient: Any, graph: Bindings) -> tuple[Any, float] | None:
    """What is centred and divided by its deviation, and the epsilon."""
    division = graph.call(quotient, "relax.divide")
    if division is None:
        return None
    centred, deviation = division.args
    difference = graph.call(centred, "relax.subtract")
    root = graph.call(_bare(deviation, graph), "relax.sqrt")
    total = graph.call(_bare(root.args[0], graph), "relax.add") if root is not None else None
    if difference is None or total is None:
        return None
    x, mean = difference.args
    if not _is_mean(mean, lambda of: of.same_as(x), graph):
        return None
    for variance, epsilon in (total.args, total.args[::-1]):
        number = number_of(epsilon)
        if number is not None and _is_mean(variance, lambda of: _is_square(of, centred, graph), graph):
            return x, number
    return None


def _is_mean(expression: Any, of: Any, graph: Bindings) -> bool:
    """Whether it is the mean over the last axis of something that `of` knows."""
    mean = graph.call(_bare(expression, graph), "relax.mean")
    if mean is None or mean.attrs.axis is None or not bool(mean.attrs.keepdims):
        return False
    rank = len(_shape(mean.args[0]))
    return [axis % rank for axis in ints(mean.attrs.axis)] == [rank - 1] and bool(of(mean.args[0]))


def _is_square(expression: Any, of: Any, graph: Bindings) -> bool:
    power = graph.call(expression, "relax.power", "relax.multiply", "relax.square")
    if power is None or not power.args[0].same_as(of):
        return False
    if operator_of(power) == "relax.square":
        return True
    return number_of(power.args[1]) == 2.0 if operator_of(power) == "relax.power" else bool(power.args[1].same_as(of))


def _bare(expression: Any, graph: Bindings) -> Any:
    """Without reshapes: of one number for each row they change nothing that matters here."""
    while (call := graph.call(expression, "relax.reshape")) is not None:
        expression = call.args[0]
    return expression


def _row(operand: Any, width: int, graph: Bindings) -> Any | None:
    """A tensor of one number for each column, as one dimension."""
    shape = _shape(operand)
    if not shape or shape[-1] != width or any(dim != 1 for dim in shape[:-1]):
        return None
    bare = _bare(operand, graph)
    if _shape(bare) == (width,):
        return bare
    return relax.op.reshape(operand, (width,))


def _shape(expression: Any) -> tuple[int, ...]:
    tensor = tensor_type(expression)
    return tensor.shape if tensor is not None else ()
