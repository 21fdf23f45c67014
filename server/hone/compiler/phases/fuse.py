"""Fuse: work on weights leaves for load time, operators become functions, and neighbours become one."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from hone.compiler.phases.concats import KeepConcats, legalize_concat
from hone.compiler.phases.types import OPAQUE


def fuse(mod: tvm.IRModule, *, concats_in_place: bool = False) -> tvm.IRModule:
    """`main` takes its inputs and one tuple of prepared weights; `main_transform_params` prepares them, once a load.

    What is left of operators is legalised to TIR and fused (element-wise behind and before what it belongs to).
    `concats_in_place`: concatenations are marked and kept for a phase that leaves them out.
    """
    own = {"relax.concat": legalize_concat} if concats_in_place else {}
    return tvm.transform.Sequential(
        [
            _KeepOutputs(),
            relax.transform.LiftTransformParams(),
            relax.transform.BundleModelParams(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(own),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            _KeepReshapes(),
            *([KeepConcats()] if concats_in_place else []),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(["main", "main_transform_params"]),
        ]
    )(mod)


@tvm.transform.module_pass(opt_level=0, name="KeepOutputs")
class _KeepOutputs:
    """An output that is made of weights alone stays an output: LiftTransformParams hands on to `main` only what its
    bindings use, so such an output is bound once more, by what TVM has to stop lifting (and takes away again)."""

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        if not _outputs_of_weights(mod["main"]):
            return mod
        # Variables of a dataflow block that are no outputs of it cannot be used behind it.
        mod = relax.transform.ToNonDataflow()(mod)
        main = mod["main"]
        of_weights = _outputs_of_weights(main)
        bound = {each: relax.Var("kept", each.ty) for each in of_weights}
        last = [relax.VarBinding(kept, relax.op.builtin.stop_lift_params(each)) for each, kept in bound.items()]
        outputs = [bound.get(each, each) for each in _outputs(main)]
        if isinstance(main.ret_ty, relax.TupleType):
            result = relax.Var("outputs", main.ret_ty)
            last.append(relax.VarBinding(result, relax.Tuple(outputs)))
        else:
            (result,) = outputs
        body = relax.SeqExpr([*main.body.blocks, relax.BindingBlock(last)], result)
        mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
        return relax.transform.ConvertToDataflow(min_size=1)(mod)


def _outputs(main: Any) -> list[Any]:
    """What `main` returns: one tensor, or the items of a tuple."""
    result = main.body.body
    bound = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    value = bound.get(result, result)
    return list(value.fields) if isinstance(value, relax.Tuple) else [result]


def _outputs_of_weights(main: Any) -> list[Any]:
    """Variables that are returned and do not depend on any input; each once."""
    if not main.attrs or "num_input" not in main.attrs:
        return []
    of_weights = set(main.params[int(main.attrs["num_input"]) :])
    for block in main.body.blocks:
        for binding in block.bindings:
            if all(var in of_weights for var in relax.analysis.free_vars(binding.value)):
                of_weights.add(binding.var)
    return [each for each in dict.fromkeys(_outputs(main)) if isinstance(each, relax.Var) and each in of_weights]


@tvm.transform.module_pass(opt_level=0, name="KeepReshapes")
class _KeepReshapes:
    """A reshape alone costs nothing (the memory plan makes it a view); fused, it divides indices in every loop."""

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        functions = {
            name: func.with_attr("op_pattern", OPAQUE)
            if isinstance(func, tirx.PrimFunc) and relax.analysis.has_reshape_pattern(func)
            else func
            for name, func in mod.functions.items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)
