"""Discrete Fourier transforms as products with constant matrices.

A frame of a few hundred samples, as audio models have it, is one row of a matrix product, which the compiler is best
at; a fast transform would save arithmetic and not time.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.types import Array

#: Index tables of more items than this would be weights of many megabytes.
_MAX_TABLE_ITEMS = 1 << 22
#: Longer transforms would need matrices of more than a few tens of megabytes.
_MAX_LENGTH = 2048


def dft(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """DFT of constant length and axis."""
    shape, dtype = graph.shape(node.input[0]), graph.dtype(node.input[0])
    axis = _number(graph, node, 2, attribute(node, "axis", -2 if graph.opset >= 20 else 1))
    if shape is None or dtype is None or axis is None:
        return None
    inverse, onesided = bool(attribute(node, "inverse", 0)), bool(attribute(node, "onesided", 0))
    axis %= len(shape)
    given = shape[axis]
    default = 2 * (given - 1) if inverse and onesided else given
    length = _number(graph, node, 1, default)
    if length is None or not 0 < length <= _MAX_LENGTH or axis == len(shape) - 1 or not given:
        return None
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    emit = Emitter(graph, node)
    others = [place for place in range(len(shape) - 1) if place != axis]
    # (others..., complex, time): what comes after is a product over the last axis.
    turned = emit("Transpose", node.input[0], perm=[*others, len(shape) - 1, axis])
    used = min(given, length // 2 + 1 if inverse and onesided else length)
    if used < given:
        turned = emit.slice(turned, len(shape) - 1, 0, used)
    real = emit.slice(turned, len(shape) - 2, 0, 1)
    imaginary = emit.slice(turned, len(shape) - 2, 1, 2) if shape[-1] == 2 else ""
    cosine, sine = _mirrored(length, used) if inverse and onesided else _angles(length, used, onesided, inverse)
    bins = [_product(emit, real, imaginary, cosine, -sine, kind)]
    if not (inverse and onesided):
        bins.append(_product(emit, real, imaginary, sine, cosine, kind))
    joined = emit.concat(bins, len(shape) - 2)
    back = [0] * len(shape)
    for place, source in enumerate([*others, len(shape) - 1, axis]):
        back[source] = place
    emit.bind(node.output[0], emit("Transpose", joined, perm=back))
    return emit.made


def stft(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """STFT of constant step and frame length: frames by Gather, then a product."""
    shape, dtype = graph.shape(node.input[0]), graph.dtype(node.input[0])
    step = _number(graph, node, 1, 0)
    window = node.input[2] if len(node.input) > 2 else ""
    window_shape = graph.shape(window) if window else None
    length = _number(graph, node, 3, window_shape[0] if window_shape else 0)
    if shape is None or dtype is None or not step or not length or step < 0 or not 0 < length <= _MAX_LENGTH:
        return None
    if length > shape[1] or (window and window_shape != (length,)):
        return None
    num_frames = (shape[1] - length) // step + 1
    if num_frames * length > _MAX_TABLE_ITEMS:
        return None
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    emit = Emitter(graph, node)
    places = np.arange(num_frames, dtype=np.int64)[:, None] * step + np.arange(length, dtype=np.int64)[None, :]
    frames = emit("Gather", node.input[0], emit.constant(places), axis=1)  # (batch, frames, length, complex)
    # A real signal may be (batch, samples).
    frames = emit("Transpose", frames, perm=[0, 1, 3, 2]) if len(shape) == 3 else emit.unsqueeze(frames, 2)
    if window:
        frames = emit("Mul", frames, window)
    real = emit.slice(frames, 2, 0, 1)
    imaginary = emit.slice(frames, 2, 1, 2) if len(shape) == 3 and shape[2] == 2 else ""
    cosine, sine = _angles(length, length, bool(attribute(node, "onesided", 1)) and not imaginary, inverse=False)
    bins = [
        _product(emit, real, imaginary, cosine, -sine, kind),
        _product(emit, real, imaginary, sine, cosine, kind),
    ]
    emit.bind(node.output[0], emit("Transpose", emit.concat(bins, 2), perm=[0, 1, 3, 2]))
    return emit.made


def _angles(length: int, used: int, onesided: bool, inverse: bool) -> tuple[Array, Array]:
    """Real and imaginary part of the matrix (time, bin) of a transform of so many samples, the others being zero."""
    times, bins = np.arange(used), np.arange(length // 2 + 1 if onesided else length)
    # Whole turns are taken out in integers: so the angle of a large product is as exact as that of a small one.
    angles = (times[:, None] * bins[None, :] % length) * (2 * np.pi / length)
    scale = 1 / length if inverse else 1.0
    return np.cos(angles) * scale, np.sin(angles) * (scale if inverse else -scale)


def _mirrored(length: int, used: int) -> tuple[Array, Array]:
    """The inverse of a one-sided spectrum: each bin stands for its mirror image as well, but for the first and, in an
    even length, the last."""
    cosine, sine = _angles(length, used, onesided=False, inverse=True)
    twice = np.full((used, 1), 2.0)
    twice[0] = 1.0
    if length % 2 == 0 and used == length // 2 + 1:
        twice[-1] = 1.0
    return cosine * twice, sine * twice


def _product(emit: Emitter, real: str, imaginary: str, of_real: Array, of_imaginary: Array, kind: np.dtype) -> str:
    total = str(emit("MatMul", real, emit.constant(of_real.astype(kind))))
    if not imaginary:
        return total
    return str(emit("Add", total, emit("MatMul", imaginary, emit.constant(of_imaginary.astype(kind)))))


def _number(graph: Graph, node: NodeProto, place: int, default: int) -> int | None:
    """A scalar input; the default where it is left out, None where only a run can tell."""
    if len(node.input) <= place or not node.input[place]:
        return int(default)
    value = graph.constant(node.input[place])
    return None if value is None else int(value.reshape(-1)[0])
