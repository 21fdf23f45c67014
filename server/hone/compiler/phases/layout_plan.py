"""Which operators work over blocks of channels: the choice with the least cost of work and changes of layout together.

Each value is made in one layout; whoever wants it in the other pays for one change, shared by all who want it so. The
cheapest choice is a minimum cut, so it is never worse than leaving everything plain, by the same costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.forms import Form, form_of, transform_ns
from hone.compiler.phases.mincut import INFINITE, MinCut
from hone.compiler.phases.types import tensor_type
from hone.compiler.target import CpuTarget


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The operators that work in blocks, by their variables. Costs are the rough nanoseconds of `forms.py`."""

    blocked: Mapping[Any, Form]
    cost_ns: int
    plain_ns: int


def plan_layouts(function: Any, target: CpuTarget) -> LayoutPlan:
    forms: dict[Any, Form] = {}
    cut = MinCut()
    plain_ns = 0
    ready = _prepared(function)
    for block in function.body.blocks if isinstance(function.body, relax.SeqExpr) else ():
        for binding in block.bindings:
            call = binding.value
            form = None
            if isinstance(block, relax.DataflowBlock) and isinstance(call, relax.Call):
                is_operator = isinstance(call.op, tvm.ir.Op) and binding.var not in ready
                form = form_of(call, binding.var, target, ready) if is_operator else None
            wanted = set(form.blocked) if form is not None else set()
            if form is not None:
                forms[binding.var] = form
                plain_ns += form.plain_ns
                cut.cost(binding.var, first=form.plain_ns, second=form.blocked_ns)
                if not isinstance(binding.var, relax.DataflowVar):  # seen from outside, where all is plain
                    _wants_plain(cut, binding.var, None)
            for operand in relax.analysis.free_vars(call):
                tensor = tensor_type(operand)
                if tensor is None or len(tensor.shape) != 4:
                    continue
                if operand not in forms:
                    cut.cost(operand, first=0, second=INFINITE)
                change = 0 if operand in ready else transform_ns(tensor)
                if operand in wanted:
                    cut.pair(operand, ("in blocks", operand), change)
                    cut.pair(("in blocks", operand), binding.var, INFINITE)
                    cut.pair(binding.var, ("plain", operand), INFINITE)
                    cut.pair(("plain", operand), operand, change)
                else:
                    _wants_plain(cut, operand, change)
    cost, second = cut.solve()
    return LayoutPlan({var: form for var, form in forms.items() if var in second}, cost, plain_ns)


def _wants_plain(cut: MinCut, operand: Any, change: int | None) -> None:
    tensor = tensor_type(operand)
    assert tensor is not None
    cut.cost(("plain", operand), first=0, second=INFINITE)
    cut.pair(("plain", operand), operand, transform_ns(tensor) if change is None else change)


def _prepared(function: Any) -> set[Any]:
    """Weights and what is made of them alone: any layout of theirs is made at load time."""
    num_inputs = int(function.attrs["num_input"]) if function.attrs and "num_input" in function.attrs else 0
    known = set(function.params[num_inputs:]) if num_inputs else set()
    for block in function.body.blocks if isinstance(function.body, relax.SeqExpr) else ():
        for binding in block.bindings:
            used = list(relax.analysis.free_vars(binding.value))
            if all(var in known for var in used):
                known.add(binding.var)
    return known
