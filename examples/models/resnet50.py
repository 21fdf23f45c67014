"""Builds the demo model `resnet50`: ResNet-50 v1.5 with random weights, for load and speed rather than for answers.

It is too large to keep in git, so `make setup` builds it. The same seed gives the same weights on the same numpy.

    .venv/bin/python examples/models/resnet50.py
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx

ROOT = Path(__file__).resolve().parents[2]
SEED = 50
# (blocks, channels inside a block); a block gives out four times as many. Every stage but the first halves the picture.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4
NUM_CLASSES = 1000
MIN_BYTES = 100_000_000

CONFIG = """\
name: "resnet50"
backend: "onnxruntime"
max_batch_size: 8
input [
  {
    name: "image"
    data_type: TYPE_FP32
    dims: [ 3, 224, 224 ]
  }
]
output [
  {
    name: "logits"
    data_type: TYPE_FP32
    dims: [ 1000 ]
  }
]
dynamic_batching { }
"""


class GraphBuilder:
    """Collects nodes and weights; every method adds one layer to `current` and returns the name of its output.

    Along with it goes what every channel's values would be like for pictures of unit noise, were they Gaussian and
    independent: (mean, variance) by tensor. The batch normalisations take it for the statistics that training would
    have left there. With arbitrary ones, means pile up layer after layer until all pictures get nearly one answer.
    """

    def __init__(self, rng: np.random.Generator, image: str) -> None:
        import numpy as np

        self._rng = rng
        self._moments: dict[str, tuple[np.ndarray, np.ndarray]] = {image: (np.zeros(3), np.ones(3))}
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def convolution(self, current: str, name: str, num_in: int, num_out: int, size: int, stride: int = 1) -> str:
        """He-initialised (fan-in), without a bias: a batch normalisation follows."""
        weight = self._normal((num_out, num_in, size, size), math.sqrt(2 / (num_in * size * size)))
        self._add_tensor(f"{name}.weight", weight)
        mean, variance = self._moments[current]
        self._moments[name] = (weight.sum(axis=(2, 3)) @ mean, (weight**2).sum(axis=(2, 3)) @ variance)
        return self._add_node(
            "Conv",
            [current, f"{name}.weight"],
            name,
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[size // 2] * 4,
        )

    def batch_normalization(self, current: str, name: str, num_channels: int, gain: float) -> str:
        """No two channels alike, so that folding it into the convolution before it is real work. `gain` keeps the sum
        of many blocks from growing."""
        mean, variance = self._moments[current]
        parts = {
            "scale": gain * self._rng.uniform(0.8, 1.2, num_channels),
            "bias": self._rng.normal(0, 0.1, num_channels),
            "mean": mean,
            "var": variance,
        }
        for part, values in parts.items():
            self._add_tensor(f"{name}.{part}", values)
        self._moments[name] = (parts["bias"], parts["scale"] ** 2)
        return self._add_node("BatchNormalization", [current, *(f"{name}.{part}" for part in parts)], name)

    def relu(self, current: str, name: str) -> str:
        self._moments[name] = rectified_moments(*self._moments[current])
        return self._add_node("Relu", [current], name)

    def bottleneck(self, current: str, name: str, num_in: int, width: int, stride: int) -> str:
        """1x1, 3x3, 1x1 beside a shortcut. Version 1.5 of the net: the 3x3 has the stride, not the first 1x1."""
        num_out = width * EXPANSION
        layers = (("a", num_in, width, 1, 1), ("b", width, width, 3, stride), ("c", width, num_out, 1, 1))
        branch = current
        for part, layer_in, layer_out, size, layer_stride in layers:
            last = part == "c"
            branch = self.convolution(branch, f"{name}.conv_{part}", layer_in, layer_out, size, layer_stride)
            branch = self.batch_normalization(branch, f"{name}.norm_{part}", layer_out, gain=0.5 if last else 1.0)
            if not last:
                branch = self.relu(branch, f"{name}.relu_{part}")
        shortcut = current
        if num_in != num_out:
            shortcut = self.convolution(current, f"{name}.conv_shortcut", num_in, num_out, 1, stride)
            shortcut = self.batch_normalization(shortcut, f"{name}.norm_shortcut", num_out, gain=1.0)
        total = self._add_node("Add", [branch, shortcut], f"{name}.add")
        (mean, variance), (shortcut_mean, shortcut_variance) = self._moments[branch], self._moments[shortcut]
        self._moments[total] = (mean + shortcut_mean, variance + shortcut_variance)
        return self.relu(total, f"{name}.relu")

    def max_pool(self, current: str, name: str) -> str:
        mean, variance = self._moments[current]
        self._moments[name] = (mean + 1.5 * variance**0.5, variance)  # 9 Gaussians' maximum is 1.5 deviations up
        return self._add_node("MaxPool", [current], name, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])

    def classifier(self, current: str, num_in: int, output: str) -> str:
        mean, variance = self._moments[current]
        weight = self._normal((NUM_CLASSES, num_in), math.sqrt(1 / num_in)) / variance**0.5
        self._add_tensor("classifier.weight", weight)
        self._add_tensor("classifier.bias", -weight @ mean)
        pooled = self._add_node("GlobalAveragePool", [current], "average_pool")
        features = self._add_node("Flatten", [pooled], "features")
        return self._add_node("Gemm", [features, "classifier.weight", "classifier.bias"], output, transB=1)

    def _normal(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return self._rng.standard_normal(shape, "float32") * scale

    def _add_tensor(self, name: str, values: np.ndarray) -> None:
        from onnx import numpy_helper

        self.tensors.append(numpy_helper.from_array(values.astype("float32", copy=False), name))

    def _add_node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output


def rectified_moments(mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of max(0, x) for Gaussian x."""
    import numpy as np

    deviation = np.sqrt(variance)
    ratio = mean / deviation
    density = np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    above = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in ratio])
    rectified_mean = mean * above + deviation * density
    second = (mean**2 + variance) * above + mean * deviation * density
    return rectified_mean, second - rectified_mean**2


