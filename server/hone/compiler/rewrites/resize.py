"""Resizes that TVM's importer gets wrong or does not take, as products with constant matrices.

A resize is linear and works on one axis after another: what it does to the unit vectors of an axis, which ONNX Runtime
is asked, is its matrix, with the very roundings of the baseline; for `nearest` the matrix only picks, so indices do.
The importer is right where the sizes are an exact multiple by the scales, in the usual modes; those stay as they are.
A resize that crops (`tf_crop_and_resize`) gives what lies outside of the image a value of its own: ONNX Runtime tells
which items these are, too.
(With products, an infinite or NaN pixel spoils its row and column, and not its neighbours alone.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from hone.compiler import baseline
from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.types import Array

#: Larger matrices cost more than they are worth.
_MAX_ITEMS = 1 << 22

#: The part of an axis that is resized, where nothing is cropped.
_WHOLE = (0.0, 1.0)

_TRUSTED_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


def resize(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Resize by matrices, where the importer would fail or be wrong."""
    source, target, dtype = graph.shape(node.input[0]), graph.shape(node.output[0]), graph.dtype(node.input[0])
    if source is None or target is None or dtype != TensorProto.FLOAT or graph.opset < 11:
        return None
    factors = _factors(graph, node, source)
    regions = _regions(graph, node, len(source))
    if regions is None:
        return None
    if len(node.input) > 2 and node.input[2] and factors is not None:
        # ONNX Runtime multiplies in float32 (10 by 1.4 is 14); ONNX's shape inference does not (and says 13).
        target = tuple(int(np.float32(size) * np.float32(factor)) for size, factor in zip(source, factors, strict=True))
    if factors is None or _is_trusted(node, source, target, factors):
        return None
    emit = Emitter(graph, node)
    value = node.input[0]
    outside: list[Array] = []
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if before == after and factors[axis] == 1.0 and regions[axis] == _WHOLE:
            continue
        if before * after > _MAX_ITEMS:
            return None
        oracle = _Oracle(graph, node, axis, factors[axis], regions[axis])
        matrix = oracle.matrix(before, after)
        if matrix is None or matrix.shape != (before, after):
            return None
        value = _apply(emit, value, matrix, axis, len(source), attribute(node, "mode", "nearest") == "nearest")
        if _is_crop(node):
            is_outside = oracle.outside(before, after)
            if is_outside is None:
                return None
            outside.append(is_outside.reshape([after if other == axis else 1 for other in range(len(source))]))
    filler = emit.constant(np.array(attribute(node, "extrapolation_value", 0.0), np.float32))
    for where in outside:
        if where.any():
            value = emit("Where", emit.constant(where), filler, value)
    emit.bind(node.output[0], value)
    return emit.made


def _factors(graph: Graph, node: NodeProto, source: Sequence[int]) -> list[float] | None:
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


class _Oracle:
    """What ONNX Runtime's resize does along one axis."""

    def __init__(self, graph: Graph, node: NodeProto, axis: int, factor: float, region: tuple[float, float]) -> None:
        self._graph, self._node, self._axis, self._factor, self._region = graph, node, axis, factor, region

    def matrix(self, before: int, after: int) -> Array | None:
        """What becomes of the unit vectors of the axis [before, after]; None for what ONNX Runtime refuses."""
        if attribute(self._node, "keep_aspect_ratio_policy", "stretch") != "stretch":
            return self._by_policy(before)
        shape = (1, 1, before, before)
        return self._row(np.eye(before, dtype=np.float32).reshape(shape), after, 0.0)

    def outside(self, before: int, after: int) -> Array | None:
        """Which items lie outside of the image [after], of a resize that crops."""
        row = self._row(np.zeros((1, 1, 1, before), np.float32), after, 1.0)
        return None if row is None else row[0] == 1.0

    def _row(self, image: Array, after: int, filler: float) -> Array | None:
        """The image [1, 1, rows, before] with its rows resized."""
        node = self._node
        if len(node.input) > 3 and node.input[3]:
            names, extent = ["x", "roi", "", "extent"], np.array([*image.shape[:3], after], np.int64)
        else:
            names, extent = ["x", "roi", "extent"], np.array([1, 1, 1, self._factor], np.float32)
        region = np.array([0, 0, 0, self._region[0], 1, 1, 1, self._region[1]], np.float32)
        given: dict[str, Array] = {"extent": extent, "roi": region}
        if not _is_crop(node):
            names[1] = ""
            del given["roi"]
        result = self._ask(names, given, image, ("axes", "keep_aspect_ratio_policy"), extrapolation_value=filler)
        return None if result is None else result[0, 0]

    def _by_policy(self, before: int) -> Array | None:
        """The same where one axis decides the factors of all, from which ONNX Runtime makes their sizes."""
        graph, node = self._graph, self._node
        source, sizes = graph.shape(node.input[0]), graph.constant(node.input[3])
        if source is None or sizes is None:
            return None
        axes = [axis % len(source) for axis in attribute(node, "axes") or range(len(source))]
        wanted = dict(zip(axes, sizes.tolist(), strict=True))
        smaller = attribute(node, "keep_aspect_ratio_policy") == "not_larger"
        decides = (min if smaller else max)(axes, key=lambda axis: wanted[axis] / source[axis])
        if before * before * source[decides] > _MAX_ITEMS:
            return None
        vectors = np.eye(before, dtype=np.float32).reshape(before, 1, before, 1)
        image = np.broadcast_to(vectors, (before, 1, before, source[decides]))
        # The axis that decides lies beside; every item along it is the same, and stays so.
        given = {"extent": np.array([wanted[self._axis], wanted[decides]], np.int64)}
        result = self._ask(["x", "", "", "extent"], given, np.ascontiguousarray(image), ("axes",), axes=[2, 3])
        return None if result is None else np.ascontiguousarray(result[:, 0, :, 0])

    def _ask(
        self, names: list[str], given: dict[str, Array], image: Array, replaced: Sequence[str], **attributes: Any
    ) -> Array | None:
        """The node's result on another image; None for what ONNX Runtime refuses."""
        graph, node = self._graph, self._node
        one = helper.make_node("Resize", names, ["y"], **attributes)
        one.attribute.extend(item for item in node.attribute if item.name not in {*replaced, *attributes})
        form = helper.make_graph(
            [one],
            "one",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in given.items()],
        )
        opsets = [helper.make_opsetid("", graph.opset)]
        model = helper.make_model(form, opset_imports=opsets, ir_version=graph.model.ir_version)
        try:
            (result,) = baseline.session(model.SerializeToString()).run(None, {"x": image})
        except Exception:  # its exceptions have no common root; the importer has to see for itself
            return None
        return np.asarray(result, np.float32)


def _is_crop(node: NodeProto) -> bool:
    """Whether a part of the image is resized, which may reach beyond it."""
    return bool(attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize")


def _regions(graph: Graph, node: NodeProto, rank: int) -> list[tuple[float, float]] | None:
    """The part of each axis that is resized, from 0 to 1; None where it is no constant."""
    regions = [_WHOLE] * rank
    if not _is_crop(node):
        return regions
    given = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    axes = attribute(node, "axes") or range(rank)
    if given is None or given.size != 2 * len(axes):
        return None
    starts, ends = given.reshape(2, -1).tolist()
    for axis, start, end in zip(axes, starts, ends, strict=True):
        regions[axis % rank] = (start, end)
    return regions


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
