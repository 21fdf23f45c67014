"""Layout: convolutions get the blocked layouts that their template wants, and their neighbours follow."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.partition import tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.registry import CONVOLUTION


def convert_layouts(mod: tvm.IRModule, target: CpuTarget) -> tvm.IRModule:
    """Blocked layouts for every convolution of the template; activations, pooling, residuals are carried along."""

    def desired(call: Any) -> dict[str, list[str]]:
        if call.op.name != "relax.nn.conv2d" or int(call.attrs.groups) != 1:
            return {}
        data, weight = (tensor_type(argument) for argument in call.args)
        if data is None or weight is None or data.dtype != "float32":
            return {}
        if (str(call.attrs.data_layout), str(call.attrs.kernel_layout)) != ("NCHW", "OIHW"):
            return {}
        layouts = CONVOLUTION.layouts(weight.shape[1], weight.shape[0], target)
        return {"relax.nn.conv2d": list(layouts)} if layouts else {}

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
