"""Rewrites of ONNX graphs that make more models importable, one operator's in terms of others.

Each is a function of the graph and a node that gives the nodes to put in its place, or None to leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import NodeProto

from hone.compiler.onnx_graph import ONNX_DOMAINS, Graph

Rewrite = Callable[[Graph, NodeProto], list[NodeProto] | None]

REWRITES: dict[str, Rewrite] = {}


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
