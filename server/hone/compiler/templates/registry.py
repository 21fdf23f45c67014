"""The templates there are, in order of preference."""

from __future__ import annotations

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Template
from hone.compiler.templates.cpu.conv2d import BlockedConvolution
from hone.compiler.templates.cpu.matmul import PackedMatmul
from hone.compiler.workload import Workload

CONVOLUTION = BlockedConvolution()
MATMUL = PackedMatmul()

TEMPLATES: tuple[Template, ...] = (CONVOLUTION, MATMUL)


def template_for(workload: Workload, target: CpuTarget) -> Template | None:
    """The first template that can do the workload."""
    return next((template for template in TEMPLATES if template.matches(workload, target)), None)


def template_named(name: str) -> Template | None:
    return next((template for template in TEMPLATES if template.name == name), None)
