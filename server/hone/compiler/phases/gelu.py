"""GELU, x * (1 + erf(x / sqrt(2))) / 2, in whatever order its product was written; and its approximation by tanh.

x * (1 + tanh(u)) / 2 is x * sigmoid(2 u), which needs one exponential and no case for small numbers.
"""

from __future__ import annotations

from math import isclose, sqrt
from typing import Any

from tvm import relax

from hone.compiler.phases.graph import Bindings, number_of, operator_of
from hone.compiler.phases.types import tensor_type


def find_gelu(function: Any) -> dict[Any, Any]:
    """Variables that are a GELU -> the call that they are."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        if operator_of(binding.value) in ("relax.multiply", "relax.divide"):
            gelu = _gelu_of(binding.value, graph)
            if gelu is not None:
                found[binding.var] = gelu
    return found


def _gelu_of(call: Any, graph: Bindings) -> Any | None:
    """The GELU that a product is."""
    scale, factors = _factors(call, graph)
    if len(factors) != 2 or not isclose(scale, 0.5, rel_tol=1e-6):
        return None
    for x, gate in (factors, factors[::-1]):
        inner = _gate(gate, graph)
        if inner is None:
            continue
        if operator_of(inner) == "relax.erf" and _is_scaled(inner.args[0], x, graph):
            return relax.op.nn.gelu(x)
        if operator_of(inner) == "relax.tanh":
            twice = relax.op.multiply(inner.args[0], relax.const(2.0, "float32"))
            return relax.op.multiply(x, relax.op.sigmoid(twice))
    return None


def _gate(gate: Any, graph: Bindings) -> Any | None:
    """The call of erf or tanh that 1 is added to, if that is what it is and nobody else needs it."""
    total = graph.call(gate, "relax.add")
    tensor = tensor_type(gate)
    if total is None or not graph.used_once(gate) or tensor is None or tensor.dtype != "float32":
        return None
    terms = [term for term in total.args if number_of(term) != 1.0]
    if len(terms) != 1 or not graph.used_once(terms[0]):
        return None
    return graph.call(terms[0], "relax.erf", "relax.tanh")


def _is_scaled(argument: Any, x: Any, graph: Bindings) -> bool:
    """Whether it is x / sqrt(2)."""
    scaled = graph.call(argument, "relax.multiply", "relax.divide")
    if scaled is None:
        return False
    scale, factors = _factors(scaled, graph)
    return len(factors) == 1 and factors[0].same_as(x) and isclose(scale, 1 / sqrt(2), rel_tol=1e-6)


def _factors(call: Any, graph: Bindings) -> tuple[float, list[Any]]:
    """A product as a number and what else is multiplied; products inside that nobody else needs are taken apart."""
    scale, factors = 1.0, list[Any]()
    is_quotient = operator_of(call) == "relax.divide"
    for at, operand in enumerate(call.args):
        number = number_of(operand)
        if is_quotient and at == 1:
            if not number:
                return 0.0, []
            scale /= number
            continue
        inner = graph.call(operand, "relax.multiply", "relax.divide") if graph.used_once(operand) else None
        if number is not None:
            scale *= number
        elif inner is not None:
            inner_scale, inner_factors = _factors(inner, graph)
            scale, factors = scale * inner_scale, factors + inner_factors
        else:
            factors.append(operand)
    return scale, factors
