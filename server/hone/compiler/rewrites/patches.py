"""Operators over windows of an image: what they gather is known, so it is gathered by constant indices."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require_within
from hone.types import Array

#: Index tables of more items than this would be weights of many megabytes.
_MAX_TABLE_ITEMS = 1 << 22


def max_pool_with_indices(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """MaxPool whose second output is used: windows by Gather, then the largest of each and where it came from."""
    shape, dtype = graph.shape(node.input[0]), graph.dtype(node.input[0])
    if len(node.output) < 2 or not node.output[1] or shape is None or dtype is None:
        return None
    windows = _windows(node, shape[2:])
    if windows is None:
        return None
    places, sizes = windows  # (windows, items): place in the flat image, -1 in the padding
    batch, channels, area = shape[0], shape[1], math.prod(shape[2:])
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    least = -np.inf if kind.kind == "f" else np.iinfo(kind).min
    if np.any(np.all(places < 0, axis=1)):
        return None  # a window with nothing in it
    # The first of equal items is chosen: behind all others, padding is not, though an item may be as small.
    places = np.take_along_axis(places, np.argsort(places < 0, axis=1, kind="stable"), axis=1)
    emit = Emitter(graph, node)
    flat = emit.reshape(node.input[0], (batch * channels, area))
    items = emit("Gather", flat, emit.constant(np.where(places < 0, 0, places)), axis=1)
    if np.any(places < 0):
        items = emit("Where", emit.constant(places >= 0), items, emit.constant(np.array(least, kind)))
    width = places.shape[1]
    chosen = emit("ArgMax", items, axis=2, keepdims=0)  # (planes, windows)
    rows = emit.constant(np.arange(places.shape[0], dtype=np.int64) * width)
    order = _column_major(places, shape[2:]) if attribute(node, "storage_order", 0) else places
    found = emit("Gather", emit.constant(order.reshape(-1)), emit("Add", chosen, rows), axis=0)
    planes = emit.constant((np.arange(batch * channels, dtype=np.int64) * area)[:, None])
    output_shape = (batch, channels, *sizes)
    if node.output[0]:
        largest = emit("GatherElements", items, emit.unsqueeze(chosen, 2), axis=2)
        emit.bind(node.output[0], emit.reshape(largest, output_shape))
    emit.bind(node.output[1], emit.reshape(emit("Add", found, planes), output_shape))
    return emit.made


def max_unpool(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """MaxUnpool that names its output's shape; without that the importer has it. Indices count in the whole output."""
    shape, dtype = graph.shape(node.input[0]), graph.dtype(node.input[0])
    wanted = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if shape is None or dtype is None or wanted is None:
        return None
    total = int(np.prod(wanted))
    if total <= 0:
        return None
    emit = Emitter(graph, node)
    if graph.constant(node.input[1]) is None:
        require_within(emit, node.input[1], 0, total - 1)
    zero = helper.make_tensor("value", dtype, [1], [0])
    zeros = emit("ConstantOfShape", emit.constant(np.array([total], np.int64)), value=zero)
    places, values = emit.reshape(node.input[1], [-1]), emit.reshape(node.input[0], [-1])
    emit.bind(node.output[0], emit.reshape(emit("ScatterElements", zeros, places, values, axis=0), wanted.tolist()))
    return emit.made


