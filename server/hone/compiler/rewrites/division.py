"""Integer divisions, and shifts, by what a run brings.

A processor faults at a division by zero, and at that of the least integer by -1. ONNX Runtime answers the first with an
error, and the second as two's complement has it: the least integer, remainder zero.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require


class DividesByZero(Exception):
    """A division that no input makes right."""

    def __init__(self, operator: str) -> None:
        super().__init__(f"{operator}: divides integers by a constant zero")
        self.operator = operator


def guard_divisions(graph: Graph) -> None:
    """Make every integer Div and Mod safe to run, and require that no divisor is zero. To be done once, at the end.

    Raises DividesByZero.
    """
    nodes: list[NodeProto] = []
    for node in list(graph.nodes):
        made = _guarded(graph, node) if node.op_type in ("Div", "Mod") else None
        nodes.extend([node] if made is None else made)
    if len(nodes) != len(graph.nodes):
        graph.replace_nodes(nodes)


def hold_shifts(graph: Graph) -> None:
    """Make every BitShift right for distances of the type's width and more, and below zero: nothing is left then but,
    to the right, the sign. Compiled code minds some of the distance's digits only. To be done once, at the end."""
    nodes: list[NodeProto] = []
    for node in list(graph.nodes):
        made = _held(graph, node) if node.op_type == "BitShift" else None
        nodes.extend([node] if made is None else made)
    if len(nodes) != len(graph.nodes):
        graph.replace_nodes(nodes)


def _held(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Nodes in its place; None where every distance is known to be within the width."""
    element = graph.dtype(node.input[0])
    if element is None:
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element))
    width = dtype.itemsize * 8
    value, distance = node.input
    known = graph.constant(distance)
    if known is not None and np.all((known >= 0) & (known < width)):
        return None
    emit = Emitter(graph, node)
    longest = emit.constant(np.array(width - 1, dtype))
    beyond = emit("Greater", distance, longest)
    if dtype.kind == "i":
        beyond = emit("Or", beyond, emit("Less", distance, emit.constant(np.array(0, dtype))))
    held = emit("Where", beyond, longest, distance)
    if dtype.kind == "i" and attribute(node, "direction") == "RIGHT":  # the longest distance leaves the sign
        return [*emit.made, _copy(node, value, held, node.output[0])]
    shifted = graph.fresh(f"{node.output[0]}/shifted")
    emit.made.append(_copy(node, value, held, shifted))
    zero = emit.constant(np.array(0, dtype))
    emit.made.append(helper.make_node("Where", [beyond, zero, shifted], [node.output[0]]))
    return emit.made


def _guarded(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Nodes in its place; None where it is safe as it is."""
    element = graph.dtype(node.input[0])
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element)) if element is not None else None
    if dtype is None or dtype.kind not in "iu":
        return None
    dividend, divisor = node.input
    emit = Emitter(graph, node)
    one = np.array(1, dtype)
    known = graph.constant(divisor)
    if known is not None:
        if not np.all(known):
            raise DividesByZero(node.op_type)
        if dtype.kind == "u" or not np.any(known == -1):
            return None
        negates = emit.constant(known == -1)
        safe = emit.constant(np.where(known == -1, one, known))
    else:
        is_zero = emit("Equal", divisor, emit.constant(np.array(0, dtype)))
        require(emit, emit("Not", is_zero))
        if dtype.kind == "u":
            safe = emit("Where", is_zero, emit.constant(one), divisor)
            return [*emit.made, _copy(node, dividend, safe, node.output[0])]
        negates = emit("Equal", divisor, emit.constant(np.array(-1, dtype)))
        safe = emit("Where", emit("Or", is_zero, negates), emit.constant(one), divisor)
    if node.op_type == "Mod":  # by 1 as by -1 there is no remainder
        return [*emit.made, _copy(node, dividend, safe, node.output[0])]
    quotient = graph.fresh(f"{node.output[0]}/quotient")
    negative = emit("Sub", emit.constant(np.array(0, dtype)), dividend)
    emit.made.append(_copy(node, dividend, safe, quotient))
    emit.made.append(helper.make_node("Where", [negates, negative, quotient], [node.output[0]]))
    return emit.made


def _copy(node: NodeProto, dividend: str, divisor: str, output: str) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [dividend, divisor]
    copy.output[:] = [output]
    return copy
