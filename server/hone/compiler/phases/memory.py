"""Memory plan: calls write into storage that is planned ahead and shared by values that never live together."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax


def pass_destinations(mod: tvm.IRModule) -> tvm.IRModule:
    """Every call is given the tensor that it writes to, which is allocated in front of it; reshapes become views."""
    return tvm.transform.Sequential(
        [
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
        ]
    )(mod)


def plan_memory(mod: tvm.IRModule, rewrite: Callable[[tvm.IRModule], tvm.IRModule] | None = None) -> tvm.IRModule:
    """Of a module with or without destinations. `rewrite` sees it when storage is planned and not yet allocated."""
    planned = relax.transform.StaticPlanBlockMemory()(pass_destinations(mod))
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
