"""Softplus, log(1 + exp(x)), as it is or as max(x, 0) + log(1 + exp(-|x|)), which never overflows."""

from __future__ import annotations

from typing import Any

from tvm import relax

from hone.compiler.phases.graph import Bindings, number_of, operator_of


def find_softplus(function: Any) -> dict[Any, Any]:
    """Variables that are a softplus -> the call of `relax.nn.softplus` that they are."""
    graph = Bindings(function)
    found: dict[Any, Any] = {}
    for binding in graph.in_order:
        if operator_of(binding.value) == "relax.log":
            power = _one_more(binding.value.args[0], graph)
            if power is not None:
                found[binding.var] = relax.op.nn.softplus(power.args[0])
            continue
        if operator_of(binding.value) != "relax.add":
            continue
        for rectified, rest in (binding.value.args, list(binding.value.args)[::-1]):
            of = _rectified(rectified, graph)
            if of is not None and _is_rest(rest, of, graph):
                found[binding.var] = relax.op.nn.softplus(of)
                break
    return found


def _rectified(expression: Any, graph: Bindings) -> Any | None:
    """What it is the positive part of."""
    call = graph.call(expression, "relax.nn.relu", "relax.maximum")
    if call is None or not graph.used_once(expression):
        return None
    if operator_of(call) == "relax.nn.relu":
        return call.args[0]
    for of, zero in (call.args, list(call.args)[::-1]):
        if number_of(zero) == 0.0:
            return of
    return None


def _one_more(expression: Any, graph: Bindings) -> Any | None:
    """The exponential that this is one more than."""
    total = graph.call(expression, "relax.add")
    terms = [term for term in total.args if number_of(term) != 1.0] if total is not None else []
    return graph.call(terms[0], "relax.exp") if len(terms) == 1 else None


def _is_rest(expression: Any, x: Any, graph: Bindings) -> bool:
    """Whether it is log(1 + exp(-|x|))."""
    log = graph.call(expression, "relax.log")
    power = _one_more(log.args[0], graph) if log is not None else None
    minus = graph.call(power.args[0], "relax.negative") if power is not None else None
    size = graph.call(minus.args[0], "relax.abs") if minus is not None else None
    return size is not None and bool(size.args[0].same_as(x))
