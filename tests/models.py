"""Small real ONNX models, made when a test needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

#: Datatype of the protocol -> ONNX element type.
ELEMENT_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}

Dims = Sequence[int | str | None]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[str, Dims]],
    outputs: dict[str, tuple[str, Dims]],
    initializers: Sequence[onnx.TensorProto] = (),
) -> bytes:
    def infos(specs: dict[str, tuple[str, Dims]]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], dims)
            for name, (datatype, dims) in specs.items()
        ]

    graph = helper.make_graph(nodes, "g", infos(inputs), infos(outputs), initializers)
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return built.SerializeToString()


def identity(datatype: str = "FP32", dims: Dims = ("batch", 4)) -> bytes:
    """OUT = IN."""
    return model([helper.make_node("Identity", ["IN"], ["OUT"])], {"IN": (datatype, dims)}, {"OUT": (datatype, dims)})


def add_sub(datatype: str = "FP32", dims: Dims = ("batch", 4)) -> bytes:
    """SUM = A + B, DIFFERENCE = A - B."""
    return model(
        [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFFERENCE"])],
        {"A": (datatype, dims), "B": (datatype, dims)},
        {"SUM": (datatype, dims), "DIFFERENCE": (datatype, dims)},
    )


def scale(factor: float, dims: Dims = ("batch", 4)) -> bytes:
    """OUT = factor * IN: tells versions apart."""
    constant = helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])
    return model(
        [helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
        {"IN": ("FP32", dims)},
        {"OUT": ("FP32", dims)},
        [constant],
    )


def slow(iterations: int, dims: Dims = ("batch", 4)) -> bytes:
    """OUT = IN, after a loop in the engine whose length sets how long it takes (about 1 µs an iteration)."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep_going"], ["keep_going_out"]),
            helper.make_node("Neg", ["value"], ["negated"]),
            helper.make_node("Neg", ["negated"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("keep_going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("keep_going_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, None),
        ],
    )
    count = helper.make_tensor("count", TensorProto.INT64, [], [iterations])
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    loop = helper.make_node("Loop", ["count", "true", "IN"], ["OUT"], body=body)
    return model([loop], {"IN": ("FP32", dims)}, {"OUT": ("FP32", dims)}, [count, true])


def write_model(repository: Path, name: str, onnx_bytes: bytes, *, config: str | None = None, version: int = 1) -> Path:
    """Put a model into a repository in Triton's layout, at once (written aside, then renamed). Returns its folder."""
    folder = repository / name
    target = folder / str(version)
    target.mkdir(parents=True, exist_ok=True)
    staged = target / ".model.onnx.tmp"
    staged.write_bytes(onnx_bytes)
    staged.rename(target / "model.onnx")
    if config is not None:
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder
