"""Products of quantised numbers with exact 32-bit sums, by AVX-512's `vpdpbusd`.

The data is float32 that is a multiple of its scale, as a DequantizeLinear left it; the kernel finds the multiple again
as it copies its input (an exact step), multiplies integers, and scales the sums. Weights are int8 with a scale for all,
or one for each output channel, and no zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import te, tirx

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpp.dot import DotTemplate
from hone.compiler.templates.cpp.geometry import LANES, Geometry, convolution_geometry, matmul_geometry
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload

FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma")

_TYPES = {"float32": "float"}
_GROUP = 4
_HEADER = 64
"""Bytes before the weights of sixteen outputs: an integer for each that makes up for the data's offset."""


class _Int8Template(DotTemplate):
    """Attributes beside the operator's: `x_scale`, `x_low` (the multiple that is stored as 0), and `w_scale` (a number)
    or `w_scale_at` (the position of an input that holds one per output channel)."""

    precision = "int8"
    features = FEATURES
    item_bytes = 1

    def takes(self, workload: Workload) -> bool:
        attributes = dict(workload.attributes)
        values = (workload.inputs[0], *workload.inputs[2:], workload.output)
        return (
            workload.inputs[1].dtype == "int8"
            and all(tensor.dtype == "float32" for tensor in values)
            and -255 <= attributes["x_low"] <= 0
            and self._scales_fit(workload, attributes.get("w_scale_at"))
        )

    def values(self, workload: Workload) -> Mapping[str, Any]:
        attributes = dict(workload.attributes)
        scale, weight_scale = float(attributes["x_scale"]), float(attributes.get("w_scale", 1.0))
        quantization = {
            "scale": scale.hex(),
            "inverse": (1.0 / scale).hex(),
            "product": (scale * weight_scale).hex(),
            "low": attributes["x_low"],
            "scale_at": attributes.get("w_scale_at"),
        }
        return {"kind": "int8", "quantization": quantization}

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        g = self.checked_geometry(workload)
        low = dict(workload.attributes)["x_low"]
        weight = workload.inputs[1]
        convolution = len(weight.shape) == 4
        outputs, inputs = weight.shape[:2] if convolution else weight.shape[::-1]
        num_y, num_x = g.kernel
        step = g.block * LANES

        def pack(source: Any) -> Any:
            axes = [te.reduce_axis((0, size), name) for size, name in ((inputs, "i"), (num_y, "y"), (num_x, "x"))]

            def value(o: Any, i: Any, y: Any, x: Any) -> Any:
                return source(o, i, y, x) if convolution else source(i, o)

            def total(lane: Any) -> Any:
                one = value(tirx.min(lane, outputs - 1), *axes).astype("int32")
                return te.sum(one * tirx.const(low, "int32"), axis=axes)

            sums = te.compute((g.vectors * LANES,), total, name="offsets")

            def item(v: Any, at: Any) -> Any:
                shift = (at % 4).astype("int32") * tirx.const(8, "int32")
                header = sums(v * LANES + tirx.min(at, _HEADER - 1) // 4) >> shift
                place = tirx.max(at - _HEADER, 0)
                tap, rest = place // step, place % step
                block, y, x = tap // (num_y * num_x), tap // num_x % num_y, tap % num_x
                o = v * LANES + rest // _GROUP % LANES
                i = block * g.block + rest // (_GROUP * LANES) * _GROUP + rest % _GROUP
                inside = tirx.all(o < outputs, i < inputs)
                packed = tirx.if_then_else(inside, value(o, i, y, x), tirx.const(0, "int8"))
                return tirx.if_then_else(at < _HEADER, header.astype("int8"), packed)

            return te.compute((g.vectors, _HEADER + g.depth * LANES), item, name="quads")

        return {1: Packing(TensorType((g.vectors, _HEADER + g.depth * LANES), "int8"), pack)}

    def _scales_fit(self, workload: Workload, at: int | None) -> bool:
        """A channel that exists for the vector's sake only has no scale."""
        shape = workload.inputs[1].shape
        outputs = shape[0] if len(shape) == 4 else shape[1]
        return at is None or workload.inputs[at].shape == (outputs,)


class Int8Matmul(_Int8Template):
    """x [..., M, K] times a weight [K, N] of any size."""

    name = "cpp.matmul_int8"
    op = "matmul"

    def geometry(self, workload: Workload) -> Geometry | None:
        return matmul_geometry(workload, _TYPES, _GROUP)


class Int8Convolution(_Int8Template):
    """Data NCHW or NCHW{i}c, weights OIHW, output NCHW8c or NCHW16c of no more channels; one group."""

    name = "cpp.conv2d_int8"
    op = "conv2d"

    def geometry(self, workload: Workload) -> Geometry | None:
        found = convolution_geometry(workload, _TYPES, _GROUP)
        return found if found is not None and found.outputs == workload.inputs[1].shape[0] else None
