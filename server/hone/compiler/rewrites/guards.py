"""Conditions on values that only a run can tell: what ONNX Runtime answers with an error, and compiled code would not.

Compiled code checks nothing: it would read elsewhere in memory, or die of a division. So such operators are rewritten
to be harmless whatever comes, and what they need to be right becomes an extra output of the module, one number: 1 where
every condition held. Where it is 0 the engine hands out no result, and the baseline answers in its own words.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from hone.compiler.onnx_graph import Emitter, Graph

#: What the guard's value is called; the names of a model's own values are made different from it.
GUARD = "hone.guard"


def require(emit: Emitter, condition: str) -> None:
    """All items of a tensor of booleans must be true for the module's outputs to count."""
    graph = emit.graph
    shape = graph.shape(condition)
    number = emit.cast(condition, TensorProto.INT32)
    if shape == ():
        number = emit.reshape(number, [1])
    name = graph.fresh(GUARD)
    emit.made.append(helper.make_node("ReduceMin", [number], [name], keepdims=0))
    graph.guards.append(name)
    graph.model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, []))


def require_within(emit: Emitter, value: str, lowest: int, highest: int) -> None:
    """All items of a tensor of integers must be from `lowest` to `highest`, both included."""
    graph = emit.graph
    element = graph.dtype(value)
    if element is None:
        raise ValueError(f"the datatype of {value} is not known")
    dtype = helper.tensor_dtype_to_np_dtype(element)
    too_low = emit("Less", value, emit.constant(np.array(lowest, dtype)))
    too_high = emit("Greater", value, emit.constant(np.array(highest, dtype)))
    require(emit, emit("Not", emit("Or", too_low, too_high)))


def combine_guards(graph: Graph) -> bool:
    """Make one output, the last, of all conditions. False where there are none. To be done once, at the end."""
    if not graph.guards:
        return False
    form = graph.model.graph
    first, *rest = graph.guards
    nodes: list[NodeProto] = []
    product = first
    for name in rest:
        both = graph.fresh(GUARD)
        nodes.append(helper.make_node("Mul", [product, name], [both]))
        product = both
    outputs = [value for value in form.output if value.name not in graph.guards]
    kept = [type(value).FromString(value.SerializeToString()) for value in outputs]
    del form.output[:]
    form.output.extend([*kept, helper.make_tensor_value_info(product, TensorProto.INT32, [])])
    graph.guards = [product]
    graph.replace_nodes([*graph.nodes, *nodes])
    return True
