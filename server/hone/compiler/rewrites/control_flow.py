"""If, Loop and Scan without control flow: what is known before the run is decided, the rest computed both ways.

- An If whose condition does not depend on inputs becomes its branch. Otherwise both branches are computed and the
  answer is selected, where both give the same shapes: branches of served models are small or exclude each other by
  an input such as a sampling rate.
  A branch that cannot run at these shapes at all gives NaN: ONNX Runtime would refuse such a request.
- A Loop with a known number of rounds, and a Scan, are unrolled, up to `MAX_ROUNDS` rounds and `MAX_NODES` nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from hone.compiler.onnx_graph import Emitter, Graph, ancestors, attribute, subgraphs
from hone.compiler.rewrites.evaluate import Evaluator

MAX_ROUNDS = 128
MAX_NODES = 20_000

_FLOATS: dict[int | None, type[np.floating[Any]]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.DOUBLE: np.float64,
    TensorProto.FLOAT16: np.float16,
}


def resolve_if(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """The branch of a known condition, or both with a selection behind them."""
    then_branch, else_branch = attribute(node, "then_branch"), attribute(node, "else_branch")
    emit = Emitter(graph, node)
    evaluator = Evaluator(graph)
    condition = evaluator.value(node.input[0])
    if condition is not None:
        chosen = then_branch if condition.reshape(-1)[0] else else_branch
        for output, value in zip(node.output, instantiate(emit, chosen, ()), strict=True):
            emit.bind(output, value)
        return emit.made
    if not evaluator.depends_on_input(node.input[0]):
        return None  # shapes are missing yet: ONNX Runtime's folding may tell
    if not _is_bare(then_branch) or not _is_bare(else_branch):
        return _hoist(emit, then_branch, else_branch)
    return _select(emit, then_branch, else_branch)


def unroll_loop(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """The rounds of a Loop, one after another, where their number is known."""
    body = attribute(node, "body")
    evaluator = Evaluator(graph)
    rounds = evaluator.value(node.input[0]) if node.input[0] else np.array(MAX_ROUNDS + 1)
    condition = evaluator.value(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(True)
    if rounds is None or condition is None:
        return None
    limit = int(rounds.reshape(-1)[0])
    emit = Emitter(graph, node)
    state = list(node.input[2:])
    scanned: list[list[str]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    running = bool(condition.reshape(-1)[0])
    counter = 0
    while running and counter < limit:
        if counter == MAX_ROUNDS or len(emit.made) > MAX_NODES:
            return None
        known = [emit.constant(np.array(counter, np.int64)), emit.constant(np.array(True))]
        start = len(emit.made)
        outputs = instantiate(emit, body, [*known, *state])
        evaluator.add(emit.made[start:])
        decided = evaluator.value(outputs[0])
        if decided is None:
            return None
        running = bool(decided.reshape(-1)[0])
        state = outputs[1 : 1 + len(state)]
        for items, value in zip(scanned, outputs[1 + len(state) :], strict=True):
            items.append(emit.unsqueeze(value, 0))
        counter += 1
    if scanned and counter == 0:
        return None  # an empty output, whose shape nobody has told
    results = [*state, *(emit.concat(items, axis=0) for items in scanned)]
    for output, value in zip(node.output, results, strict=False):
        emit.bind(output, value)
    return emit.made


def unroll_scan(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """The rounds of a Scan (opset 9 and later), one after another."""
    if graph.opset < 9:
        return None
    body = attribute(node, "body")
    num_scanned = attribute(node, "num_scan_inputs")
    num_states = len(node.input) - num_scanned
    num_outputs = len(body.output) - num_states
    input_axes = attribute(node, "scan_input_axes") or [0] * num_scanned
    input_directions = attribute(node, "scan_input_directions") or [0] * num_scanned
    output_axes = attribute(node, "scan_output_axes") or [0] * num_outputs
    output_directions = attribute(node, "scan_output_directions") or [0] * num_outputs
    shapes = [graph.shape(name) for name in node.input[num_states:]]
    if any(shape is None for shape in shapes):
        return None
    rounds = {shape[axis] for shape, axis in zip(shapes, input_axes, strict=True) if shape is not None}
    if len(rounds) != 1 or not 1 <= (num_rounds := rounds.pop()) <= MAX_ROUNDS or any(axis < 0 for axis in output_axes):
        return None
    emit = Emitter(graph, node)
    state = list(node.input[:num_states])
    made: list[list[str]] = [[] for _ in range(num_outputs)]
    for number in range(num_rounds):
        if len(emit.made) > MAX_NODES:
            return None
        items = []
        for name, shape, axis, backwards in zip(
            node.input[num_states:], shapes, input_axes, input_directions, strict=True
        ):
            place = axis % len(shape or ())
            at = num_rounds - 1 - number if backwards else number
            items.append(emit.squeeze(emit.slice(name, place, at, at + 1), place))
        outputs = instantiate(emit, body, [*state, *items])
        state = outputs[:num_states]
        for values, value in zip(made, outputs[num_states:], strict=True):
            values.append(value)
    results = list(state)
    for values, axis, backwards in zip(made, output_axes, output_directions, strict=True):
        ordered = values[::-1] if backwards else values
        results.append(emit.concat([emit.unsqueeze(value, axis) for value in ordered], axis=axis))
    for output, value in zip(node.output, results, strict=False):
        emit.bind(output, value)
    return emit.made


def instantiate(emit: Emitter, body: GraphProto, inputs: Sequence[str]) -> list[str]:
    """Copy a subgraph's nodes into the graph under fresh names; gives the names of its outputs."""
    names = {value.name: given for value, given in zip(body.input, inputs, strict=True)}
    for tensor in body.initializer:
        names[tensor.name] = emit.constant(numpy_helper.to_array(tensor))
    for node in body.node:
        for output in node.output:
            if output:
                names[output] = emit.graph.fresh(output)
    emit.made.extend(_renamed(emit.graph, node, names) for node in body.node)
    return [names.get(value.name, value.name) for value in body.output]


