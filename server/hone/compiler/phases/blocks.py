"""Blocks of channels: a value NCHW as [N, blocks, H, W, width], its last block filled with channels that nobody reads.

What the extra channels hold is not specified, so operators keep channels apart or read real ones only. (It is finite
all the same for finite inputs, see `forms.py`: arithmetic on subnormal numbers or NaN may be slow.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from hone.compiler.target import CpuTarget
from hone.compiler.workload import TensorType


def block_width(channels: int, target: CpuTarget) -> int:
    """Channels in a block: a vector, or half of one where that holds all of them."""
    half = target.lanes // 2
    return half if channels <= half and half >= 4 else target.lanes


def blocked_shape(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    n, c, h, w = shape
    return (n, -(-c // width), h, w, width)


def blocked_type(tensor: TensorType, width: int) -> TensorType:
    return TensorType(blocked_shape(tensor.shape, width), tensor.dtype)


def to_blocks(builder: Any, value: Any, tensor: TensorType, width: int) -> Any:
    """The plain value in blocks, emitted; extra channels are zero."""
    n, c, h, w = tensor.shape
    shape = blocked_shape(tensor.shape, width)
    if isinstance(value, tvm.ir.GenericConst):
        array = np.asarray(value.value.numpy()).reshape(tensor.shape)
        array = np.pad(array, ((0, 0), (0, shape[1] * width - c), (0, 0), (0, 0)))
        blocks = array.reshape(n, shape[1], width, h, w).transpose(0, 1, 3, 4, 2)
        return relax.const(np.ascontiguousarray(blocks), tensor.dtype)
    if c % width:

        def fill(x: Any) -> Any:
            def item(n: Any, b: Any, h: Any, w: Any, i: Any) -> Any:
                channel = b * width + i
                return tirx.if_then_else(channel < c, x(n, channel, h, w), tirx.const(0, tensor.dtype))

            return te.compute(shape, item, name="blocks")

        return builder.emit_te(fill, value, primfunc_name_hint="to_blocks")
    if h * w == 1:  # the same memory
        return builder.emit(relax.op.reshape(value, shape))
    return builder.emit(
        relax.op.layout_transform(value, lambda n, c, h, w: (n, c // width, h, w, c % width)),
    )


def to_plain(builder: Any, value: Any, tensor: TensorType) -> Any:
    """The blocked value as NCHW, emitted."""
    _, c, h, w = tensor.shape
    width = int(value.ty.shape[4])
    if c % width:

        def take(x: Any) -> Any:
            return te.compute(tensor.shape, lambda n, c, h, w: x(n, c // width, h, w, c % width), name="plain")

        return builder.emit_te(take, value, primfunc_name_hint="to_plain")
    if h * w == 1:
        return builder.emit(relax.op.reshape(value, tensor.shape))
    return builder.emit(relax.op.layout_transform(value, lambda n, c, h, w, i: (n, c * width + i, h, w)))
