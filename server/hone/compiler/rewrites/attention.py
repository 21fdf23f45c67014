"""Attention as ONNX Runtime computes it, as products around a softmax (which become one kernel again later on).

What ONNX itself gives as the definition differs from the baseline for masks: there what must not be looked at gets the
least finite number and not minus infinity, and a query that may look at nothing, by either, gets zeros. Zeros are put
in place afterwards, and only where a query may be left with nothing: not where the mask is known and leaves something
to each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require_within
from hone.types import Array, Shape

_FLOATS = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)

#: Of other opsets ONNX Runtime takes the definition by others; so does the importer.
_OPSETS = (23, 24)

#: What `qk_matmul_output` is.
_SCORES, _CAPPED, _MASKED, _WEIGHTS = range(4)


def attention(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Attention of fixed shapes, with or without a cache, whose mask ONNX Runtime takes."""
    sizes = _sizes(graph, node)
    if sizes is None:
        return None
    emit = Emitter(graph, node)
    query, keys, values = (
        _heads(emit, name, heads)
        for name, heads in zip(node.input[:3], (sizes.heads, sizes.kv_heads, sizes.kv_heads), strict=True)
    )
    if sizes.past:
        keys = emit("Concat", node.input[4], keys, axis=2)
        values = emit("Concat", node.input[5], values, axis=2)
    outputs = [*node.output, *[""] * (4 - len(node.output))]
    emit.bind(outputs[1], keys)
    emit.bind(outputs[2], values)
    keys, values = (_repeat(emit, value, sizes) for value in (keys, values))

    kind = helper.tensor_dtype_to_np_dtype(sizes.dtype)
    scale = attribute(node, "scale", 0.0) or 1 / np.sqrt(sizes.depth)
    scaled = emit("Mul", query, emit.constant(np.array(scale, kind)))
    stages = {_SCORES: (scores := emit("MatMul", scaled, emit("Transpose", keys, perm=[0, 1, 3, 2])))}
    cap = attribute(node, "softcap", 0.0)
    if cap > 0:
        limit = emit.constant(np.array(cap, kind))
        scores = emit("Mul", emit("Tanh", emit("Div", scores, limit)), limit)
    stages[_CAPPED] = scores
    bias = _Bias(emit, node, sizes)
    if bias.name:
        scores = emit("Add", scores, bias.name)
    stages[_MASKED] = scores
    precision = attribute(node, "softmax_precision", 0)
    if precision in _FLOATS and helper.tensor_dtype_to_np_dtype(precision).itemsize > kind.itemsize:
        weights = emit.cast(emit("Softmax", emit.cast(scores, precision), axis=-1), sizes.dtype)
    else:
        weights = emit("Softmax", scores, axis=-1)
    result = emit("MatMul", weights, values)
    blind, zero = bias.blind, emit.constant(np.array(0, kind))
    if len(sizes.query) == 3:
        result = emit("Transpose", result, perm=[0, 2, 1, 3])
        if blind:
            result = emit("Where", emit("Transpose", blind, perm=[0, 2, 1, 3]), zero, result)
        result = emit.reshape(result, (sizes.query[0], sizes.query[1], sizes.heads * sizes.width))
    elif blind:
        result = emit("Where", blind, zero, result)
    emit.bind(outputs[0], result)
    stages[_WEIGHTS] = emit("Where", blind, zero, weights) if blind and outputs[3] else weights
    emit.bind(outputs[3], stages[attribute(node, "qk_matmul_output_mode", 0)])
    return emit.made


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the shapes of an attention come to."""

    dtype: int
    query: Shape
    heads: int
    kv_heads: int
    depth: int
    width: int
    """Items of a key and of a value."""
    num_queries: int
    past: int
    total: int
    """Keys: those in the cache, and with those that are new."""
    mask: Shape


def _sizes(graph: Graph, node: NodeProto) -> _Sizes | None:
    """None where shapes are unknown, or ONNX Runtime does not take them."""
    inputs = [*node.input, *[""] * (7 - len(node.input))]
    shapes = {name: graph.shape(name) for name in inputs if name}
    dtype = graph.dtype(inputs[0])
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if graph.opset not in _OPSETS or dtype not in _FLOATS or len(known) != len(shapes) or 0 in known[inputs[0]]:
        return None
    if any(graph.dtype(name) != dtype for name in inputs[1:3]) or bool(inputs[4]) != bool(inputs[5]):
        return None
    query, keys, values = (known[name] for name in inputs[:3])
    if len(query) == 4:
        heads, kv_heads = query[1], keys[1]
        num_queries, num_keys, depth, width = query[2], keys[2], query[3], values[3]
    elif len(query) == 3:
        heads, kv_heads = attribute(node, "q_num_heads", 0), attribute(node, "kv_num_heads", 0)
        if not heads or not kv_heads:
            return None
        num_queries, num_keys, depth, width = query[1], keys[1], query[2] // heads, values[2] // kv_heads
    else:
        return None
    past = known[inputs[4]][2] if inputs[4] else 0
    mask = known[inputs[3]] if inputs[3] else ()
    fits = not mask or (2 <= len(mask) <= 4 and mask[-2:] == (num_queries, past + num_keys))
    if heads % kv_heads or not num_keys or not fits or (inputs[4] and inputs[6]):
        return None
    if inputs[3] and graph.dtype(inputs[3]) not in (dtype, TensorProto.BOOL):
        return None
    return _Sizes(dtype, query, heads, kv_heads, depth, width, num_queries, past, past + num_keys, mask)


def _heads(emit: Emitter, value: str, heads: int) -> str:
    """The value as [batch, heads, length, items]."""
    shape = emit.graph.shape(value)
    assert shape is not None
    if len(shape) == 4:
        return value
    batch, length, items = shape
    return str(emit("Transpose", emit.reshape(value, (batch, length, heads, items // heads)), perm=[0, 2, 1, 3]))


def _repeat(emit: Emitter, value: str, sizes: _Sizes) -> str:
    """Keys or values once for each head of queries that shares them."""
    times = sizes.heads // sizes.kv_heads
    if times == 1:
        return value
    batch, items = sizes.query[0], -1
    parts = emit.unsqueeze(value, 2)
    spread = emit("Expand", parts, emit.constant(np.array([1, 1, times, 1, 1], np.int64)))
    return emit.reshape(spread, (batch, sizes.heads, sizes.total, items))


class _Bias:
    """What is added to the scores. `name` is empty where nothing is; `blind` tells [batch or 1, heads or 1, queries, 1]
    which queries are left with no key, and is empty where each has some."""

    def __init__(self, emit: Emitter, node: NodeProto, sizes: _Sizes) -> None:
        graph = emit.graph
        self._emit, self._sizes = emit, sizes
        self._kind = helper.tensor_dtype_to_np_dtype(sizes.dtype)
        self._lowest = np.finfo(self._kind).min.astype(self._kind)
        self.name = self.blind = ""
        mask = node.input[3] if len(node.input) > 3 else ""
        lengths = node.input[6] if len(node.input) > 6 else ""
        causal = bool(attribute(node, "is_causal", 0))
        # How far the key at one place is ahead of the last that the query at another may look at.
        ahead = np.arange(sizes.total)[None, :] - np.arange(sizes.num_queries)[:, None]
        allowed = ahead <= sizes.past if causal and not lengths else None
        value = graph.constant(mask) if mask else None
        if lengths:
            self.name = self._mask_of(mask) if mask else ""
            self._exclude_by_lengths(lengths, ahead if causal else None)
        elif mask and value is None:
            self.name = self._mask_of(mask)
            if allowed is not None:
                lowest = emit.constant(self._lowest)
                self.name = emit("Where", emit.constant(allowed[None, None]), self.name, lowest)
            self.blind = self._left_with_nothing(self.name)
        elif value is not None or allowed is not None:
            self._be_constant(value, allowed)

    def _be_constant(self, mask: Array | None, allowed: Array | None) -> None:
        """What is known needs no asking."""
        bias = np.zeros((1, 1, 1, self._sizes.total), self._kind)
        if mask is not None:
            shape = (*[1] * (4 - mask.ndim), *mask.shape)
            bias = np.where(mask, 0, self._lowest) if mask.dtype == np.bool_ else mask
            bias = bias.astype(self._kind).reshape(shape)
        if allowed is not None:
            bias = np.where(allowed, bias, self._lowest)
        blind = (bias <= self._lowest).all(axis=-1, keepdims=True)
        self.name = self._emit.constant(bias)
        self.blind = self._emit.constant(blind) if blind.any() else ""

    def _mask_of(self, mask: str) -> str:
        """The mask as numbers of four dimensions."""
        emit, shape = self._emit, self._sizes.mask
        if emit.graph.dtype(mask) == TensorProto.BOOL:
            mask = emit("Where", mask, emit.constant(np.array(0, self._kind)), emit.constant(self._lowest))
        return mask if len(shape) == 4 else emit.reshape(mask, (*[1] * (4 - len(shape)), *shape))

    def _exclude_by_lengths(self, lengths: str, ahead: Array | None) -> None:
        """Only so many keys of each sample count; the last of them belongs to the last query."""
        emit, sizes = self._emit, self._sizes
        if emit.graph.constant(lengths) is None:
            require_within(emit, lengths, 0, sizes.total)
        counts = emit.reshape(lengths, (sizes.query[0], 1, 1, 1))
        allowed = emit("Less", emit.constant(np.arange(sizes.total, dtype=np.int64).reshape(1, 1, 1, -1)), counts)
        if ahead is not None:
            needed = emit.constant((ahead + sizes.num_queries).astype(np.int64)[None, None])
            allowed = emit("And", allowed, emit("LessOrEqual", needed, counts))
        name = self.name or emit.constant(np.array(0, self._kind))
        self.name = emit("Where", allowed, name, emit.constant(self._lowest))
        self.blind = self._left_with_nothing(self.name)

    def _left_with_nothing(self, bias: str) -> str:
        """Not by the largest item: one that is no number counts as a key."""
        emit = self._emit
        excluded = emit.cast(emit("LessOrEqual", bias, emit.constant(self._lowest)), TensorProto.FLOAT)
        all_of_them = emit("ReduceMin", excluded, emit.constant(np.array([-1], np.int64)), keepdims=1)
        return emit.cast(all_of_them, TensorProto.BOOL)
