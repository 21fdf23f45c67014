"""Products in bfloat16 with sums in float32, by AVX-512's `vdpbf16ps` or AMX's `tdpbf16ps`.

Weights are rounded and packed once a load, in pairs of input channels for sixteen outputs. Activations come as float32,
and are rounded on the way into the kernel, or as bfloat16 that another of these kernels left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import te, tirx

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpp.dot import MAX_CANDIDATES, DotTemplate
from hone.compiler.templates.cpp.geometry import LANES, Geometry, convolution_geometry, matmul_geometry
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

__all__ = ["AMX_FEATURES", "FEATURES", "MAX_CANDIDATES", "Bf16Convolution", "Bf16Matmul", "missing_features"]

FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")
AMX_FEATURES = ("amx-tile", "amx-bf16")

_TYPES = {"float32": "float", "bfloat16": "u16"}


def missing_features(target: CpuTarget) -> tuple[str, ...]:
    """What of the instruction set is missing for bfloat16."""
    return tuple(name for name in FEATURES if name not in target.features)


class _Bf16Template(DotTemplate):
    precision = "bf16"
    features = FEATURES
    amx_features = AMX_FEATURES
    item_bytes = 2

    def takes(self, workload: Workload) -> bool:
        values = (workload.inputs[0], *workload.inputs[2:], workload.output)
        return workload.inputs[1].dtype == "float32" and all(tensor.dtype in _TYPES for tensor in values)

    def values(self, workload: Workload) -> Mapping[str, Any]:
        return {"kind": "bf16"}

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        g = self.checked_geometry(workload)
        weight = workload.inputs[1]
        shape = (g.vectors, g.blocks, *g.kernel, g.block // 2, LANES, 2)
        convolution = len(weight.shape) == 4
        outputs, inputs = weight.shape[:2] if convolution else weight.shape[::-1]

        def pack(source: Any) -> Any:
            def item(v: Any, b: Any, y: Any, x: Any, pair: Any, lane: Any, half: Any) -> Any:
                o, i = v * LANES + lane, b * g.block + pair * 2 + half
                value = source(o, i, y, x) if convolution else source(i, o)
                return tirx.if_then_else(tirx.all(o < outputs, i < inputs), bf16_bits(value), tirx.const(0, "uint16"))

            return te.compute(shape, item, name="pairs")

        return {1: Packing(TensorType(shape, "uint16"), pack)}


class Bf16Matmul(_Bf16Template):
    """x [..., M, K] times a weight [K, N] of any size."""

    name = "cpp.matmul_bf16"
    op = "matmul"

    def geometry(self, workload: Workload) -> Geometry | None:
        return matmul_geometry(workload, _TYPES, 2)


class Bf16Convolution(_Bf16Template):
    """Data NCHW or NCHW{i}c, weights OIHW, output NCHW8c or NCHW16c; one group; any stride, padding and dilation."""

    name = "cpp.conv2d_bf16"
    op = "conv2d"

    def geometry(self, workload: Workload) -> Geometry | None:
        return convolution_geometry(workload, _TYPES, 2)


def bf16_bits(value: Any) -> Any:
    """A float32 in TIR, rounded to the nearest bfloat16 (ties to even; NaN stays NaN), as its 16 bits."""
    bits = tirx.reinterpret("uint32", value)

    def u32(number: int) -> Any:
        return tirx.const(number, "uint32")

    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    quiet = (bits >> u32(16)) | u32(0x40)
    is_nan = (bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
    return tirx.Select(is_nan, quiet, rounded).astype("uint16")
