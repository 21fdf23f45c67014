"""Nets that B7 measures, built here: `python -m benchmarks.gpu.nets FOLDER NAME...` writes them as ONNX files.

Weights are random, which changes no time. Those of VGG-16 and BERT-base are the same few thousand numbers again and
again, shifted from row to row: 553 MB and 438 MB that pack to a few, and are easily brought to another machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.cpu_convnets import repvgg_a0, resnet50
from benchmarks.cpu_graph import Graph
from benchmarks.cpu_models import Input
from benchmarks.cpu_transformers import SEQUENCE, VOCABULARY, bert_base

#: VGG-16 (Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014, table 1, column D): 3x3 convolutions of so
#: many channels, a pooling behind each group.
_VGG_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_VGG_LINEAR = (4096, 4096, 1000)
_SIZE = 224
#: A prime, so that rows are shifted against each other; gzip finds it again within its window of 32 KiB.
_PERIOD = 4093


def vgg16() -> onnx.ModelProto:
    graph = Graph("vgg16", seed=16)
    rng = np.random.default_rng(16)
    current, num_in = graph.image("image", _SIZE), 3
    for group in _VGG_GROUPS:
        for num_out in group:
            weight = _repeated((num_out, num_in, 3, 3), (2.0 / (9 * num_in)) ** 0.5, rng)
            current = graph.node(
                "Conv",
                current,
                graph.tensor(weight),
                graph.tensor(_repeated((num_out,), 0.1, rng)),
                kernel_shape=[3, 3],
                strides=[1, 1],
                pads=[1, 1, 1, 1],
                dilations=[1, 1],
                group=1,
            )
            current = graph.node("Relu", current)
            num_in = num_out
        current = graph.node("MaxPool", current, kernel_shape=[2, 2], strides=[2, 2])
    current = graph.node("Flatten", current, axis=1)
    num_in *= (_SIZE // 2 ** len(_VGG_GROUPS)) ** 2
    for at, num_out in enumerate(_VGG_LINEAR):
        is_last = at + 1 == len(_VGG_LINEAR)
        weight = _repeated((num_out, num_in), ((1.0 if is_last else 2.0) / num_in) ** 0.5, rng)
        bias = _repeated((num_out,), 0.1, rng)
        output = "logits" if is_last else ""
        current = graph.node("Gemm", current, graph.tensor(weight), graph.tensor(bias), output=output, transB=1)
        if not is_last:
            current = graph.node("Relu", current)
        num_in = num_out
    return graph.model({"logits": ["batch", _VGG_LINEAR[-1]]})


class _Repeating(Graph):
    """Draws a few thousand numbers a tensor."""

    def normal(self, shape: Sequence[int], deviation: float = 1.0) -> NDArray[np.float32]:
        found: NDArray[np.float32] = _repeated(tuple(shape), deviation, self.rng)
        return found


@dataclass(frozen=True, slots=True)
class Net:
    build: Callable[[], onnx.ModelProto]
    inputs: tuple[Input, ...]


_PICTURE = (Input("image", "float32", (3, _SIZE, _SIZE)),)
_TOKENS = (
    Input("input_ids", "int64", (SEQUENCE,), 0, VOCABULARY),
    Input("attention_mask", "int64", (SEQUENCE,), 1, 2),
    Input("token_type_ids", "int64", (SEQUENCE,), 0, 2),
)

NETS: Mapping[str, Net] = {
    "resnet50": Net(resnet50, _PICTURE),
    "repvgg_a0": Net(repvgg_a0, _PICTURE),
    "vgg16": Net(vgg16, _PICTURE),
    "bert_base": Net(lambda: bert_base(_Repeating("bert_base", seed=6)), _TOKENS),
}


def write(name: str, folder: Path) -> Path:
    """Raises KeyError for a net that is not known."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    onnx.save(NETS[name].build(), path)
    return path


def _repeated(shape: tuple[int, ...], deviation: float, rng: np.random.Generator) -> NDArray[Any]:
    some = rng.standard_normal(_PERIOD, np.float32) * np.float32(deviation)
    return np.resize(some, shape)


def main(arguments: Sequence[str]) -> int:
    folder, *names = arguments
    for name in names or NETS:
        if name not in NETS:
            print(f"'{name}' is unknown, expected some of {', '.join(NETS)}", file=sys.stderr)
            return 2
        print(write(name, Path(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
