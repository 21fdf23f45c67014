"""Trains the demo model `digits` and writes it, with its configuration and a few pictures, where the server looks.

A small convolutional net learns scikit-learn's bundled 8x8 digits. Layers, gradients and optimiser are written out in
numpy, so that nothing but the data set is needed; the same seed gives the same model on the same numpy.

    .venv/bin/python examples/models/train_digits.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    Array = NDArray[np.floating]
    Labels = NDArray[np.int64]
    Parameters = dict[str, Array]

ROOT = Path(__file__).resolve().parents[2]
SEED = 20
NUM_HELD_OUT = 450
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# Convolutions are 3x3 and keep the picture's size. A 2x2 maximum follows the second and the third: 8x8, 4x4, 2x2.
CHANNELS = (1, 16, 32, 32)
POOLED = (False, True, True)
FEATURES = CHANNELS[-1] * 2 * 2

CONFIG = """\
name: "digits"
backend: "onnxruntime"
max_batch_size: 8
input [
  {
    name: "image"
    data_type: TYPE_FP32
    dims: [ 1, 8, 8 ]
  }
]
output [
  {
    name: "probabilities"
    data_type: TYPE_FP32
    dims: [ 10 ]
    label_filename: "labels.txt"
  }
]
dynamic_batching { }
"""


@dataclass(frozen=True)
class Split:
    """Pictures [n, 1, 8, 8] scaled to 0..1 and their labels [n], for learning and, never seen by it, for judging."""

    train_images: Array
    train_labels: Labels
    held_out_images: Array
    held_out_labels: Labels


def load_split() -> Split:
    """Always the same split: the committed model is judged on exactly the pictures it was not shown."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, np.newaxis]
    labels = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, train = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    return Split(images[train], labels[train], images[held_out], labels[held_out])


def initial_parameters(rng: np.random.Generator, dtype: type[np.floating] = np.float32) -> Parameters:
    """He-initialised weights [out, in, 3, 3] and [in, out]; biases are zero."""
    parameters: Parameters = {}
    for layer, (num_in, num_out) in enumerate(itertools.pairwise(CHANNELS)):
        scale = math.sqrt(2 / (num_in * 9))
        parameters[f"conv{layer}.weight"] = (rng.standard_normal((num_out, num_in, 3, 3)) * scale).astype(dtype)
        parameters[f"conv{layer}.bias"] = np.zeros(num_out, dtype)
    parameters["dense.weight"] = (rng.standard_normal((FEATURES, 10)) * math.sqrt(1 / FEATURES)).astype(dtype)
    parameters["dense.bias"] = np.zeros(10, dtype)
    return parameters


def neighbourhoods(images: Array) -> Array:
    """[n, c, h, w] to [n, h, w, c*9]: what a 3x3 window with a border of zeros sees around every pixel."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))  # n, c, h, w, 3, 3
    n, c, h, w = images.shape
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(n, h, w, c * 9)


def sum_neighbourhoods(columns: Array, num_channels: int) -> Array:
    """The transpose of `neighbourhoods`: every window's share is added to the pixels it was taken from."""
    n, h, w, _ = columns.shape
    windows = columns.reshape(n, h, w, num_channels, 3, 3)
    padded = np.zeros((n, num_channels, h + 2, w + 2), columns.dtype)
    for row in range(3):
        for column in range(3):
            padded[:, :, row : row + h, column : column + w] += windows[..., row, column].transpose(0, 3, 1, 2)
    return padded[:, :, 1:-1, 1:-1]


