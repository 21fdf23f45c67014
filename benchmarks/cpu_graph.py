"""Builds ONNX graphs of well-known nets with random weights whose values stay near one from first layer to last.

A net with plainly random weights grows or dies within a few layers, its outputs no longer depend on its inputs, and
comparing them proves nothing. So along with every tensor of a convolutional net goes what each of its channels would
be like for pictures of unit noise, were values Gaussian and independent: (mean, variance). A convolution takes them
for the statistics of the batch normalisation that training would have put behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float64]

#: Nodes and weights of Gauss-Hermite quadrature for the expectation of a function of a unit Gaussian.
_POINTS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()

ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "Relu": lambda x: np.maximum(x, 0.0),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
}


class Graph:
    """Nodes and weights in the order of use. Every method adds one layer and returns the name of its output."""

    def __init__(self, name: str, seed: int, opset: int = 17) -> None:
        self.rng = np.random.default_rng(seed)
        self.moments: dict[str, tuple[Floats, Floats]] = {}
        self._name = name
        self._opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._num_of: dict[str, int] = {}

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def image(self, name: str, size: int) -> str:
        """A batch of pictures of unit noise."""
        self.moments[name] = (np.zeros(3), np.ones(3))
        return self.input(name, TensorProto.FLOAT, ["batch", 3, size, size])

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or self._unique(operator.lower())
        self._nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def tensor(self, values: NDArray[Any], name: str = "") -> str:
        name = name or self._unique("tensor")
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        self._tensors.append(numpy_helper.from_array(np.asarray(values, order="C"), name))
        return name

    def normal(self, shape: Sequence[int], deviation: float = 1.0) -> NDArray[np.float32]:
        return self.rng.standard_normal(shape, np.float32) * np.float32(deviation)

    # --- convolutional nets ---

    def convolution(
        self, data: str, num_out: int, size: int, *, stride: int = 1, groups: int = 1, gain: float = 1.0
    ) -> str:
        """With padding to the same size and a bias, as exporters leave it after folding a batch normalisation that made
        every channel's deviation about `gain`."""
        mean, variance = self.moments[data]
        weight, bias = self._normalized(mean, variance, num_out, size, groups, gain)
        output = self.node(
            "Conv",
            data,
            self.tensor(weight),
            self.tensor(bias),
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[size // 2] * 4,
            dilations=[1, 1],
            group=groups,
        )
        self.moments[output] = (bias + self._predicted_mean(weight, mean, groups), np.full(num_out, gain**2))
        return output

    def batch_normalized(self, data: str, num_out: int, size: int | None, *, stride: int = 1, gain: float = 1.0) -> str:
        """A convolution without a bias (none at all where `size` is None) and a batch normalisation of its own, as nets
        are trained."""
        mean, variance = self.moments[data]
        current = data
        if size is not None:
            weight = self._he(num_out, len(mean), size)
            current = self.node(
                "Conv",
                data,
                self.tensor(weight),
                kernel_shape=[size, size],
                strides=[stride, stride],
                pads=[size // 2] * 4,
                dilations=[1, 1],
                group=1,
            )
            mean = self._predicted_mean(weight, mean, 1)
            variance = np.square(weight.astype(np.float64)).sum(axis=(2, 3)) @ variance
        scale, bias = gain * self.rng.uniform(0.8, 1.2, num_out), self.rng.normal(0, 0.1 * gain, num_out)
        statistics = [self.tensor(values) for values in (scale, bias, mean, variance)]
        output = self.node("BatchNormalization", current, *statistics, epsilon=1e-5)
        self.moments[output] = (bias, np.square(scale))
        return output

    def activation(self, data: str, operator: str) -> str:
        mean, variance = self.moments[data]
        values = ACTIVATIONS[operator](mean[:, None] + np.sqrt(variance)[:, None] * _POINTS)
        output = self.node(operator, data)
        first = values @ _WEIGHTS
        self.moments[output] = (first, np.square(values) @ _WEIGHTS - np.square(first))
        return output

    def add(self, left: str, right: str) -> str:
        output = self.node("Add", left, right)
        (mean, variance), (other_mean, other_variance) = self.moments[left], self.moments[right]
        self.moments[output] = (mean + other_mean, variance + other_variance)
        return output

    def squeeze_excite(self, data: str, num_squeezed: int) -> str:
        """Channels weighted by a small net of their means."""
        mean, variance = self.moments[data]
        pooled = self.node("GlobalAveragePool", data)
        self.moments[pooled] = (mean, 0.05 * variance)
        squeezed = self.activation(self.convolution(pooled, num_squeezed, 1), "Relu")
        excited = self.convolution(squeezed, len(mean), 1)
        gate = self.node("HardSigmoid", excited, alpha=1 / 6, beta=0.5)
        output = self.node("Mul", gate, data)
        self.moments[output] = (0.5 * mean, 0.28 * variance)  # the gate is 0.5 +- 0.17
        return output

    def average_pool(self, data: str) -> str:
        """Global, flattened. Taken for half as varied as its pictures are."""
        mean, variance = self.moments[data]
        output = self.node("Flatten", self.node("GlobalAveragePool", data), axis=1)
        self.moments[output] = (mean, 0.5 * variance)
        return output

    def linear(self, data: str, num_out: int, output: str = "") -> str:
        """A Gemm that takes the mean away, so that its outputs tell pictures apart."""
        mean, variance = self.moments[data]
        weight, bias = self._normalized(mean, variance, num_out, 1, 1, 1.0)
        output = self.node(
            "Gemm",
            data,
            self.tensor(weight[:, :, 0, 0]),
            self.tensor(bias),
            output=output,
            alpha=1.0,
            beta=1.0,
            transB=1,
        )
        self.moments[output] = (self._predicted_mean(weight, mean, 1) + bias, np.ones(num_out))
        return output

    # --- transformers ---

    def dense(self, data: str, num_in: int, num_out: int, deviation: float, name: str = "") -> str:
        """MatMul and Add, the form in which exporters leave a linear layer on three axes."""
        product = self.node("MatMul", data, self.tensor(self.normal((num_in, num_out), deviation), name))
        return self.node("Add", self.tensor(self.normal((num_out,), 0.02)), product)

    def layer_norm(self, data: str, size: int, epsilon: float, output: str = "") -> str:
        scale, bias = self.rng.uniform(0.8, 1.2, size), self.rng.normal(0, 0.1, size)
        tensors = [self.tensor(scale), self.tensor(bias)]
        return self.node("LayerNormalization", data, *tensors, output=output, axis=-1, epsilon=epsilon)

    def gelu(self, data: str) -> str:
        """The exact one, from its error function, as exporters to opset 17 write it."""
        erf = self.node("Erf", self.node("Div", data, self.scalar(math.sqrt(2))))
        return self.node("Mul", self.node("Mul", data, self.node("Add", erf, self.scalar(1.0))), self.scalar(0.5))

    def scalar(self, value: float) -> str:
        return self.tensor(np.array(value, np.float32))

    def sizes(self, *values: int) -> str:
        return self.tensor(np.array(values, np.int64))

    def model(self, outputs: dict[str, Sequence[int | str]]) -> onnx.ModelProto:
        """The finished model, checked. Raises onnx.checker.ValidationError."""
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self._nodes, self._name, self._inputs, infos, self._tensors)
        model = helper.make_model(
            graph, producer_name="hone-benchmarks", ir_version=8, opset_imports=[helper.make_opsetid("", self._opset)]
        )
        onnx.checker.check_model(model)
        return model

    def _he(self, num_out: int, num_in: int, size: int) -> NDArray[np.float32]:
        return self.normal((num_out, num_in, size, size), math.sqrt(2 / (num_in * size * size)))

    def _normalized(
        self, mean: Floats, variance: Floats, num_out: int, size: int, groups: int, gain: float
    ) -> tuple[NDArray[np.float32], Floats]:
        """Weights and bias for channels of about `gain` deviation and small means."""
        weight = self._he(num_out, len(mean) // groups, size)
        grouped = np.square(weight.astype(np.float64)).sum(axis=(2, 3)).reshape(groups, num_out // groups, -1)
        expected = (grouped @ variance.reshape(groups, -1, 1)).reshape(num_out)
        weight *= (gain / np.sqrt(expected)).astype(np.float32)[:, None, None, None]
        bias = self.rng.normal(0, 0.1 * gain, num_out) - self._predicted_mean(weight, mean, groups)
        return weight, bias

    @staticmethod
    def _predicted_mean(weight: NDArray[np.float32], mean: Floats, groups: int) -> Floats:
        num_out = weight.shape[0]
        grouped = weight.astype(np.float64).sum(axis=(2, 3)).reshape(groups, num_out // groups, -1)
        predicted: Floats = (grouped @ mean.reshape(groups, -1, 1)).reshape(num_out)
        return predicted

    def _unique(self, kind: str) -> str:
        number = self._num_of[kind] = self._num_of.get(kind, 0) + 1
        return f"{kind}_{number}"
