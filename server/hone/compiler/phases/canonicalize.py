"""Canonicalise: one form for things that can be written in several, constants computed, dead code gone."""

from __future__ import annotations

import tvm
from tvm import relax


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Inference forms of operators (batch norm as arithmetic), constants folded, copies and repeats removed."""
    return tvm.transform.Sequential(
        [
            relax.transform.DecomposeOpsForInference(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)
