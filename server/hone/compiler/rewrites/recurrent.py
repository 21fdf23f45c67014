"""LSTM, GRU and RNN as matrix products and element-wise operators, one step after another.

The products with the input are one product for all steps; what depends on the step before is unrolled. A longer
sequence than `MAX_STEPS` is left alone: code and compile time grow with the number of steps, and ONNX Runtime's own
loop is good at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from hone.compiler.onnx_graph import Emitter, Graph, attribute
from hone.compiler.rewrites.guards import require_within

MAX_STEPS = 128

#: Activations that need no parameters, by their name in lower case.
_ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu", "softsign": "Softsign", "softplus": "Softplus"}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_NUM_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class _Layer:
    """The sizes of one node."""

    steps: int
    batch: int
    size: int
    hidden: int


#: One step: (products of the input with all gates [batch, gates * hidden], state) -> new state, the output first.
_Step = Callable[[str, Sequence[str]], list[str]]


def unroll(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Rewrite an LSTM, GRU or RNN node, or leave it where it is longer than MAX_STEPS or of a rare kind."""
    gates = _NUM_GATES[node.op_type]
    batch_first = bool(attribute(node, "layout", 0))
    shape, recurrence = graph.shape(node.input[0]), graph.shape(node.input[2])
    if shape is None or recurrence is None or len(shape) != 3 or attribute(node, "input_forget", 0):
        return None
    steps, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    layer = _Layer(steps, batch, shape[2], recurrence[2])
    num_directions = recurrence[0]
    activations = _activations(node, num_directions)
    if activations is None or not 1 <= steps <= MAX_STEPS or batch < 1:
        return None

    emit = Emitter(graph, node)
    sequence = emit("Transpose", node.input[0], perm=[1, 0, 2]) if batch_first else node.input[0]
    given = [node.input[place] if len(node.input) > place else "" for place in range(8)]
    masks = _masks(emit, given[4], layer)
    states_given = given[5:7] if node.op_type == "LSTM" else given[5:6]
    outputs, lasts = [], []
    for direction in range(num_directions):
        reverse = direction == 1 or attribute(node, "direction", "forward") == "reverse"
        matrix = _Matrices(emit, layer, direction)
        step = _STEPS[node.op_type](emit, node, matrix, given, activations[direction])
        state = [_initial(emit, given_state, layer, direction, batch_first) for given_state in states_given]
        flat = emit.reshape(sequence, (layer.steps * layer.batch, layer.size))
        products = emit("MatMul", flat, matrix.transposed(given[1]))
        bias = _bias(matrix, given[3], node, gates)
        products = emit.reshape(emit("Add", products, bias) if bias else products, (layer.steps, layer.batch, -1))
        pieces = _split(emit, products, [1] * layer.steps, axis=0)
        made: dict[int, str] = {}
        order = range(layer.steps - 1, -1, -1) if reverse else range(layer.steps)
        for time in order:
            new = step(emit.squeeze(pieces[time], 0), state)
            output = new[0]
            if masks:
                new = [emit("Where", masks[time], fresh, old) for fresh, old in zip(new, state, strict=True)]
                output = emit("Where", masks[time], output, matrix.zero())
            state, made[time] = new, output
        outputs.append([made[time] for time in range(layer.steps)])
        lasts.append(state)
    _bind_outputs(emit, node, outputs, lasts, batch_first)
    return emit.made


def _bias(matrix: _Matrices, bias: str, node: NodeProto, gates: int) -> str:
    """What can be added before the steps: both halves of the bias, or the input's where the other is used inside."""
    if not bias:
        return ""
    if node.op_type == "GRU" and attribute(node, "linear_before_reset", 0):
        return matrix.gru_bias(bias)
    return matrix.bias_sum(bias, gates)


