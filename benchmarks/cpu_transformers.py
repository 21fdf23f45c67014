"""BERT-base and ViT-S/16 as ONNX graphs, the way exporters of today write them at opset 17."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.cpu_graph import Graph

#: BERT-base (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019): layers, size, heads, MLP.
_BERT_LAYERS, _BERT_SIZE, _BERT_HEADS, _BERT_INNER = 12, 768, 12, 3072
VOCABULARY, _POSITIONS, _TOKEN_TYPES = 30522, 512, 2
SEQUENCE = 128

#: ViT-S/16 (Touvron et al., "Training data-efficient image transformers", 2021, table 1; called DeiT-S there).
_VIT_LAYERS, _VIT_SIZE, _VIT_HEADS, _VIT_INNER, _PATCH = 12, 384, 6, 1536, 16
_IMAGE_SIZE, _NUM_CLASSES = 224, 1000

#: The most negative float: what exporters add to the scores of masked tokens.
_LOWEST = float(np.finfo(np.float32).min)


def bert_base(graph: Graph | None = None) -> onnx.ModelProto:
    """An encoder without a head: last_hidden_state and pooler_output. Batch and sequence are free.

    `graph` is an empty one that draws the weights.
    """
    graph = graph or Graph("bert_base", seed=6)
    free: list[int | str] = ["batch", "sequence"]
    ids = graph.input("input_ids", TensorProto.INT64, free)
    mask = graph.input("attention_mask", TensorProto.INT64, free)
    types = graph.input("token_type_ids", TensorProto.INT64, free)
    size, deviation = _BERT_SIZE, 1.1 / math.sqrt(_BERT_SIZE)

    words = graph.node("Gather", graph.tensor(graph.normal((VOCABULARY, size)), "word_embeddings"), ids, axis=0)
    kinds = graph.node("Gather", graph.tensor(graph.normal((_TOKEN_TYPES, size), 0.5)), types, axis=0)
    length = graph.node("Gather", graph.node("Shape", ids), graph.tensor(np.array(1)), axis=0)
    end = graph.node("Unsqueeze", length, graph.sizes(0))
    positions = graph.tensor(np.arange(_POSITIONS)[None])
    positions = graph.node("Slice", positions, graph.sizes(0), end, graph.sizes(1))
    places = graph.node("Gather", graph.tensor(graph.normal((_POSITIONS, size), 0.5)), positions, axis=0)
    hidden = graph.layer_norm(graph.node("Add", graph.node("Add", words, kinds), places), size, 1e-12)

    shown = graph.node("Cast", graph.node("Unsqueeze", mask, graph.sizes(1, 2)), to=TensorProto.FLOAT)
    penalty = graph.node("Mul", graph.node("Sub", graph.scalar(1.0), shown), graph.scalar(_LOWEST))

    for layer in range(_BERT_LAYERS):
        heads = []
        for permutation in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):  # queries, keys (transposed), values
            projected = graph.dense(hidden, size, size, deviation)
            split = graph.node("Reshape", projected, graph.sizes(0, 0, _BERT_HEADS, size // _BERT_HEADS))
            heads.append(graph.node("Transpose", split, perm=permutation))
        queries, keys, values = heads
        scores = graph.node("Div", graph.node("MatMul", queries, keys), graph.scalar(math.sqrt(size // _BERT_HEADS)))
        weights = graph.node("Softmax", graph.node("Add", scores, penalty), axis=-1)
        context = graph.node("Transpose", graph.node("MatMul", weights, values), perm=[0, 2, 1, 3])
        context = graph.node("Reshape", context, graph.sizes(0, 0, size))
        attended = graph.node("Add", graph.dense(context, size, size, deviation), hidden)
        hidden = graph.layer_norm(attended, size, 1e-12)
        inner = graph.gelu(graph.dense(hidden, size, _BERT_INNER, deviation))
        outer = graph.dense(inner, _BERT_INNER, size, deviation)
        last = "last_hidden_state" if layer == _BERT_LAYERS - 1 else ""
        hidden = graph.layer_norm(graph.node("Add", outer, hidden), size, 1e-12, last)

    first = graph.node("Gather", hidden, graph.tensor(np.array(0)), axis=1)
    weight, bias = graph.tensor(graph.normal((size, size), deviation)), graph.tensor(graph.normal((size,), 0.02))
    pooled = graph.node("Gemm", first, weight, bias, alpha=1.0, beta=1.0, transB=1)
    graph.node("Tanh", pooled, output="pooler_output")
    return graph.model({"last_hidden_state": ["batch", "sequence", size], "pooler_output": ["batch", size]})


def vit_s16() -> onnx.ModelProto:
    """Pre-norm blocks, queries, keys and values from one product, a class token, 224x224."""
    graph = Graph("vit_s16", seed=7)
    image = graph.image("image", _IMAGE_SIZE)
    size, deviation = _VIT_SIZE, 1 / math.sqrt(_VIT_SIZE)
    num_tokens = (_IMAGE_SIZE // _PATCH) ** 2 + 1
    head_size = size // _VIT_HEADS

    fan_in = 3 * _PATCH**2
    weight = graph.tensor(graph.normal((size, 3, _PATCH, _PATCH), 1 / math.sqrt(fan_in)))
    bias = graph.tensor(graph.normal((size,), 0.02))
    square: dict[str, Any] = {
        "kernel_shape": [_PATCH] * 2,
        "strides": [_PATCH] * 2,
        "pads": [0] * 4,
        "dilations": [1, 1],
        "group": 1,
    }
    patches = graph.node("Conv", image, weight, bias, **square)
    patches = graph.node("Transpose", graph.node("Reshape", patches, graph.sizes(0, size, -1)), perm=[0, 2, 1])
    batch = graph.node("Gather", graph.node("Shape", patches), graph.tensor(np.array(0)), axis=0)
    wanted = graph.node(
        "Concat", graph.node("Unsqueeze", batch, graph.sizes(0)), graph.sizes(1), graph.sizes(size), axis=0
    )
    token = graph.node("Expand", graph.tensor(graph.normal((1, 1, size))), wanted)
    tokens = graph.node("Concat", token, patches, axis=1)
    hidden = graph.node("Add", tokens, graph.tensor(graph.normal((1, num_tokens, size), 0.3)))

    for _ in range(_VIT_LAYERS):
        projected = graph.dense(graph.layer_norm(hidden, size, 1e-6), size, 3 * size, deviation)
        split = graph.node("Reshape", projected, graph.sizes(0, num_tokens, 3, _VIT_HEADS, head_size))
        parts = graph.node("Transpose", split, perm=[2, 0, 3, 1, 4])
        queries, keys, values = (graph.node("Gather", parts, graph.tensor(np.array(i)), axis=0) for i in range(3))
        scaled = graph.node("Mul", queries, graph.scalar(head_size**-0.5))
        scores = graph.node("MatMul", scaled, graph.node("Transpose", keys, perm=[0, 1, 3, 2]))
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), values)
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        context = graph.node("Reshape", context, graph.sizes(0, num_tokens, size))
        hidden = graph.node("Add", hidden, graph.dense(context, size, size, deviation))
        inner = graph.gelu(graph.dense(graph.layer_norm(hidden, size, 1e-6), size, _VIT_INNER, deviation))
        hidden = graph.node("Add", hidden, graph.dense(inner, _VIT_INNER, size, deviation))

    first = graph.node("Gather", graph.layer_norm(hidden, size, 1e-6), graph.tensor(np.array(0)), axis=1)
    head, bias = graph.tensor(graph.normal((_NUM_CLASSES, size), deviation)), graph.tensor(np.zeros(_NUM_CLASSES))
    graph.node("Gemm", first, head, bias, output="logits", alpha=1.0, beta=1.0, transB=1)
    return graph.model({"logits": ["batch", _NUM_CLASSES]})
