"""What a value is, where it does not depend on inputs: shape arithmetic and the conditions and counts made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from onnx import NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from hone.compiler.onnx_graph import ONNX_DOMAINS, Graph, attribute, subgraphs
from hone.types import Array

#: Larger tensors are no shape arithmetic; they are not worth evaluating here.
_MAX_ITEMS = 1024

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


def fold(graph: Graph) -> bool:
    """Put constants in place of nodes that only do shape arithmetic. False where there are none.

    ONNX Runtime does so too, but refuses a model whose branches do not fit the shapes before it has chosen among them.
    """
    evaluator = Evaluator(graph)
    nodes = []
    changed = False
    for node in list(graph.nodes):
        value = None
        if node.op_type not in ("Constant", "Identity") and len(node.output) == 1 and node.output[0]:
            value = evaluator.value(node.output[0])
        if value is None:
            nodes.append(node)
        else:
            changed = True
            nodes.append(helper.make_node("Constant", [], list(node.output), value=numpy_helper.from_array(value)))
    if changed:
        graph.replace_nodes(nodes)
    return changed


class Evaluator:
    """Evaluates single values of a graph, going back from them as far as needed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._makers: dict[str, NodeProto] = {}
        self._values: dict[str, Array | None] = {}
        self.add(graph.nodes)

    def add(self, nodes: Iterable[NodeProto]) -> None:
        """Know these nodes, too, which are not in the graph yet."""
        self._makers.update((name, node) for node in nodes for name in node.output if name)

    def value(self, name: str) -> Array | None:
        """The value, None where it depends on inputs or is out of reach (too large, unknown shapes or operators)."""
        pending = [name]
        while pending:
            current = pending[-1]
            missing = [] if current in self._values else self._missing(current)
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self._values:
                self._values[current] = self._evaluate(current)
        return self._values[name]

    def depends_on_input(self, name: str) -> bool:
        """Whether the value is made from what is in an input, and not from shapes and constants alone."""
        pending, seen = [name], {name}
        while pending:
            current = pending.pop()
            if current in self._graph.input_names:
                return True
            maker = self._makers.get(current)
            if maker is None or maker.op_type in ("Shape", "Size"):
                continue
            fresh = [item for item in maker.input if item and item not in seen]
            seen.update(fresh)
            pending.extend(fresh)
        return False

    def _missing(self, name: str) -> list[str]:
        """Values to know first."""
        maker = self._makers.get(name)
        if maker is None or self._graph.constant(name) is not None or maker.op_type in ("Shape", "Size"):
            return []
        # One unknown input settles it; the rest need not be looked at.
        unknown = [item for item in maker.input if item and item not in self._values]
        if any(item in self._values and self._values[item] is None for item in maker.input if item):
            return []
        return unknown[:1]

    def _evaluate(self, name: str) -> Array | None:
        constant = self._graph.constant(name)
        if constant is not None:
            return constant if constant.size <= _MAX_ITEMS else None
        maker = self._makers.get(name)
        if maker is None or maker.domain not in ONNX_DOMAINS or maker.op_type in _RANDOM or subgraphs(maker):
            return None
        if maker.op_type in ("Shape", "Size"):
            return self._shape(maker)
        inputs = {item: self._values.get(item) for item in maker.input if item}
        if any(value is None for value in inputs.values()):
            return None
        return self._run(maker, name, inputs)  # type: ignore[arg-type]

    def _shape(self, node: NodeProto) -> Array | None:
        shape = self._graph.shape(node.input[0])
        if shape is None:
            known = self._values.get(node.input[0])
            if known is None:
                return None
            shape = known.shape
        if node.op_type == "Size":
            return np.array(np.prod(shape, dtype=np.int64))
        return np.array(shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))], np.int64)

    def _run(self, node: NodeProto, name: str, inputs: dict[str, Array]) -> Array | None:
        values = [
            helper.make_tensor_value_info(item, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for item, array in inputs.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name)]
        model = helper.make_model(
            helper.make_graph([node], "one", values, outputs),
            opset_imports=[helper.make_opsetid("", self._graph.opset)],
        )
        try:
            result: Any = ReferenceEvaluator(model).run(None, inputs)
        except Exception:  # an operator that the reference does not know, or a node that is wrong: not known then
            return None
        array = np.asarray(result[0])
        return array if array.size <= _MAX_ITEMS and array.dtype.kind not in "OSU" else None
