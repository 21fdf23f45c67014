"""Graphs of convolutional nets whose batch normalisations have statistics of data, as those of trained nets have.

Weights are random; what training would have made of the rest is measured while the graph is built: every layer is run
at once, on a few pictures, and a convolution's scale and bias are those of a batch normalisation with the mean and the
variance that its channels have there. Predicted statistics (`cpu_graph`) go wrong a little in each layer, and after
fifty of them most of an output is an accident that no input changes: then a comparison of outputs shows how rounding
errors of low precision are magnified, which trained nets do far less, rather than whether a kernel is right.

For the same reason residual branches end with a small scale (`BRANCH_GAIN`): training starts them at zero (Goyal et
al., "Accurate, large minibatch SGD", 2017, section 5.1) and leaves most of the signal on the shortcut. Classifiers are
not normalised: theirs are plain weights, scaled so that logits are as large as trained ones.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.cpu_graph import Graph

Values = NDArray[np.float32]

#: Deviation of a residual branch's end, the shortcut's being about 1.
BRANCH_GAIN: Final = 0.3
_LOGIT_DEVIATION: Final = 2.0
_EPSILON: Final = 1e-5


class CalibratedGraph(Graph):
    """Like its base, and every value is also known for the calibration pictures."""

    def __init__(self, name: str, seed: int, opset: int = 17) -> None:
        super().__init__(name, seed, opset)
        self._values: dict[str, NDArray[Any]] = {}

    def image(self, name: str, size: int) -> str:
        """A batch of pictures. Calibrated on noise of three strengths, and on a smooth one."""
        noise = self.rng.standard_normal((4, 3, size, size), np.float32)
        noise[1] = self.rng.uniform(-1, 1, noise[1].shape)
        noise[2] *= np.float32(0.33)
        coarse = -(-size // 16)
        noise[3] = np.kron(noise[3, :, :coarse, :coarse], np.ones((1, 16, 16), np.float32))[:, :size, :size]
        self._values[name] = noise
        return self.input(name, onnx.TensorProto.FLOAT, ["batch", 3, size, size])

    def tensor(self, values: NDArray[Any], name: str = "") -> str:
        name = super().tensor(values, name)
        self._values[name] = values.astype(np.float32) if values.dtype == np.float64 else values
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = super().node(operator, *inputs, output=output, **attributes)
        if output not in self._values:
            self._values[output] = self._run(operator, [self._values[name] for name in inputs], attributes)
        return output

    def convolution(
        self, data: str, num_out: int, size: int, *, stride: int = 1, groups: int = 1, gain: float = 1.0
    ) -> str:
        """With padding to the same size and a batch normalisation folded into weights and bias, by which the channels'
        deviations are about `gain`."""
        weight, bias, attributes = self._normalized_branch(data, num_out, size, stride, groups, gain)
        return self.node("Conv", data, self.tensor(weight), self.tensor(bias), **attributes)

    def batch_normalized(self, data: str, num_out: int, size: int | None, *, stride: int = 1, gain: float = 1.0) -> str:
        current = data
        if size is not None:
            weight = self._he(num_out, self._values[data].shape[1], size)
            current = self.node("Conv", data, self.tensor(weight), **_attributes(size, stride, 1))
        mean, variance = _statistics(self._values[current])
        scale, bias = gain * self.rng.uniform(0.8, 1.2, num_out), self.rng.normal(0, 0.1 * gain, num_out)
        statistics = [self.tensor(values) for values in (scale, bias, mean, variance)]
        return self.node("BatchNormalization", current, *statistics, epsilon=_EPSILON)

    def reparametrized(self, data: str, num_out: int, *, stride: int, gain: float) -> str:
        """A 3x3, a 1x1 and, where sizes allow it, an identity, each batch normalised, folded into one 3x3 convolution
        (Ding et al., "RepVGG", 2021, section 3.3)."""
        weight, bias, attributes = self._normalized_branch(data, num_out, 3, stride, 1, gain)
        point, point_bias, _ = self._normalized_branch(data, num_out, 1, stride, 1, gain)
        weight[:, :, 1, 1] += point[:, :, 0, 0]
        bias = bias + point_bias
        if stride == 1 and num_out == self._values[data].shape[1]:
            mean, variance = _statistics(self._values[data])
            scale = gain * self.rng.uniform(0.8, 1.2, num_out) / np.sqrt(variance + _EPSILON)
            weight[np.arange(num_out), np.arange(num_out), 1, 1] += scale.astype(np.float32)
            bias = bias + self.rng.normal(0, 0.1 * gain, num_out) - mean * scale
        return self.node("Conv", data, self.tensor(weight), self.tensor(bias), **attributes)

    def activation(self, data: str, operator: str) -> str:
        return self.node(operator, data)

    def add(self, left: str, right: str) -> str:
        return self.node("Add", left, right)

    def squeeze_excite(self, data: str, num_squeezed: int) -> str:
        pooled = self.node("GlobalAveragePool", data)
        squeezed = self.activation(self._plain_convolution(pooled, num_squeezed), "Relu")
        excited = self._plain_convolution(squeezed, self._values[data].shape[1])
        gate = self.node("HardSigmoid", excited, alpha=1 / 6, beta=0.5)
        return self.node("Mul", gate, data)

    def average_pool(self, data: str) -> str:
        return self.node("Flatten", self.node("GlobalAveragePool", data), axis=1)

    def linear(self, data: str, num_out: int, output: str = "") -> str:
        weight = self._scaled(data, num_out, _LOGIT_DEVIATION)
        bias = self.tensor(self.normal((num_out,), 0.02))
        return self.node("Gemm", data, self.tensor(weight), bias, output=output, alpha=1.0, beta=1.0, transB=1)

    def _plain_convolution(self, data: str, num_out: int) -> str:
        """1x1 on what was pooled, without a batch normalisation."""
        weight = self._scaled(data, num_out, 1.0)[:, :, None, None]
        return self.node("Conv", data, self.tensor(weight), self.tensor(self.normal((num_out,), 0.02)), **_ONE_BY_ONE)

    def _scaled(self, data: str, num_out: int, deviation: float) -> Values:
        """Weights by which what is computed of `data` has about this root mean square."""
        features = self._values[data].reshape(len(self._values[data]), -1).astype(np.float64)
        length = np.sqrt(np.mean(np.sum(np.square(features), axis=1)))
        return self.normal((num_out, features.shape[1]), deviation / float(length))

    def _normalized_branch(
        self, data: str, num_out: int, size: int, stride: int, groups: int, gain: float
    ) -> tuple[Values, NDArray[np.float64], dict[str, Any]]:
        """Weight, bias and attributes of a convolution with its batch normalisation folded into it."""
        weight = self._he(num_out, self._values[data].shape[1] // groups, size)
        attributes = _attributes(size, stride, groups)
        mean, variance = _statistics(self._run("Conv", [self._values[data], weight], attributes))
        scale = gain * self.rng.uniform(0.8, 1.2, num_out) / np.sqrt(variance + _EPSILON)
        bias = self.rng.normal(0, 0.1 * gain, num_out) - mean * scale
        return weight * scale.astype(np.float32)[:, None, None, None], bias, attributes

    def _run(self, operator: str, inputs: list[NDArray[Any]], attributes: dict[str, Any]) -> NDArray[Any]:
        names = [f"input_{i}" for i in range(len(inputs))]
        node = helper.make_node(operator, names, ["output"], **attributes)
        tensors = [numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in zip(names, inputs, strict=True)]
        infos = [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)]
        fed = helper.make_tensor_value_info(names[0], tensors[0].data_type, list(inputs[0].shape))
        graph = helper.make_graph([node], "layer", [fed], infos, tensors[1:])
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", self._opset)])
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (result,) = session.run(None, {names[0]: inputs[0]})
        values: NDArray[Any] = result
        return values


def _attributes(size: int, stride: int, groups: int) -> dict[str, Any]:
    return {
        "kernel_shape": [size, size],
        "strides": [stride, stride],
        "pads": [size // 2] * 4,
        "dilations": [1, 1],
        "group": groups,
    }


_ONE_BY_ONE: Final = _attributes(1, 1, 1)


def _statistics(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance of each channel, over pictures and pixels."""
    wide = values.astype(np.float64)
    return wide.mean(axis=(0, 2, 3)), wide.var(axis=(0, 2, 3))
