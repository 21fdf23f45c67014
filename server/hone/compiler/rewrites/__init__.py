"""Rewrites of ONNX graphs that make more models importable, one operator's in terms of others.

Each is a function of the graph and a node that gives the nodes to put in its place, or None to leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from onnx import NodeProto

from hone.compiler.onnx_graph import ONNX_DOMAINS, Graph, subgraphs
from hone.compiler.rewrites import (
    attention,
    control_flow,
    elementary,
    empty,
    patches,
    quantized,
    recurrent,
    resize,
    sequences,
    spectral,
)
from hone.compiler.rewrites.evaluate import fold

Rewrite = Callable[[Graph, NodeProto], list[NodeProto] | None]

REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "Attention": attention.attention,
        "Col2Im": patches.col2im,
        "Concat": empty.concat,
        "ConvInteger": quantized.conv_integer,
        "ConvTranspose": elementary.conv_transpose,
        "CumProd": sequences.cumulative_product,
        "DFT": spectral.dft,
        "DeformConv": patches.deform_conv,
        "DequantizeLinear": quantized.dequantize_linear,
        "Det": sequences.determinant,
        "Dropout": elementary.dropout,
        "EyeLike": elementary.eye_like,
        "GRU": recurrent.unroll,
        "If": control_flow.resolve_if,
        "IsInf": elementary.is_inf,
        "LSTM": recurrent.unroll,
        "Loop": control_flow.unroll_loop,
        "LpNormalization": elementary.lp_normalization,
        "MaxPool": patches.max_pool_with_indices,
        "MaxUnpool": patches.max_unpool,
        "Mod": elementary.modulo,
        "OneHot": elementary.one_hot,
        "Pow": elementary.power,
        "QLinearConv": quantized.qlinear_conv,
        "QLinearMatMul": quantized.qlinear_matmul,
        "RNN": recurrent.unroll,
        "ReduceMax": elementary.reduce_extreme,
        "ReduceMin": elementary.reduce_extreme,
        "Resize": resize.resize,
        "ReverseSequence": elementary.reverse_sequence,
        "STFT": spectral.stft,
        "Scan": control_flow.unroll_scan,
        "SpaceToDepth": elementary.space_to_depth,
        "Split": empty.split,
        "TensorScatter": sequences.tensor_scatter,
        "Tile": elementary.tile,
    }
)


#: Branches within branches, or loops: each level takes a sweep or two.
MAX_SWEEPS = 16


def rewrite(graph: Graph) -> bool:
    """Rewrite every node that has a rewrite. False where nothing was done."""
    nodes: list[NodeProto] = []
    changed = False
    for node in list(graph.nodes):
        rule = REWRITES.get(node.op_type) if node.domain in ONNX_DOMAINS else None
        replacement = rule(graph, node) if rule else None
        changed |= replacement is not None
        nodes.extend([node] if replacement is None else replacement)
    if changed:
        graph.replace_nodes(nodes)
    return changed


def resolve_control_flow(graph: Graph) -> None:
    """Decide, select and unroll what has branches and rounds, as far as shapes and constants tell."""
    for _ in range(MAX_SWEEPS):
        if not any(subgraphs(node) for node in graph.nodes):
            return
        folded = fold(graph)
        if not (rewrite(graph) or folded):
            return
