"""Layout: convolutions get the blocked layouts that their template wants, and their neighbours follow."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.partition import tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.registry import CONVOLUTION

_CONVOLUTION = "relax.nn.conv2d"


def convert_layouts(mod: tvm.IRModule, target: CpuTarget) -> tvm.IRModule:
    """Blocked layouts for every convolution of the template; activations, pooling, residuals are carried along."""

    def desired(call: Any) -> dict[str, list[str]]:
        if call.op.name != _CONVOLUTION:
            return {}
        # One that the template does not take is told to stay: it would inherit its input's layout, which it has not.
        told = [str(call.attrs.data_layout), str(call.attrs.kernel_layout), str(call.attrs.out_layout)]
        return {_CONVOLUTION: _blocked(call, target) or told}

    return tvm.transform.Sequential(
        [
            relax.transform.ConvertLayout({}, desired),
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)


def _blocked(call: Any, target: CpuTarget) -> list[str] | None:
    data, weight = (tensor_type(argument) for argument in call.args)
    if int(call.attrs.groups) != 1 or data is None or weight is None or data.dtype != "float32":
        return None
    if (str(call.attrs.data_layout), str(call.attrs.kernel_layout)) != ("NCHW", "OIHW"):
        return None
    layouts = CONVOLUTION.layouts(weight.shape[1], weight.shape[0], target)
    return list(layouts) if layouts else None
