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
