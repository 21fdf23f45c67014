"""Memory plan: calls write into storage that is planned ahead and shared by values that never live together."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax


def plan_memory(mod: tvm.IRModule, rewrite: Callable[[tvm.IRModule], tvm.IRModule] | None = None) -> tvm.IRModule:
    """`rewrite` sees the module when storage is planned and not yet allocated."""
    planned = tvm.transform.Sequential(
        [
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
        ]
    )(mod)
    if rewrite is not None:
        planned = rewrite(planned)
    return tvm.transform.Sequential(
        [
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )(planned)