def col2im(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Col2Im as the transpose of a convolution whose kernels have a single one each."""
    shape, dtype = graph.shape(node.input[0]), graph.dtype(node.input[0])
    image, block = (graph.constant(name) for name in node.input[1:3])
    if shape is None or dtype is None or image is None or block is None or len(image) != len(block):
        return None
    rank = len(image)
    sizes, kernel = [int(size) for size in image], [int(size) for size in block]
    strides = attribute(node, "strides") or [1] * rank
    dilations = attribute(node, "dilations") or [1] * rank
    pads = attribute(node, "pads") or [0] * (2 * rank)
    counts, extra = [], []
    for axis in range(rank):
        reach = dilations[axis] * (kernel[axis] - 1) + 1
        count = (sizes[axis] + pads[axis] + pads[axis + rank] - reach) // strides[axis] + 1
        counts.append(count)
        extra.append(sizes[axis] + pads[axis] + pads[axis + rank] - (count - 1) * strides[axis] - reach)
    per_block = math.prod(kernel)
    channels = shape[1] // per_block
    if per_block**2 > _MAX_TABLE_ITEMS:
        return None
    if math.prod(counts) != shape[2] or channels * per_block != shape[1]:
        return None
    emit = Emitter(graph, node)
    columns = emit.reshape(node.input[0], (shape[0] * channels, per_block, *counts))
    ones = np.eye(per_block, dtype=helper.tensor_dtype_to_np_dtype(dtype)).reshape(per_block, 1, *kernel)
    summed = emit(
        "ConvTranspose",
        columns,
        emit.constant(ones),
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=pads,
        output_padding=extra,
    )
    emit.bind(node.output[0], emit.reshape(summed, (shape[0], channels, *sizes)))
    return emit.made


def deform_conv(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """DeformConv of images: each item of the kernel samples where its offset says, then a product with the weights."""
    shape, weight, offset = (graph.shape(name) for name in node.input[:3])
    dtype = graph.dtype(node.input[0])
    if shape is None or weight is None or offset is None or dtype is None or len(shape) != 4:
        return None
    bias = node.input[3] if len(node.input) > 3 else ""
    mask = node.input[4] if len(node.input) > 4 else ""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    groups, offset_groups = attribute(node, "group", 1), attribute(node, "offset_group", 1)
    strides, dilations = attribute(node, "strides") or [1, 1], attribute(node, "dilations") or [1, 1]
    pads = attribute(node, "pads") or [0, 0, 0, 0]
    batch, channels, height, width = shape
    rows, columns = offset[2:]
    kernel = weight[2] * weight[3]
    emit = Emitter(graph, node)
    # Where each kernel item (row by row) of each output lies without its offset, in pixels of the input.
    at = [
        np.arange(weight[2 + axis])[:, None] * dilations[axis] + np.arange(offset[2 + axis])[None, :] * strides[axis]
        - pads[axis]
        for axis in (0, 1)
    ]  # fmt: skip
    whole = (weight[2], weight[3], rows, columns)
    plain_y = np.broadcast_to(at[0][:, None, :, None], whole).reshape(1, kernel, rows, columns).astype(kind)
    plain_x = np.broadcast_to(at[1][None, :, None, :], whole).reshape(1, kernel, rows, columns).astype(kind)
    moved = emit.reshape(node.input[2], (batch * offset_groups, kernel, 2, rows, columns))
    places = []
    # Pixel p of n lies at (2 p + 1) / n - 1 in GridSample's coordinates.
    for which, plain, size in ((1, plain_x, width), (0, plain_y, height)):
        moves = emit.squeeze(emit.slice(moved, 2, which, which + 1), 2)
        pixels = emit("Add", moves, emit.constant(plain))
        scaled = emit("Mul", pixels, emit.constant(np.array(2 / size, kind)))
        place = emit("Add", scaled, emit.constant(np.array(1 / size - 1, kind)))
        places.append(emit.reshape(place, (batch * offset_groups, kernel * rows, columns, 1)))
    grid = emit.concat(places, 3)
    image = emit.reshape(node.input[0], (batch * offset_groups, channels // offset_groups, height, width))
    bilinear = "linear" if graph.opset >= 20 else "bilinear"
    sampled = emit("GridSample", image, grid, mode=bilinear, padding_mode="zeros", align_corners=0)
    sampled = emit.reshape(sampled, (batch, offset_groups, channels // offset_groups, kernel, rows, columns))
    if mask:
        weights = emit.reshape(mask, (batch, offset_groups, 1, kernel, rows, columns))
        sampled = emit("Mul", sampled, weights)
    items = channels // groups * kernel
    table = emit.reshape(sampled, (batch, groups, items, rows * columns))
    filters = emit.reshape(node.input[1], (1, groups, weight[0] // groups, items))
    result = emit.reshape(emit("MatMul", filters, table), (batch, weight[0], rows, columns))
    if bias:
        result = emit("Add", result, emit.reshape(bias, (1, weight[0], 1, 1)))
    emit.bind(node.output[0], result)
    return emit.made


def _windows(node: NodeProto, image: tuple[int, ...]) -> tuple[Array, list[int]] | None:
    """(windows, items) of places in the flat image, -1 for the padding; and how many windows along each axis."""
    rank = len(image)
    kernel = attribute(node, "kernel_shape")
    strides = attribute(node, "strides") or [1] * rank
    dilations = attribute(node, "dilations") or [1] * rank
    pads = attribute(node, "pads") or [0] * (2 * rank)
    automatic = attribute(node, "auto_pad", "NOTSET")
    along, sizes = [], []
    for axis in range(rank):
        reach = dilations[axis] * (kernel[axis] - 1) + 1
        before, after = pads[axis], pads[axis + rank]
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            missing = max((math.ceil(image[axis] / strides[axis]) - 1) * strides[axis] + reach - image[axis], 0)
            before = missing // 2 if automatic == "SAME_UPPER" else missing - missing // 2
            after = missing - before
        span = image[axis] + before + after - reach
        count = (-(-span // strides[axis]) if attribute(node, "ceil_mode", 0) else span // strides[axis]) + 1
        if attribute(node, "ceil_mode", 0) and (count - 1) * strides[axis] >= image[axis] + before:
            count -= 1  # a window that begins in the padding behind the image is none
        starts = np.arange(count)[:, None] * strides[axis] - before
        places = starts + np.arange(kernel[axis])[None, :] * dilations[axis]
        along.append(np.where((places >= 0) & (places < image[axis]), places, -1))
        sizes.append(int(count))
    if math.prod(sizes) * math.prod(kernel) > _MAX_TABLE_ITEMS or min(sizes, default=0) <= 0:
        return None
    flat = np.zeros([1] * (2 * rank), np.int64)
    outside = np.zeros([1] * (2 * rank), bool)
    for axis, places in enumerate(along):
        form = [1] * (2 * rank)
        form[axis], form[rank + axis] = places.shape
        flat = flat * image[axis] + places.reshape(form)
        outside = outside | (places.reshape(form) < 0)
    table = np.where(outside, -1, flat).reshape(math.prod(sizes), math.prod(kernel))
    return table.astype(np.int64), sizes


def _column_major(places: Array, image: tuple[int, ...]) -> Array:
    """The same places, counted with the first axis fastest."""
    found = np.unravel_index(np.where(places < 0, 0, places), image)
    return np.asarray(np.ravel_multi_index(found, image, order="F"), np.int64)