def _renamed(graph: Graph, node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A copy of a node with names exchanged, also in its subgraphs, whose own names become fresh."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = ""  # names of nodes must differ, and one round is like the other
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for inner in subgraphs(copy):
        own = dict(names)
        for value in inner.input:
            own[value.name] = graph.fresh(value.name)
            value.name = own[value.name]
        for tensor in inner.initializer:
            own[tensor.name] = graph.fresh(tensor.name)
            tensor.name = own[tensor.name]
        for made in inner.node:
            own.update((output, graph.fresh(output)) for output in made.output if output)
        renamed = [_renamed(graph, made, own) for made in inner.node]
        del inner.node[:]
        inner.node.extend(renamed)
        for value in inner.output:
            value.name = own.get(value.name, value.name)
    return copy


def _is_bare(branch: GraphProto) -> bool:
    """Whether a branch only passes on what is computed outside."""
    return not branch.initializer and all(node.op_type == "Identity" for node in branch.node)


def _hoist(emit: Emitter, then_branch: GraphProto, else_branch: GraphProto) -> list[NodeProto]:
    """Compute both branches before the If, which only chooses from then on: so their types become known."""
    node = NodeProto()
    node.CopyFrom(emit.node)
    for branch, attribute_name in ((then_branch, "then_branch"), (else_branch, "else_branch")):
        values = instantiate(emit, branch, ())
        bare = GraphProto(name=attribute_name)
        for value, kind in zip(values, branch.output, strict=True):
            output = bare.output.add()
            output.CopyFrom(kind)
            output.name = emit.graph.fresh(value)
            # ONNX Runtime wants a node between a value from outside and the branch's output.
            bare.node.append(helper.make_node("Identity", [value], [output.name]))
        next(item for item in node.attribute if item.name == attribute_name).g.CopyFrom(bare)
    return [*emit.made, node]


def _select(emit: Emitter, then_branch: GraphProto, else_branch: GraphProto) -> list[NodeProto] | None:
    graph = emit.graph
    sources = {
        output: node.input[0] for branch in (then_branch, else_branch) for node in branch.node for output in node.output
    }
    pairs = [
        (sources.get(a.name, a.name), sources.get(b.name, b.name))
        for a, b in zip(then_branch.output, else_branch.output, strict=True)
    ]
    condition = emit.reshape(emit.node.input[0], ())
    results = []
    for a, b in pairs:
        if graph.shape(a) is not None and graph.shape(a) == graph.shape(b) and graph.dtype(a) == graph.dtype(b):
            results.append(emit("Where", condition, a, b) if a != b else a)
            continue
        valid = [name for name in (a, b) if graph.shape(name) is not None and _is_valid(graph, name)]
        other = b if valid == [a] else a
        if len(valid) != 1 or graph.dtype(valid[0]) not in _FLOATS or _is_valid(graph, other) is not False:
            return None
        nan = emit.constant(np.array(np.nan, _FLOATS[graph.dtype(valid[0])]))
        results.append(emit("Where", condition, *((a, nan) if valid == [a] else (nan, b))))
    for output, result in zip(emit.node.output, results, strict=True):
        emit.bind(output, result)
    return emit.made


def _is_valid(graph: Graph, name: str) -> bool | None:
    """Whether the nodes that make a value fit together at these shapes; None while control flow among them is open."""
    undecided: set[str] = set()
    nodes = []
    for node in ancestors(graph.nodes, [name]):
        if subgraphs(node) or not undecided.isdisjoint(node.input):
            undecided.update(node.output)
        else:
            nodes.append(node)
    form = graph.model.graph
    alone = ModelProto(ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    alone.graph.CopyFrom(GraphProto(name="alone", node=nodes, input=form.input, initializer=form.initializer))
    try:
        shape_inference.infer_shapes(alone, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        return False
    return None if undecided else True
