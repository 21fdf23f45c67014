"""Fuse: work on weights leaves for load time, operators become functions, and neighbours become one."""

from __future__ import annotations

import tvm
from tvm import relax


def fuse(mod: tvm.IRModule) -> tvm.IRModule:
    """`main` takes its inputs and one tuple of prepared weights; `main_transform_params` prepares them, once a load.

    What is left of operators is legalised to TIR and fused (element-wise behind and before what it belongs to).
    """
    return tvm.transform.Sequential(
        [
            relax.transform.LiftTransformParams(),
            relax.transform.BundleModelParams(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(["main", "main_transform_params"]),
        ]
    )(mod)
