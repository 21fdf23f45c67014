"""MobileNetV3-large, RepVGG-A0 and ResNet-50 as ONNX graphs, from their papers' tables.

Weights are random; the statistics of their batch normalisations are those of data, and residual branches end with a
small scale, as in trained nets (see `cpu_calibrated`). RepVGG as deployed is folded from the three branches by which it
is trained, so that its 3x3 convolutions hold an identity.
"""

from __future__ import annotations

import onnx

from benchmarks.cpu_calibrated import BRANCH_GAIN, CalibratedGraph

NUM_CLASSES = 1000
IMAGE_SIZE = 224
_IMAGE = "image"
_LOGITS = "logits"

#: MobileNetV3-large (Howard et al., "Searching for MobileNetV3", 2019, table 1): kernel size, expanded channels,
#: channels, squeeze-and-excite, activation, stride.
_BOTTLENECKS = (
    (3, 16, 16, False, "Relu", 1),
    (3, 64, 24, False, "Relu", 2),
    (3, 72, 24, False, "Relu", 1),
    (5, 72, 40, True, "Relu", 2),
    (5, 120, 40, True, "Relu", 1),
    (5, 120, 40, True, "Relu", 1),
    (3, 240, 80, False, "HardSwish", 2),
    (3, 200, 80, False, "HardSwish", 1),
    (3, 184, 80, False, "HardSwish", 1),
    (3, 184, 80, False, "HardSwish", 1),
    (3, 480, 112, True, "HardSwish", 1),
    (3, 672, 112, True, "HardSwish", 1),
    (5, 672, 160, True, "HardSwish", 2),
    (5, 960, 160, True, "HardSwish", 1),
    (5, 960, 160, True, "HardSwish", 1),
)

#: RepVGG-A0 (Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021, tables 2 and 3): blocks, channels.
_REPVGG_STAGES = ((1, 48), (2, 48), (4, 96), (14, 192), (1, 1280))
#: Deviation of each of three branches, by which their sum has about 1.
_REPVGG_GAIN = 0.6

#: ResNet-50 (He et al., "Deep Residual Learning for Image Recognition", 2016, table 1): blocks, channels inside one.
_RESNET_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def mobilenet_v3_large() -> onnx.ModelProto:
    graph = CalibratedGraph("mobilenet_v3_large", seed=3)
    current = graph.image(_IMAGE, IMAGE_SIZE)
    current = graph.activation(graph.convolution(current, 16, 3, stride=2), "HardSwish")
    num_channels = 16
    for size, num_expanded, num_out, squeezes, activation, stride in _BOTTLENECKS:
        block = current
        if num_expanded != num_channels:
            block = graph.activation(graph.convolution(block, num_expanded, 1), activation)
        depthwise = graph.convolution(block, num_expanded, size, stride=stride, groups=num_expanded)
        block = graph.activation(depthwise, activation)
        if squeezes:
            block = graph.squeeze_excite(block, _divisible(num_expanded / 4))
        repeats = stride == 1 and num_out == num_channels
        block = graph.convolution(block, num_out, 1, gain=BRANCH_GAIN if repeats else 1.0)
        current = graph.add(current, block) if repeats else block
        num_channels = num_out
    current = graph.activation(graph.convolution(current, 6 * num_channels, 1), "HardSwish")
    current = graph.activation(graph.linear(graph.average_pool(current), 1280), "HardSwish")
    graph.linear(current, NUM_CLASSES, _LOGITS)
    return _classifier(graph)


def repvgg_a0() -> onnx.ModelProto:
    """As it is deployed: 3x3 convolutions and ReLU, nothing else."""
    graph = CalibratedGraph("repvgg_a0", seed=4)
    current = graph.image(_IMAGE, IMAGE_SIZE)
    for num_blocks, num_channels in _REPVGG_STAGES:
        for block in range(num_blocks):
            stride = 2 if block == 0 else 1
            whole = graph.reparametrized(current, num_channels, stride=stride, gain=_REPVGG_GAIN)
            current = graph.activation(whole, "Relu")
    graph.linear(graph.average_pool(current), NUM_CLASSES, _LOGITS)
    return _classifier(graph)


def repvgg_a0_train() -> onnx.ModelProto:
    """As it is trained: a 3x3, a 1x1 and, where sizes allow it, an identity beside each other, each with a batch
    normalisation of its own."""
    graph = CalibratedGraph("repvgg_a0_train", seed=5)
    current = graph.image(_IMAGE, IMAGE_SIZE)
    num_in = 3
    for num_blocks, num_channels in _REPVGG_STAGES:
        for block in range(num_blocks):
            stride = 2 if block == 0 else 1
            branches = [
                graph.batch_normalized(current, num_channels, size, stride=stride, gain=_REPVGG_GAIN) for size in (3, 1)
            ]
            if stride == 1 and num_channels == num_in:
                branches.append(graph.batch_normalized(current, num_channels, None, gain=_REPVGG_GAIN))
            total = branches[0]
            for branch in branches[1:]:
                total = graph.add(total, branch)
            current = graph.activation(total, "Relu")
            num_in = num_channels
    graph.linear(graph.average_pool(current), NUM_CLASSES, _LOGITS)
    return _classifier(graph)


def resnet50() -> onnx.ModelProto:
    """Version 1.5: the 3x3 of a block has the stride, not its first 1x1."""
    graph = CalibratedGraph("resnet50", seed=50)
    current = graph.image(_IMAGE, IMAGE_SIZE)
    current = graph.activation(graph.convolution(current, 64, 7, stride=2), "Relu")
    current = graph.node("MaxPool", current, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    num_in = 64
    for stage, (num_blocks, width) in enumerate(_RESNET_STAGES):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inside = graph.activation(graph.convolution(current, width, 1), "Relu")
            inside = graph.activation(graph.convolution(inside, width, 3, stride=stride), "Relu")
            branch = graph.convolution(inside, 4 * width, 1, gain=BRANCH_GAIN)
            if num_in != 4 * width or stride > 1:
                current = graph.convolution(current, 4 * width, 1, stride=stride)
            current = graph.activation(graph.add(branch, current), "Relu")
            num_in = 4 * width
    graph.linear(graph.average_pool(current), NUM_CLASSES, _LOGITS)
    return _classifier(graph)


def _classifier(graph: CalibratedGraph) -> onnx.ModelProto:
    return graph.model({_LOGITS: ["batch", NUM_CLASSES]})


def _divisible(channels: float, divisor: int = 8) -> int:
    """The nearest multiple of `divisor` that takes away no more than a tenth, as MobileNets round channels."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded
