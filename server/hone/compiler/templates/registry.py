"""The templates there are, in order of preference."""

from __future__ import annotations

from hone.compiler.templates.base import Template
from hone.compiler.templates.cpu.conv2d import BlockedConvolution

CONVOLUTION = BlockedConvolution()

TEMPLATES: tuple[Template, ...] = (CONVOLUTION,)