def build(recipe: str) -> onnx.ModelProto:
    import numpy as np
    from onnx import TensorProto, checker, helper

    builder = GraphBuilder(np.random.default_rng(SEED), "image")
    num_channels = STAGES[0][1]
    current = builder.convolution("image", "stem.conv", 3, num_channels, size=7, stride=2)
    current = builder.batch_normalization(current, "stem.norm", num_channels, gain=1.0)
    current = builder.relu(current, "stem.relu")
    current = builder.max_pool(current, "stem.pool")
    for stage, (num_blocks, width) in enumerate(STAGES):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            current = builder.bottleneck(current, f"stage{stage}.block{block}", num_channels, width, stride)
            num_channels = width * EXPANSION
    builder.classifier(current, num_channels, "logits")
    graph = helper.make_graph(
        builder.nodes,
        "resnet50",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", NUM_CLASSES])],
        builder.tensors,
    )
    model = helper.make_model(
        graph,
        producer_name="hone-examples",
        producer_version=recipe,
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    checker.check_model(model)
    return model


def recipe_digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def is_built(folder: Path, recipe: str) -> bool:
    """Whether the folder holds the whole model of this very script: protobuf writes the producer's version first, and
    files appear here by a rename only."""
    model, config = folder / "1" / "model.onnx", folder / "config.pbtxt"
    if not model.is_file() or not config.is_file() or model.stat().st_size < MIN_BYTES:
        return False
    with model.open("rb") as file:
        return recipe.encode() in file.read(256) and config.read_text() == CONFIG


def publish(model: onnx.ModelProto, folder: Path) -> None:
    """Everything is written beside the target under a hidden name, then renamed: a polling server sees all or nothing
    (of a model built anew over an old one: the old model, then the new one)."""
    staged = folder.parent / f".{folder.name}.{os.getpid()}"
    try:
        (staged / "1").mkdir(parents=True)
        (staged / "config.pbtxt").write_text(CONFIG)
        (staged / "1" / "model.onnx").write_bytes(model.SerializeToString())
        if folder.exists():
            (folder / "1").mkdir(exist_ok=True)
            for name in ("config.pbtxt", "1/model.onnx"):
                (staged / name).replace(folder / name)
        else:
            staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo model `resnet50` unless it is there.")
    parser.add_argument("--model", type=Path, default=ROOT / "model_repo" / "resnet50", help="folder to write")
    parser.add_argument("--force", action="store_true", help="build it even if it is there")
    arguments = parser.parse_args()

    recipe = recipe_digest()
    if not arguments.force and is_built(arguments.model, recipe):
        return
    publish(build(recipe), arguments.model)
    print(f"setup: built {arguments.model}", file=sys.stderr)


if __name__ == "__main__":
    main()
