"""CUTLASS's templates, in order of preference."""

from __future__ import annotations

from pathlib import Path

from hone.compiler.templates.cutlass.attention import FusedAttention
from hone.compiler.templates.cutlass.conv2x import Conv2x
from hone.compiler.templates.cutlass.conv3x import Conv3x
from hone.compiler.templates.cutlass.depthwise import DepthwiseConvolution
from hone.compiler.templates.cutlass.gemm2x import Gemm2x
from hone.compiler.templates.cutlass.gemm3x import Gemm3x
from hone.compiler.templates.cutlass.kernel import CutlassTemplate
from hone.compiler.templates.cutlass.persistent import Persistent


def cutlass_templates(cuda_home: Path | None = None) -> tuple[CutlassTemplate, ...]:
    """All templates, building with PyPI's nvcc, else with the toolkit in `cuda_home`, else with the one on PATH."""
    return (
        Gemm3x(cuda_home),
        Gemm2x(cuda_home),
        DepthwiseConvolution(cuda_home),
        Conv3x(cuda_home),
        Conv2x(cuda_home),
        Persistent(cuda_home),
        FusedAttention(cuda_home),
    )


CUTLASS_TEMPLATES = cutlass_templates()
