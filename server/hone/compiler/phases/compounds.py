"""Compounds: operators that together mean one thing (attention, GELU, a norm) become it; reshapes make way for them.

Exporters write a transformer as small operators with changes of shape between them. Templates have kernels for the
whole: this phase finds the wholes, whatever order or layout their parts were written in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.attention import find_attention
from hone.compiler.phases.gelu import find_gelu
from hone.compiler.phases.itemwise import find_itemwise
from hone.compiler.phases.layer_norm import find_layer_norm
from hone.compiler.phases.one_hot import find_one_hot
from hone.compiler.phases.reshapes import sink_reshapes

#: Gives variables of a function and the calls that they shall be bound to instead.
Finder = Callable[[Any], Mapping[Any, Any]]


def find_compounds(mod: tvm.IRModule, attention: Finder = find_attention) -> tvm.IRModule:
    """Reshapes moved behind what works on rows; then each compound as one operator, or as little as it needs.

    `attention` finds what is an attention; what becomes of one differs between kinds of devices.
    """
    mod = _tidy(sink_reshapes(mod))
    for find in (find_itemwise, find_one_hot, find_layer_norm, find_gelu, attention):
        functions = dict(mod.functions.items())
        for name, function in mod.functions.items():
            if isinstance(function, relax.Function):
                found = find(function)
                functions[name] = _Replacer(mod, found).visit_expr(function) if found else function
        mod = _tidy(tvm.IRModule(functions, attrs=mod.attrs))
    return mod


def _tidy(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)


@relax.expr_functor.mutator
class _Replacer(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Gives some variables another value, made of variables that are bound before."""

    def __init__(self, mod: tvm.IRModule, replacements: Mapping[Any, Any]) -> None:
        super().__init__(mod)
        self._replacements = replacements

    def visit_var_binding_(self, binding: Any) -> None:
        value = self._replacements.get(binding.var)
        super().visit_var_binding_(binding if value is None else relax.VarBinding(binding.var, value))
