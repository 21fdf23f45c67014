"""Concatenations that are runs of memory, told apart before operators are fused.

Where all dimensions before the axis are 1 (channels of one image, steps of one sequence), each part is one run of bytes
of the whole. Those functions carry the attribute `RUNS`; `phases/place.py` then lets producers write into the whole.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
from tvm import relax, tirx, topi

from hone.compiler.phases.graph import operator_of
from hone.compiler.phases.types import OPAQUE, tensor_type
from hone.compiler.workload import TensorType

#: On functions: the last argument is the others, one after the other in memory.
RUNS = "hone.concatenates_runs"
#: Where a part must begin for a kernel to write it in place: what vectors may assume of a tensor.
ALIGNMENT = 64
#: Below, one call that computes and concatenates is as good as several that compute in place.
_FEW_BYTES = 1 << 14


def num_bytes(tensor: TensorType) -> int:
    dtype = tvm.DataType(tensor.dtype)
    return tensor.num_elements * ((int(dtype.bits) * int(dtype.lanes) + 7) // 8)


def legalize_concat(builder: Any, call: Any) -> Any:
    """For `LegalizeOps`: topi's concatenation, with `RUNS` where it holds."""
    parts, result = call.args[0], tensor_type(call)
    while isinstance(parts, relax.Var):
        bound = builder.lookup_binding(parts)
        if not isinstance(bound, relax.Tuple | relax.Var):
            break
        parts = bound
    fields = (
        list(parts.fields)
        if isinstance(parts, relax.Tuple)
        else [builder.emit(relax.TupleGetItem(parts, at)) for at in range(len(parts.ty.fields))]
    )
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    attributes = {}
    if result is not None:
        axis_at = 0 if axis is None else axis % len(result.shape)
        if prod(result.shape[:axis_at]) == 1:
            attributes[RUNS] = 1
    return builder.call_te(
        topi.concatenate, fields, axis, primfunc_name_hint="concatenate", primfunc_attrs=attributes or None
    )


def keeps_runs(func: Any) -> bool:
    """Whether a function of TIR only concatenates runs: what is fused with others has lost the mark."""
    return isinstance(func, tirx.PrimFunc) and bool(func.attrs) and RUNS in func.attrs


@tvm.transform.module_pass(opt_level=0, name="KeepConcats")
class KeepConcats:
    """Concatenations whose parts are computed here are not fused: written in place, they cost nothing.

    Fused with what follows them item by item they would cost one pass, which the item-wise function alone costs too.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        kept = {var for name, func in mod.functions.items() if isinstance(func, relax.Function)
                for var in _worth_keeping(func, mod)}  # fmt: skip
        functions = {
            name: func.with_attr("op_pattern", OPAQUE) if name in kept else func for name, func in mod.functions.items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)


def _worth_keeping(function: Any, mod: tvm.IRModule) -> set[Any]:
    if not isinstance(function.body, relax.SeqExpr):
        return set()
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings
              if isinstance(binding, relax.VarBinding)}  # fmt: skip

    def computed(expression: Any) -> bool:
        value = values.get(expression) if isinstance(expression, relax.Var) else None
        if value is None:
            return False
        if operator_of(value) == "relax.call_tir" and relax.analysis.has_reshape_pattern(mod[value.args[0]]):
            return computed(value.args[1].fields[0])
        return operator_of(value) in ("relax.call_tir", "relax.call_dps_packed")

    kept = set()
    for value in values.values():
        if operator_of(value) != "relax.call_tir" or not keeps_runs(mod[value.args[0]]):
            continue
        total = in_place = 0
        for part in value.args[1].fields:
            tensor = tensor_type(part)
            assert tensor is not None  # the function has numbers for all its dimensions
            if total % ALIGNMENT == 0 and computed(part):
                in_place += num_bytes(tensor)
            total += num_bytes(tensor)
        if total >= _FEW_BYTES and in_place >= total - total // 8:
            kept.add(value.args[0])
    return kept
