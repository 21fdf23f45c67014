"""An ONNX model taken apart and put together again, without its weights being copied on the way.

A model is read as protobuf's wire format (see `protobuf`). Its outline, which is all but the items of large
initializers, is small enough for the `onnx` package to parse and change; what was changed in it is then put in its
place among the file's own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.engines.protobuf import MAX_MESSAGE_BYTES, encoded, encoded_parts, fields

if TYPE_CHECKING:
    from onnx import ModelProto, OperatorSetIdProto

# Field numbers of ONNX's messages (part of the format).
_MODEL_GRAPH, _MODEL_IMPORTS, _MODEL_FUNCTIONS = 7, 8, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_OUTPUT = 1, 5, 12
_NODE_OPERATOR = 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_LOCATION = 1, 2, 8, 14
#: Tensors of more bytes are read without their items.
_MAX_TENSOR_BYTES = 4096
#: Names of the domain that ONNX's own operators are of.
STANDARD_DOMAINS = ("", "ai.onnx")


class TooLarge(Exception):
    """What was put together exceeds what a protobuf message may be."""


def outline_of(data: memoryview, operator: str) -> bytes | None:
    """The model without the items of large initializers; None where no node is of this operator (of any domain, in
    subgraphs and functions too). Raises Malformed."""
    # As it stands in the file. Nodes inside of subgraphs are bytes of the outer one.
    sought = b"".join(encoded(_NODE_OPERATOR, operator.encode()))
    found = False
    parts: list[bytes | memoryview] = []
    for number, value in fields(data):
        if number == _MODEL_GRAPH and isinstance(value, memoryview):
            graph: list[bytes | memoryview] = []
            for inner, item in fields(value):
                if inner == _GRAPH_NODE and isinstance(item, memoryview):
                    found = found or sought in bytes(item)
                if inner == _GRAPH_INITIALIZER and isinstance(item, memoryview) and len(item) > _MAX_TENSOR_BYTES:
                    graph += encoded(inner, _without_items(item))
                else:
                    graph += encoded(inner, item)
            parts += encoded(number, b"".join(graph))
            continue
        if number == _MODEL_FUNCTIONS and isinstance(value, memoryview):
            found = found or sought in bytes(value)
        parts += encoded(number, value)
    return b"".join(parts) if found else None


def _without_items(tensor: memoryview) -> bytes:
    """The same tensor, its items marked as lying elsewhere."""
    kept: list[bytes | memoryview] = []
    for number, value in fields(tensor):
        if number in (_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME):
            kept += encoded(number, value)
    return b"".join([*kept, *encoded(_TENSOR_LOCATION, 1)])  # 1: external


def parse(outline: bytes) -> ModelProto | None:
    """The outline as the `onnx` package has it; None for what is no model."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(outline)
    except DecodeError:
        return None


def assemble(data: memoryview, model: ModelProto, *, inlined: bool) -> bytes:
    """The file with the nodes and outputs of `model` in place of its own; where functions were inlined, with what is
    left of those, too. Raises TooLarge."""
    message: list[bytes | memoryview] = []
    for number, value in fields(data):
        if number == _MODEL_FUNCTIONS and inlined:
            continue
        if number != _MODEL_GRAPH or not isinstance(value, memoryview):
            message += encoded(number, value)
            continue
        graph = model.graph
        parts: list[bytes | memoryview] = []
        for node in graph.node:
            parts += encoded(_GRAPH_NODE, node.SerializeToString())
        for output in graph.output:
            parts += encoded(_GRAPH_OUTPUT, output.SerializeToString())
        for inner, item in fields(value):
            if inner not in (_GRAPH_NODE, _GRAPH_OUTPUT):
                parts += encoded(inner, item)
        message += encoded_parts(number, parts)
    if inlined:
        for function in model.functions:
            message += encoded(_MODEL_FUNCTIONS, function.SerializeToString())
        listed = {domain_of(entry) for entry in _imports_of(data)}
        for entry in model.opset_import:
            if domain_of(entry) not in listed:
                message += encoded(_MODEL_IMPORTS, entry.SerializeToString())
    if sum(map(len, message)) > MAX_MESSAGE_BYTES:
        raise TooLarge
    return b"".join(message)


def domain_of(entry: OperatorSetIdProto) -> str:
    """The domain of operators that a model imports, the standard one by one name."""
    return "" if entry.domain in STANDARD_DOMAINS else str(entry.domain)


def _imports_of(data: memoryview) -> list[Any]:
    import onnx

    return [
        onnx.OperatorSetIdProto.FromString(bytes(value))
        for number, value in fields(data)
        if number == _MODEL_IMPORTS and isinstance(value, memoryview)
    ]
