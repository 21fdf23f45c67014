"""Resizes that TVM's importer gets wrong or does not take, as products with constant matrices.

A resize is linear and works on one axis after another: what it does to the unit vectors of an axis, which ONNX Runtime
is asked, is its matrix, with the very roundings of the baseline; for `nearest` the matrix only picks, so indices do.
The importer is right where the sizes are an exact multiple by the scales, in the usual modes; those stay as they are.
(With products, an infinite or NaN pixel spoils its row and column, and not its neighbours alone.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from hone.compiler import baseline
from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.types import Array

#: Larger matrices cost more than they are worth.
_MAX_ITEMS = 1 << 22

_TRUSTED_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


def resize(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Resize by matrices, where the importer would fail or be wrong."""
    source, target, dtype = graph.shape(node.input[0]), graph.shape(node.output[0]), graph.dtype(node.input[0])
    if source is None or target is None or dtype != TensorProto.FLOAT or graph.opset < 11:
        return None
    if attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return None
    factors = _factors(graph, node, source, target)
    if len(node.input) > 2 and node.input[2] and factors is not None:
        # ONNX Runtime multiplies in float32 (10 by 1.4 is 14); ONNX's shape inference does not (and says 13).
        target = tuple(int(np.float32(size) * np.float32(factor)) for size, factor in zip(source, factors, strict=True))
    if factors is None or _is_trusted(node, source, target, factors):
        return None
    emit = Emitter(graph, node)
    value = node.input[0]
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if before == after and factors[axis] == 1.0:
            continue
        if before * after > _MAX_ITEMS:
            return None
        matrix = _matrix(graph, node, before, after, factors[axis])
        if matrix is None or matrix.shape != (before, after):
            return None
        value = _apply(emit, value, matrix, axis, len(source), attribute(node, "mode", "nearest") == "nearest")
    emit.bind(node.output[0], value)
    return emit.made


def _factors(graph: Graph, node: NodeProto, source: Sequence[int], target: Sequence[int]) -> list[float] | None:
    """The factor of each axis: as given, or as the sizes make it; None where it is no constant."""
    axes = attribute(node, "axes") or range(len(source))
    factors = [1.0] * len(source)
    scales = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if scales is not None and scales.size:
        for axis, scale in zip(axes, scales.tolist(), strict=True):
            factors[axis % len(source)] = scale
        return factors
    sizes = graph.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if sizes is None or not all(source):
        return None
    wanted = [size / source[axis] for axis, size in zip(axes, sizes.tolist(), strict=True)]
    policy = attribute(node, "keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        wanted = [min(wanted) if policy == "not_larger" else max(wanted)] * len(wanted)
    for axis, factor in zip(axes, wanted, strict=True):
        factors[axis % len(source)] = factor
    return factors


def _is_trusted(node: NodeProto, source: Sequence[int], target: Sequence[int], factors: Sequence[float]) -> bool:
    coordinates = attribute(node, "coordinate_transformation_mode", "half_pixel")
    return (
        not attribute(node, "antialias", 0)
        and not attribute(node, "axes")
        and attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
        and coordinates in _TRUSTED_COORDINATES
        and 3 <= len(source) <= 5
        and list(source[:2]) == list(target[:2])
        and not (coordinates == "align_corners" and 1 in target[2:])
        and all(before * factor == after for before, after, factor in zip(source, target, factors, strict=True))
    )


def _matrix(graph: Graph, node: NodeProto, before: int, after: int, factor: float) -> Array | None:
    """What the resize does to the unit vectors of one axis [before, after]; None for what ONNX Runtime refuses."""
    # Where the sizes are given, and not the factors, the factors of a policy still count.
    stretched = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    if stretched and len(node.input) > 3 and node.input[3]:
        one = helper.make_node("Resize", ["x", "", "", "extent"], ["y"])
        extent = np.array([1, 1, before, after], np.int64)
    else:
        one = helper.make_node("Resize", ["x", "", "extent"], ["y"])
        extent = np.array([1, 1, 1, factor], np.float32)
    one.attribute.extend(item for item in node.attribute if item.name not in ("axes", "keep_aspect_ratio_policy"))
    shape = (1, 1, before, before)
    form = helper.make_graph(
        [one],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(extent, "extent")],
    )
    opsets = [helper.make_opsetid("", graph.opset)]
    model = helper.make_model(form, opset_imports=opsets, ir_version=graph.model.ir_version)
    unit_vectors = np.eye(before, dtype=np.float32).reshape(shape)
    try:
        (result,) = baseline.session(model.SerializeToString()).run(None, {"x": unit_vectors})
    except Exception:  # its exceptions have no common root; the importer has to see for itself
        return None
    matrix: Array = np.asarray(result, np.float32)[0, 0]
    return matrix


def _apply(emit: Emitter, value: str, matrix: Array, axis: int, rank: int, picks: bool) -> str:
    if picks:
        return str(emit("Gather", value, emit.constant(matrix.argmax(axis=0)), axis=axis))
    if axis == rank - 1:
        return str(emit("MatMul", value, emit.constant(matrix)))
    if axis == rank - 2:
        return str(emit("MatMul", emit.constant(matrix.T), value))
    order = [other for other in range(rank) if other != axis] + [axis]
    moved = emit("MatMul", emit("Transpose", value, perm=order), emit.constant(matrix))
    return str(emit("Transpose", moved, perm=[order.index(place) for place in range(rank)]))
