"""An ONNX graph's nodes as JSON for PyTorch, written as a PyTorch model would have them.

Exporters write a linear layer, GELU and attention as small operators. A model that is written for PyTorch calls
`linear`, `gelu` and `scaled_dot_product_attention`, which have kernels of their own: so does its side here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Node = dict[str, Any]


def graph_nodes(graph: Any) -> dict[str, Any]:
    """An onnx.GraphProto as `torch_graph.py` reads it."""
    from onnx import helper, numpy_helper

    nodes = [
        {
            "op": node.op_type,
            "inputs": list(node.input),
            "outputs": list(node.output),
            "attributes": _attributes({one.name: helper.get_attribute_value(one) for one in node.attribute}),
        }
        for node in graph.node
    ]
    # Only numbers are looked at: what is larger cannot be a scale.
    scalars = {
        one.name: float(numpy_helper.to_array(one).reshape(-1)[0])
        for one in graph.initializer
        if math.prod(one.dims) == 1
    }
    initializers = [one.name for one in graph.initializer]
    shapes = {one.name: tuple(one.dims) for one in graph.initializer}
    return {
        "outputs": [one.name for one in graph.output],
        "nodes": _Wholes(nodes, scalars, shapes, [one.name for one in graph.output]).found(),
        "initializers": initializers,
    }


def _attributes(told: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in told.items():
        if hasattr(value, "dims"):
            from onnx import numpy_helper

            array: np.ndarray[Any, Any] = numpy_helper.to_array(value)
            found |= {name: array.tolist(), "dtype": array.dtype.name}
        else:
            found[name] = (
                value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, list) else value
            )
    return found


class _Wholes:
    """Finds GELU, linear layers and attention among nodes whose values nobody else reads."""

    def __init__(
        self,
        nodes: list[Node],
        scalars: Mapping[str, float],
        shapes: Mapping[str, Sequence[int]],
        outputs: Sequence[str],
    ) -> None:
        self._nodes, self._scalars, self._shapes = nodes, scalars, shapes
        self._maker = {name: node for node in nodes for name in node["outputs"]}
        self._num_reads: dict[str, int] = {}
        for name in (*outputs, *(name for node in nodes for name in node["inputs"])):
            self._num_reads[name] = self._num_reads.get(name, 0) + 1

    def found(self) -> list[Node]:
        dropped: set[int] = set()
        replaced: dict[int, Node] = {}
        for node in self._nodes:
            for match in (self._gelu, self._linear, self._attention):
                if (whole := match(node)) is not None:
                    new, parts = whole
                    replaced[id(node)] = {**new, "outputs": node["outputs"]}
                    dropped |= {id(part) for part in parts}
                    break
        return [replaced.get(id(node), node) for node in self._nodes if id(node) not in dropped]

    def _gelu(self, node: Node) -> tuple[Node, list[Node]] | None:
        """x / sqrt(2), Erf, + 1, times x, times 0.5."""
        if node["op"] != "Mul" or (doubled := self._beside(node, 0.5, "Mul")) is None:
            return None
        for at in (0, 1):
            x, plus = doubled["inputs"][at], self._only(doubled["inputs"][1 - at], "Add")
            erf = self._beside(plus, 1.0, "Erf") if plus is not None else None
            scaled = self._only(erf["inputs"][0], "Div") if erf is not None else None
            if scaled is None or plus is None or erf is None or scaled["inputs"][0] != x:
                continue
            if math.isclose(self._scalars.get(scaled["inputs"][1], 0.0), math.sqrt(2), rel_tol=1e-5):
                return _node("Gelu", [x]), [doubled, plus, erf, scaled]
        return None

    def _linear(self, node: Node) -> tuple[Node, list[Node]] | None:
        if node["op"] != "Add":
            return None
        for at in (0, 1):
            bias, product = node["inputs"][at], self._only(node["inputs"][1 - at], "MatMul")
            if product is None or len(self._shapes.get(bias, ())) != 1:
                continue
            if len(self._shapes.get(product["inputs"][1], ())) == 2:
                return _node("Linear", [*product["inputs"], bias]), [product]
        return None

    def _attention(self, node: Node) -> tuple[Node, list[Node]] | None:
        """softmax(q k / scale + mask) v, the scale and the mask where there are any."""
        softmax = self._only(node["inputs"][0], "Softmax") if node["op"] == "MatMul" else None
        if softmax is None or softmax["attributes"].get("axis", -1) not in (-1, 3):
            return None
        parts, scores, scale = [softmax], softmax["inputs"][0], 1.0
        mask: list[str] = []
        if (added := self._only(scores, "Add")) is not None:
            for at in (0, 1):
                if self._only(added["inputs"][at], "Div", "Mul", "MatMul") is not None and not mask:
                    scores, mask = added["inputs"][at], [added["inputs"][1 - at]]
            if not mask:
                return None
            parts.append(added)
        scaled = self._only(scores, "Div", "Mul")
        if scaled is not None:
            number = self._scalars.get(scaled["inputs"][1])
            if not number:
                return None
            scale = number if scaled["op"] == "Mul" else 1.0 / number
            scores = scaled["inputs"][0]
            parts.append(scaled)
        product = self._only(scores, "MatMul")
        if product is None:
            return None
        whole = _node("SDPA", [*product["inputs"], node["inputs"][1], *mask], scale=scale)
        return whole, [*parts, product]

    def _only(self, name: str, *ops: str) -> Node | None:
        """Who makes a value that is read once."""
        made = self._maker.get(name)
        return made if made is not None and made["op"] in ops and self._num_reads[name] == 1 else None

    def _beside(self, node: Node, number: float, op: str) -> Node | None:
        """Who makes the other operand of an operation with this number."""
        for at in (0, 1):
            if math.isclose(self._scalars.get(node["inputs"][at], math.nan), number, rel_tol=1e-6):
                return self._only(node["inputs"][1 - at], op)
        return None


def _node(op: str, inputs: Sequence[str], **attributes: Any) -> Node:
    return {"op": op, "inputs": list(inputs), "outputs": [], "attributes": attributes}
