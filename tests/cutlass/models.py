"""Small nets of every kind that a compiler for GPUs must get right, as ONNX files, with ONNX Runtime's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from benchmarks import cpu_transformers
from benchmarks.cpu_convnets import repvgg_a0
from benchmarks.cpu_graph import Graph

IMAGE_SIZE = 32


@dataclass(frozen=True)
class SmallModel:
    path: Path
    inputs: dict[str, np.ndarray]
    outputs: list[np.ndarray]
    """ONNX Runtime's, in float32."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.inputs.items()}


def saved(proto: onnx.ModelProto, folder: Path, batch: int = 2, **inputs: Any) -> SmallModel:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    rng = np.random.default_rng(1)
    values = dict(inputs)
    for value in proto.graph.input:
        if value.name not in values:
            shape = [dim.dim_value or batch for dim in value.type.tensor_type.shape.dim]
            values[value.name] = rng.standard_normal(shape, np.float32)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return SmallModel(path, values, session.run(None, values))


def resnet18(folder: Path) -> SmallModel:
    graph = Graph("resnet18", seed=21)
    current = graph.activation(graph.convolution(graph.image("image", IMAGE_SIZE), 64, 7, stride=2), "Relu")
    current = pooled(graph, current)
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = graph.activation(graph.convolution(current, width, 3, stride=stride), "Relu")
            inner = graph.convolution(inner, width, 3, gain=0.5)
            shortcut = graph.convolution(current, width, 1, stride=stride) if width != channels else current
            current = graph.activation(graph.add(shortcut, inner), "Relu")
            channels = width
    graph.linear(graph.average_pool(current), 1000, "logits")
    return saved(graph.model({"logits": ["batch", 1000]}), folder, batch=1)


def repvgg(folder: Path) -> SmallModel:
    """RepVGG-A0 itself, for smaller pictures."""
    proto = repvgg_a0()
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_value = IMAGE_SIZE
    return saved(proto, folder, batch=1)


def bert_block(folder: Path, monkeypatch: Any) -> SmallModel:
    sizes = {"_BERT_LAYERS": 1, "_BERT_SIZE": 64, "_BERT_HEADS": 4, "_BERT_INNER": 128, "VOCABULARY": 50}
    for name, size in sizes.items():
        monkeypatch.setattr(cpu_transformers, name, size)
    rng = np.random.default_rng(2)
    shape = (2, 16)
    mask = np.ones(shape, np.int64)
    mask[1, 11:] = 0
    ids = rng.integers(0, 50, shape)
    return saved(
        cpu_transformers.bert_base(),
        folder,
        input_ids=ids,
        attention_mask=mask,
        token_type_ids=np.zeros(shape, np.int64),
    )


def odd_channels(folder: Path) -> SmallModel:
    """Nothing is a multiple of eight: 3, 20, 30 channels, ten classes; with a residual and a pooling between."""
    graph = Graph("odd", seed=22)
    current = graph.activation(graph.convolution(graph.image("image", 16), 20, 3, stride=2), "Relu")
    inner = graph.convolution(graph.activation(graph.convolution(current, 20, 3), "Relu"), 20, 3)
    current = graph.activation(graph.add(inner, current), "Relu")
    current = pooled(graph, graph.activation(graph.convolution(current, 30, 3), "Relu"))
    graph.linear(graph.average_pool(current), 10, "logits")
    return saved(graph.model({"logits": ["batch", 10]}), folder)


def back_to_back(folder: Path) -> SmallModel:
    """3x3 then 1x1, as in RepVGG with deepened stages; and two products."""
    graph = Graph("pairs", seed=23)
    current = graph.activation(graph.convolution(graph.image("image", 16), 32, 3, stride=2), "Relu")
    current = graph.activation(graph.convolution(current, 32, 3), "Relu")
    current = pooled(graph, graph.activation(graph.convolution(current, 64, 1), "Relu"))
    hidden = graph.linear(graph.average_pool(current), 32)
    graph.moments[hidden] = (np.zeros(32), np.ones(32))
    graph.linear(graph.activation(hidden, "Relu"), 16, "logits")
    return saved(graph.model({"logits": ["batch", 16]}), folder)


def features(folder: Path) -> SmallModel:
    """A convolution whose channels are averaged over each image."""
    graph = Graph("features", seed=24)
    current = graph.activation(graph.convolution(graph.image("image", 8), 24, 3), "Relu")
    graph.linear(graph.average_pool(current), 8, "logits")
    return saved(graph.model({"logits": ["batch", 8]}), folder)


def quantized(folder: Path) -> SmallModel:
    """Two convolutions whose data and weights go through int8, as QDQ models have them."""
    rng = np.random.default_rng(3)
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (float[2, 16, 8, 8] image) => (float[2, 32, 4, 4] result) {
            xq = QuantizeLinear(image, sx, z)
            x = DequantizeLinear(xq, sx, z)
            w = DequantizeLinear(wq, sw, zw)
            a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w, b)
            r = Relu(a)
            rq = QuantizeLinear(r, sr, z)
            y = DequantizeLinear(rq, sr, z)
            v = DequantizeLinear(vq, sv, z)
            result = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(y, v)
        }"""
    )
    tensors = {
        "sx": np.float32(0.02),
        "sr": np.float32(0.05),
        "sv": np.float32(0.01),
        "sw": rng.uniform(0.005, 0.02, 32).astype(np.float32),
        "z": np.int8(0),
        "zw": np.zeros(32, np.int8),
        "wq": rng.integers(-127, 128, (32, 16, 3, 3), np.int8),
        "vq": rng.integers(-127, 128, (32, 32, 3, 3), np.int8),
        "b": rng.standard_normal(32, np.float32),
    }
    for name, array in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and "zw" in node.input:
            node.attribute.append(helper.make_attribute("axis", 0))
    return saved(proto, folder)


def pooled(graph: Graph, data: str) -> str:
    """A maximum over windows of two by two, whose moments are near enough those of its data."""
    output = graph.node("MaxPool", data, kernel_shape=[2, 2], strides=[2, 2])
    graph.moments[output] = graph.moments[data]
    return output


def activated(folder: Path, text: str, opset: int = 20) -> SmallModel:
    """A product with a bias and what the text makes of its result `h` [6, 24] into `y`."""
    rng = np.random.default_rng(4)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": {opset}]>
        net (float[6, 16] x, float[6, 24] z) => (float[6, 24] y) {{
            p = MatMul(x, w)
            h = Add(p, b)
            {text}
        }}"""
    )
    tensors = {"w": rng.standard_normal((16, 24)) / 4, "b": rng.standard_normal(24), "c": rng.standard_normal((6, 1))}
    for name, number in (("half", 0.5), ("three", 3.0), ("one", 1.0), ("k", 0.044715), ("s", 0.7978846)):
        tensors[name] = np.float32(number)
    for name, array in tensors.items():
        if any(name in node.input for node in proto.graph.node):
            tensor = onnx.numpy_helper.from_array(np.asarray(array, np.float32), name)
            proto.graph.initializer.append(tensor)
    return saved(proto, folder)
