"""From a model file to a graph with fixed shapes, simplified by ONNX Runtime and written in a recent opset.

ONNX Runtime's *basic* level computes what does not depend on inputs (shape arithmetic, mostly, once the inputs'
shapes are fixed), drops what does nothing, and folds batch normalizations into convolutions. It keeps to standard
operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx.inliner
import onnx.shape_inference
import onnx.version_converter
from onnx import ModelProto, helper

from hone.compiler import baseline
from hone.compiler.build import BuildFailed, is_of_the_machine
from hone.compiler.onnx_graph import Graph, opset_of, subgraphs
from hone.types import Shape

#: The oldest opset whose operators the importer knows by their present meaning (Softmax's axis, Squeeze's axes, …).
OLDEST_OPSET = 13

#: A protobuf message cannot be larger than 2 GiB; from here on weights travel in a file beside it.
_MAX_MESSAGE_BYTES = 1 << 30

#: Since IR version 4 an initializer need not be listed as an input.
_IR_WITHOUT_LISTED_INITIALIZERS = 4


#: Where ONNX Runtime's explanations name an operator.
_NAMED = re.compile(r"(?:implementation for |kernel for |Op \()(\w+)")


class CannotSimplify(Exception):
    """The model, at these shapes, is not one that ONNX or ONNX Runtime can follow; the text says why."""

    def __init__(self, reason: str, operator: str = "") -> None:
        super().__init__(reason)
        self.operator = operator


def load_with_shapes(path: Path, shapes: Mapping[str, Shape]) -> Graph:
    """Read a model, give its inputs these shapes. Raises CannotSimplify naming an input that has none, OSError,
    BuildFailed where memory is short."""
    try:
        model = onnx.load(path)
    except OSError:
        raise
    except Exception as problem:  # protobuf's errors have no common root below Exception
        _raise_the_machines(problem)
        raise CannotSimplify(f"not an ONNX file: {first_line(problem)}") from problem
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    unknown = sorted(set(shapes) - {value.name for value in inputs})
    if unknown:
        raise CannotSimplify(f"the model has no input {', '.join(unknown)}")
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise CannotSimplify(f"input {value.name} is no tensor")
        shape = shapes.get(value.name)
        if shape is None:
            dims = value.type.tensor_type.shape.dim
            if not value.type.tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in dims):
                raise CannotSimplify(f"input {value.name} has no fixed shape")
        else:
            value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, shape))
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    model.ir_version = max(model.ir_version, _IR_WITHOUT_LISTED_INITIALIZERS)
    return Graph(model, [value.name for value in inputs])


def simplify(graph: Graph, *, with_weights: bool) -> None:
    """Let ONNX Runtime fold and tidy the graph. Raises CannotSimplify with its reason, BuildFailed where the machine's
    memory is to blame.

    With weights it also folds them (batch normalizations, transposed matrices); later passes need not repeat that.
    """
    model = graph.attached() if with_weights else graph.model
    large = with_weights and sum(array.nbytes for array in graph.weights.values()) > _MAX_MESSAGE_BYTES
    try:
        result = baseline.simplified(model, external_weights=large)
    except OSError:
        raise
    except Exception as problem:  # its exceptions have no common root below Exception
        _raise_the_machines(problem)
        named = _NAMED.search(str(problem))
        raise CannotSimplify(f"ONNX Runtime: {first_line(problem)}", named.group(1) if named else "") from problem
    _drop_unused_domains(result)
    graph.replace_model(result)


def raise_opset(graph: Graph) -> None:
    """Rewrite a model of an old opset in a newer one, by ONNX's own converter. Raises CannotSimplify."""
    if graph.opset >= OLDEST_OPSET:
        return
    old = graph.opset
    try:
        converted = onnx.version_converter.convert_version(graph.model, OLDEST_OPSET)
    except Exception as problem:  # a C++ assertion comes as RuntimeError, others as ConvertError
        _raise_the_machines(problem)
        raise CannotSimplify(f"opset {old} cannot be converted to {OLDEST_OPSET}: {first_line(problem)}") from problem
    before = {value.name: value.type.SerializeToString(deterministic=True) for value in graph.model.graph.input}
    after = {value.name: value.type.SerializeToString(deterministic=True) for value in converted.graph.input}
    if any(after.get(name) != kind for name, kind in before.items()):  # it drops the batch of an old Scan's inputs
        raise CannotSimplify(f"opset {old} cannot be converted to {OLDEST_OPSET} with the same inputs")
    graph.replace_model(converted)


def inline_functions(graph: Graph, operators: set[str]) -> bool:
    """Put the definition that ONNX itself gives in place of such operators. False where there was nothing to do."""
    wanted = [("", node.op_type) for node in graph.nodes if node.op_type in operators and not node.domain]
    if not wanted:
        return False
    try:
        # Some definitions depend on the types of values inside the graph.
        typed = onnx.shape_inference.infer_shapes(graph.model, data_prop=True)
        model = onnx.inliner.inline_selected_functions(typed, sorted(set(wanted)), inline_schema_functions=True)
    except Exception as problem:
        _raise_the_machines(problem)
        raise CannotSimplify(f"functions cannot be inlined: {first_line(problem)}") from problem
    if [node.op_type for node in model.graph.node] == [node.op_type for node in graph.nodes]:
        return False
    graph.replace_model(model)
    return True


def first_line(problem: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


def _raise_the_machines(problem: Exception) -> None:
    """Raises BuildFailed where not the model is to blame, but what was free on the machine."""
    if is_of_the_machine(problem):
        raise BuildFailed("importing", problem) from problem


def _drop_unused_domains(model: ModelProto) -> None:
    """ONNX Runtime lists every domain it knows; what the nodes do not use would only confuse converters."""
    used = {node.domain for node in model.graph.node}
    for node in model.graph.node:
        for inner in subgraphs(node):
            used |= {other.domain for other in inner.node}
    opset = opset_of(model)
    kept = [entry for entry in model.opset_import if entry.domain in used and entry.domain not in ("", "ai.onnx")]
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", opset), *kept])