class _Matrices:
    """One direction's weights, cut and turned: in numpy where they are constants, by operators where not."""

    def __init__(self, emit: Emitter, layer: _Layer, direction: int) -> None:
        self._emit = emit
        self.layer = layer
        self._direction = direction
        self._zero = ""

    def transposed(self, name: str, start: int = 0, end: int | None = None) -> str:
        """Gates start to end of a weight [directions, gates * hidden, n], as [n, (end - start) * hidden]."""
        hidden = self.layer.hidden
        constant = self._emit.graph.constant(name)
        first, last = start * hidden, None if end is None else end * hidden
        if constant is not None:
            return self._emit.constant(constant[self._direction, first:last].T)
        one = self._row(name)
        if start or end is not None:
            shape = self._emit.graph.shape(name)
            one = self._emit.slice(one, 0, first, shape[1] if last is None and shape else int(last or 0))
        return str(self._emit("Transpose", one, perm=[1, 0]))

    def vector(self, name: str, start: int, end: int) -> str:
        """Gates start to end of a bias or peephole [directions, n * hidden]."""
        hidden = self.layer.hidden
        constant = self._emit.graph.constant(name)
        if constant is not None:
            return self._emit.constant(constant[self._direction, start * hidden : end * hidden])
        return self._emit.slice(self._row(name), 0, start * hidden, end * hidden)

    def bias_sum(self, name: str, gates: int) -> str:
        constant = self._emit.graph.constant(name)
        hidden = self.layer.hidden
        if constant is not None:
            row = constant[self._direction]
            return self._emit.constant(row[: gates * hidden] + row[gates * hidden :])
        return str(self._emit("Add", self.vector(name, 0, gates), self.vector(name, gates, 2 * gates)))

    def gru_bias(self, name: str) -> str:
        """Both halves for the gates z and r, the input's half alone for h: the other is added before the reset."""
        constant = self._emit.graph.constant(name)
        hidden = self.layer.hidden
        if constant is not None:
            row = constant[self._direction].copy()
            row[: 2 * hidden] += row[3 * hidden : 5 * hidden]
            return self._emit.constant(row[: 3 * hidden])
        both = self._emit("Add", self.vector(name, 0, 2), self.vector(name, 3, 5))
        return self._emit.concat([both, self.vector(name, 2, 3)], axis=0)

    def zero(self) -> str:
        """A scalar zero of the state's type."""
        if not self._zero:
            emit = self._emit
            dtype = emit.graph.dtype(emit.node.input[0])
            self._zero = emit.constant(np.zeros((), _numpy_dtype(dtype)))
        return self._zero

    def _row(self, name: str) -> str:
        return self._emit.squeeze(self._emit.slice(name, 0, self._direction, self._direction + 1), 0)


def _lstm(emit: Emitter, node: NodeProto, matrix: _Matrices, given: Sequence[str], functions: Sequence[str]) -> _Step:
    recurrent = matrix.transposed(given[2])
    peepholes = [matrix.vector(given[7], gate, gate + 1) for gate in range(3)] if given[7] else None
    f, g, h = functions

    def step(product: str, state: Sequence[str]) -> list[str]:
        hidden, cell = state
        gates = emit("Add", product, emit("MatMul", hidden, recurrent))
        i, o, forget, c = _split(emit, gates, [matrix.layer.hidden] * 4, axis=1)
        if peepholes:
            i = emit("Add", i, emit("Mul", peepholes[0], cell))
            forget = emit("Add", forget, emit("Mul", peepholes[2], cell))
        i, forget, c = emit(f, _clip(emit, i)), emit(f, _clip(emit, forget)), emit(g, _clip(emit, c))
        cell = emit("Add", emit("Mul", forget, cell), emit("Mul", i, c))
        if peepholes:
            o = emit("Add", o, emit("Mul", peepholes[1], cell))
        o = emit(f, _clip(emit, o))
        return [emit("Mul", o, emit(h, cell)), cell]

    return step


def _gru(emit: Emitter, node: NodeProto, matrix: _Matrices, given: Sequence[str], functions: Sequence[str]) -> _Step:
    hidden_size = matrix.layer.hidden
    gates_zr = matrix.transposed(given[2], 0, 2)
    gate_h = matrix.transposed(given[2], 2, 3)
    reset_after = bool(attribute(node, "linear_before_reset", 0))
    bias_h = matrix.vector(given[3], 5, 6) if reset_after and given[3] else ""
    f, g = functions
    one = emit.constant(np.ones((), _numpy_dtype(emit.graph.dtype(node.input[0]))))

    def step(product: str, state: Sequence[str]) -> list[str]:
        (hidden,) = state
        product_zr, product_h = _split(emit, product, [2 * hidden_size, hidden_size], axis=1)
        zr = emit(f, _clip(emit, emit("Add", product_zr, emit("MatMul", hidden, gates_zr))))
        z, r = _split(emit, zr, [hidden_size, hidden_size], axis=1)
        if reset_after:
            inner = emit("MatMul", hidden, gate_h)
            inner = emit("Mul", r, emit("Add", inner, bias_h) if bias_h else inner)
        else:
            inner = emit("MatMul", emit("Mul", r, hidden), gate_h)
        candidate = emit(g, _clip(emit, emit("Add", product_h, inner)))
        keep = emit("Mul", z, hidden)
        return [emit("Add", emit("Mul", emit("Sub", one, z), candidate), keep)]

    return step


