"""Memory plan: storage shared by values that never live together; and what can be replayed as one CUDA graph.

All shapes are known, so everything between the last read of an input and the first write of an output may be captured:
a graph is launched once where its kernels would have been launched one by one.
"""

from __future__ import annotations

import tvm
from tvm import relax

from hone.compiler.phases.memory import plan_memory
from hone.compiler.phases.packing import TRANSFORM


def plan_gpu_memory(mod: tvm.IRModule, *, capture: bool) -> tvm.IRModule:
    """With `capture`, runs of kernels in planned memory become functions that the VM captures and replays."""
    return plan_memory(mod, _captured if capture else None)


def _captured(mod: tvm.IRModule) -> tvm.IRModule:
    """All but the preparation of weights, which runs once: a graph of it would only hold memory."""
    once = {var: func for var, func in mod.functions.items() if str(var.name_hint) == TRANSFORM}
    rest = {var: func for var, func in mod.functions.items() if var not in once}
    rewritten = relax.transform.RewriteCUDAGraph()(tvm.IRModule(rest, attrs=mod.attrs))
    return tvm.IRModule({**dict(rewritten.functions.items()), **once}, attrs=rewritten.attrs)