def loss_and_gradients(
    parameters: Parameters, images: Array, labels: Labels, keep: Array | None = None
) -> tuple[float, Parameters]:
    """Mean cross-entropy of a batch and its gradient with respect to every parameter.

    `keep` [n, FEATURES] multiplies the features before the last layer (dropout); None keeps them all.
    """
    n = len(labels)
    tape = []
    activations = images
    for layer, pooled in enumerate(POOLED):
        weight = parameters[f"conv{layer}.weight"]
        columns = neighbourhoods(activations)
        summed = columns @ weight.reshape(len(weight), -1).T + parameters[f"conv{layer}.bias"]
        rectified = np.maximum(summed, 0).transpose(0, 3, 1, 2)
        output, winners = max_pool(rectified) if pooled else (rectified, None)
        tape.append((activations.shape[1], columns, rectified, winners))
        activations = output

    features = activations.reshape(n, FEATURES)
    if keep is not None:
        features = features * keep
    logits = features @ parameters["dense.weight"] + parameters["dense.bias"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -float(log_probabilities[np.arange(n), labels].mean())

    d_logits = np.exp(log_probabilities)
    d_logits[np.arange(n), labels] -= 1
    d_logits /= n
    gradients = {"dense.weight": features.T @ d_logits, "dense.bias": d_logits.sum(axis=0)}
    d_features = d_logits @ parameters["dense.weight"].T
    if keep is not None:
        d_features = d_features * keep
    d_output = d_features.reshape(activations.shape)
    for layer in reversed(range(len(POOLED))):
        num_in, columns, rectified, winners = tape[layer]
        weight = parameters[f"conv{layer}.weight"]
        if winners is not None:
            d_output = winners * d_output.repeat(2, axis=2).repeat(2, axis=3)
        d_summed = (d_output * (rectified > 0)).transpose(0, 2, 3, 1)  # n, h, w, out
        flat = d_summed.reshape(-1, len(weight))
        gradients[f"conv{layer}.weight"] = (flat.T @ columns.reshape(len(flat), -1)).reshape(weight.shape)
        gradients[f"conv{layer}.bias"] = flat.sum(axis=0)
        if layer > 0:
            d_output = sum_neighbourhoods(d_summed @ weight.reshape(len(weight), -1), num_in)
    return loss, gradients


def max_pool(images: Array) -> tuple[Array, Array]:
    """[n, c, h, w] to [n, c, h/2, w/2], and a mask [n, c, h, w] of each winner's share (ties share evenly)."""
    n, c, h, w = images.shape
    pooled = images.reshape(n, c, h // 2, 2, w // 2, 2).max(axis=(3, 5))
    winners = (images == pooled.repeat(2, axis=2).repeat(2, axis=3)).astype(images.dtype)
    num_winners = winners.reshape(n, c, h // 2, 2, w // 2, 2).sum(axis=(3, 5))
    return pooled, winners / num_winners.repeat(2, axis=2).repeat(2, axis=3)


class Adam:
    """Adam (Kingma and Ba, 2014); changes the parameters in place."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._mean = {name: np.zeros_like(value) for name, value in parameters.items()}
        self._square = {name: np.zeros_like(value) for name, value in parameters.items()}
        self._num_steps = 0

    def step(self, gradients: Parameters, learning_rate: float) -> None:
        self._num_steps += 1
        for name, gradient in gradients.items():
            mean, square = self._mean[name], self._square[name]
            mean += (1 - 0.9) * (gradient - mean)
            square += (1 - 0.999) * (gradient**2 - square)
            unbiased_mean = mean / (1 - 0.9**self._num_steps)
            unbiased_square = square / (1 - 0.999**self._num_steps)
            self._parameters[name] -= learning_rate * unbiased_mean / (np.sqrt(unbiased_square) + 1e-8)


def shifted_at_random(images: Array, rng: np.random.Generator) -> Array:
    """Every picture moved by at most one pixel each way; what moves in is empty."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))  # n, c, 3, 3, h, w
    down, right = rng.integers(0, 3, (2, len(images)))
    return windows[np.arange(len(images)), :, down, right]


def train(split: Split, num_epochs: int, batch_size: int = 64, peak_learning_rate: float = 3e-3) -> Parameters:
    rng = np.random.default_rng(SEED)
    parameters = initial_parameters(rng)
    adam = Adam(parameters)
    num_train = len(split.train_labels)
    num_steps = num_epochs * math.ceil(num_train / batch_size)
    step = 0
    for epoch in range(num_epochs):
        losses = []
        order = rng.permutation(num_train)
        for start in range(0, num_train, batch_size):
            batch = order[start : start + batch_size]
            images = shifted_at_random(split.train_images[batch], rng)
            keep = (rng.random((len(batch), FEATURES)) < 0.75).astype(np.float32) / np.float32(0.75)
            loss, gradients = loss_and_gradients(parameters, images, split.train_labels[batch], keep)
            adam.step(gradients, peak_learning_rate * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
            losses.append(loss)
            step += 1
        if epoch % 5 == 4 or epoch == num_epochs - 1:
            print(f"epoch {epoch + 1:3d}  loss {np.mean(losses):.4f}")
    return parameters


def to_onnx(parameters: Parameters) -> onnx.ModelProto:
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes, tensors = [], [numpy_helper.from_array(value, name) for name, value in parameters.items()]
    current = "image"
    for layer, pooled in enumerate(POOLED):
        inputs = [current, f"conv{layer}.weight", f"conv{layer}.bias"]
        nodes.append(helper.make_node("Conv", inputs, [f"conv{layer}"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"conv{layer}"], [f"relu{layer}"]))
        current = f"relu{layer}"
        if pooled:
            nodes.append(helper.make_node("MaxPool", [current], [f"pool{layer}"], kernel_shape=[2, 2], strides=[2, 2]))
            current = f"pool{layer}"
    nodes.append(helper.make_node("Flatten", [current], ["features"]))
    nodes.append(helper.make_node("Gemm", ["features", "dense.weight", "dense.bias"], ["logits"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        tensors,
    )
    model = helper.make_model(
        graph, producer_name="hone-examples", ir_version=8, opset_imports=[helper.make_opsetid("", 17)]
    )
    checker.check_model(model, full_check=True)
    return model


def accuracy(model: onnx.ModelProto, images: Array, labels: Labels) -> float:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when the library is loaded
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(["probabilities"], {"image": images})
    return float((probabilities.argmax(axis=1) == labels).mean())


def write_model(model: onnx.ModelProto, folder: Path) -> None:
    """The model file comes last and by a rename, so that a server that polls the folder never sees half of it."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "labels.txt").write_text("".join(f"{word}\n" for word in WORDS))
    staged = folder / "1" / ".model.onnx.staged"
    staged.write_bytes(model.SerializeToString())
    staged.replace(folder / "1" / "model.onnx")


def write_pictures(split: Split, folder: Path) -> None:
    """One held-out picture of every digit, as it is (8x8 grey levels), and the seven also as 64x64."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for digit, word in enumerate(WORDS):
        pixels = split.held_out_images[split.held_out_labels == digit][0, 0]
        picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
        picture.save(folder / f"{word}.png", optimize=True)
        if word == "seven":
            picture.resize((64, 64), Image.Resampling.BICUBIC).save(folder / f"{word}_64x64.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model `digits`.")
    parser.add_argument("--num-epochs", type=int, default=60)
    parser.add_argument("--model", type=Path, default=ROOT / "model_repo" / "digits", help="folder to write")
    parser.add_argument("--pictures", type=Path, default=ROOT / "examples" / "digits", help="folder to write")
    parser.add_argument("--required-accuracy", type=float, default=0.97, help="below it, nothing is written")
    arguments = parser.parse_args()

    split = load_split()
    model = to_onnx(train(split, arguments.num_epochs))
    reached = accuracy(model, split.held_out_images, split.held_out_labels)
    print(f"held-out pictures answered right: {reached:.2%} of {len(split.held_out_labels)}")
    if reached < arguments.required_accuracy:
        raise SystemExit(f"expected at least {arguments.required_accuracy:.0%}: nothing was written")
    write_model(model, arguments.model)
    write_pictures(split, arguments.pictures)
    print(f"wrote {arguments.model} and {arguments.pictures}")


if __name__ == "__main__":
    main()