def _rnn(emit: Emitter, node: NodeProto, matrix: _Matrices, given: Sequence[str], functions: Sequence[str]) -> _Step:
    recurrent = matrix.transposed(given[2])

    def step(product: str, state: Sequence[str]) -> list[str]:
        return [emit(functions[0], _clip(emit, emit("Add", product, emit("MatMul", state[0], recurrent))))]

    return step


_STEPS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


def _activations(node: NodeProto, num_directions: int) -> list[list[str]] | None:
    """ONNX operators of the activations for each direction; None where one has parameters."""
    defaults = _DEFAULTS[node.op_type]
    names = attribute(node, "activations", defaults * num_directions)
    found = [_ACTIVATIONS.get(name.lower()) for name in names]
    if len(found) != len(defaults) * num_directions or None in found:
        return None
    width = len(defaults)
    return [[str(name) for name in found[place : place + width]] for place in range(0, len(found), width)]


def _masks(emit: Emitter, lengths: str, layer: _Layer) -> list[str]:
    """For each step, which sequences of the batch [batch, 1] still run; nothing where all run to the end."""
    if not lengths:
        return []
    constant = emit.graph.constant(lengths)
    if constant is not None and (constant >= layer.steps).all():
        return []
    if constant is None:
        require_within(emit, lengths, 0, layer.steps)
    column = emit.unsqueeze(lengths, 1)
    return [emit("Less", emit.constant(np.array([[time]], np.int32)), column) for time in range(layer.steps)]


def _initial(emit: Emitter, given: str, layer: _Layer, direction: int, batch_first: bool) -> str:
    """The state before the first step [batch, hidden]."""
    if not given:
        dtype = _numpy_dtype(emit.graph.dtype(emit.node.input[0]))
        return emit.constant(np.zeros((layer.batch, layer.hidden), dtype))
    axis = 1 if batch_first else 0
    return emit.squeeze(emit.slice(given, axis, direction, direction + 1), axis)


def _bind_outputs(
    emit: Emitter, node: NodeProto, outputs: list[list[str]], lasts: list[list[str]], batch_first: bool
) -> None:
    """Y [steps, directions, batch, hidden], Y_h and Y_c [directions, batch, hidden]; with the batch first, if asked."""
    wanted = [node.output[place] if len(node.output) > place else "" for place in range(3)]
    time_axis, direction_axis = (1, 2) if batch_first else (0, 1)
    if wanted[0]:
        directions = []
        for steps in outputs:
            stacked = emit.concat([emit.unsqueeze(step, time_axis) for step in steps], axis=time_axis)
            directions.append(emit.unsqueeze(stacked, direction_axis))
        emit.bind(wanted[0], emit.concat(directions, axis=direction_axis))
    axis = 1 if batch_first else 0
    for place, name in enumerate(wanted[1:]):
        if name:
            emit.bind(name, emit.concat([emit.unsqueeze(state[place], axis) for state in lasts], axis=axis))


def _split(emit: Emitter, value: str, sizes: Sequence[int], axis: int) -> list[str]:
    if len(sizes) == 1:
        return [value]
    if emit.graph.opset < 13:
        return list(emit("Split", value, outputs=len(sizes), axis=axis, split=list(sizes)))
    return list(emit("Split", value, emit.constant(np.array(sizes, np.int64)), outputs=len(sizes), axis=axis))


def _clip(emit: Emitter, value: str) -> str:
    limit = attribute(emit.node, "clip")
    if not limit:
        return value
    if emit.graph.opset < 11:
        return str(emit("Clip", value, min=-limit, max=limit))
    dtype = _numpy_dtype(emit.graph.dtype(emit.node.input[0]))
    low, high = (emit.constant(np.array(bound, dtype)) for bound in (-limit, limit))
    return str(emit("Clip", value, low, high))


def _numpy_dtype(dtype: int | None) -> np.dtype[Any]:
    return np.dtype({10: np.float16, 11: np.float64}.get(dtype or 1, np.float32))
