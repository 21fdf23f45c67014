"""The templates there are, in order of preference."""

from __future__ import annotations

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Template
from hone.compiler.templates.cpp.bf16 import Bf16Convolution, Bf16Matmul
from hone.compiler.templates.cpp.int8 import Int8Convolution, Int8Matmul
from hone.compiler.templates.cpu.attention import Attention
from hone.compiler.templates.cpu.batched_matmul import BatchedMatmul
from hone.compiler.templates.cpu.conv2d import BlockedConvolution
from hone.compiler.templates.cpu.conv_transpose import TransposedConvolution
from hone.compiler.templates.cpu.depthwise import DepthwiseConvolution
from hone.compiler.templates.cpu.direct import DirectConvolution
from hone.compiler.templates.cpu.grouped import GroupedConvolution
from hone.compiler.templates.cpu.matmul import PackedMatmul
from hone.compiler.templates.cpu.pooling import GlobalPooling, Pooling
from hone.compiler.templates.cpu.softmax import RowSoftmax
from hone.compiler.templates.cpu.stack import StackedChannels
from hone.compiler.templates.cpu.upsample import LinearUpsampling
from hone.compiler.templates.cpu.winograd import WinogradConvolution
from hone.compiler.workload import Workload

CONVOLUTION = BlockedConvolution()
MATMUL = PackedMatmul()

#: They take only workloads that ask for their precision (see `phases/precision.py`).
LOW_PRECISION_TEMPLATES: tuple[Template, ...] = (
    Bf16Convolution(),
    Bf16Matmul(),
    Int8Convolution(),
    Int8Matmul(),
)

TEMPLATES: tuple[Template, ...] = (
    *LOW_PRECISION_TEMPLATES,
    WinogradConvolution(),
    DirectConvolution(),
    CONVOLUTION,
    MATMUL,
    BatchedMatmul(),
    DepthwiseConvolution(),
    GroupedConvolution(),
    TransposedConvolution(),
    StackedChannels(),
    Pooling(),
    GlobalPooling(),
    LinearUpsampling(),
    Attention(),
    RowSoftmax(),
)


def templates_for(workload: Workload, target: CpuTarget) -> tuple[Template, ...]:
    """All templates that can do the workload; the first one's first candidate is what is taken unmeasured."""
    return tuple(template for template in TEMPLATES if template.matches(workload, target))


def template_named(name: str) -> Template | None:
    return next((template for template in TEMPLATES if template.name == name), None)
