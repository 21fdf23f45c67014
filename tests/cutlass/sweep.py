"""Many candidates in one build: the headers are read once, so that checking all of them is affordable."""

from __future__ import annotations

import re
from pathlib import Path

from hone.compiler.templates.cutlass.render import render
from hone.compiler.templates.cutlass.toolchain import find_toolchain

_KERNEL = re.compile(
    r"using LayoutB = .*?(?=using Gemm = )|using Swizzle = [^\n]*\nusing Default = .*?(?=using Convolution = )", re.S
)
_SWIZZLE = re.compile(r"using Swizzle = [^\n]*\n")


def compile_all(template, workload, candidates, target, folder: Path):
    """The report of one build with every candidate's device code; each must be what its tile's model says, or less.

    Raises BuildFailed if one of them does not compile.
    """
    parts, last = [], ""
    for number, candidate in enumerate(candidates):
        recipe = template.recipe(workload, candidate, target)
        last = render(recipe.source, {**recipe.values, "name": "sweep"})
        kernel = _KERNEL.search(last)[0]
        swizzle = _SWIZZLE.search(last)[0]
        launcher = "Kernel2" if "gemm2x" in recipe.source else "Kernel"
        parts.append(
            f"namespace hone::candidate{number} {{ {'' if swizzle in kernel else swizzle}{kernel} }}\n"
            f"template __global__ void cutlass::{launcher}<hone::candidate{number}::Kernel>"
            f"(typename hone::candidate{number}::Kernel::Params);\n"
        )
    source = last[: last.index("using Swizzle")] + "}\n" + "\n".join(parts)
    return find_toolchain().compile(source, folder / "sweep.so", target, num_gib=3.0)
