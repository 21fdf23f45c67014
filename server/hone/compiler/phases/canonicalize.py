"""Canonicalise: one form for things that can be written in several, constants computed, dead code gone."""

from __future__ import annotations

import tvm
from tvm import relax

from hone.compiler.phases.attention import find_attention
from hone.compiler.phases.compounds import Finder, find_compounds
from hone.compiler.phases.quantization import fold_quantization
from hone.compiler.phases.recognize import recognize


def canonicalize(mod: tvm.IRModule, attention: Finder = find_attention) -> tvm.IRModule:
    """Inference forms (batch norm as arithmetic), known operators, constants folded, no copies and repeats."""
    mod = fold_quantization(recognize(mod))
    mod = tvm.transform.Sequential(
        [
            relax.transform.DecomposeOpsForInference(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)
    return find_compounds(mod, attention)
