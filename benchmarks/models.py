"""Model repositories that the benchmarks serve, made in temporary folders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from benchmarks.bare.v2 import INPUT_NAME, OUTPUT_NAME
from benchmarks.processes import ROOT, BenchmarkError

#: Elements of the FP32 tensors of 64 B and 600 KB (a ResNet-50's input).
SMALL, LARGE = 16, 150_528


def identity_graph() -> onnx.ModelProto:
    """FP32 `IN` -> `OUT` of any length."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [INPUT_NAME], [OUTPUT_NAME])],
        "identity",
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, ["length"])],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, ["length"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def add_identity(repository: Path, name: str, num_versions: int = 1) -> None:
    """A model that does not batch; all its versions are served."""
    content = identity_graph().SerializeToString()
    for version in range(1, num_versions + 1):
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(content)
    (repository / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 0\n'
        f'input [{{ name: "{INPUT_NAME}" data_type: TYPE_FP32 dims: [ -1 ] }}]\n'
        f'output [{{ name: "{OUTPUT_NAME}" data_type: TYPE_FP32 dims: [ -1 ] }}]\n'
        "version_policy { all { } }\ninstance_group [{ kind: KIND_CPU count: 1 }]\n"
    )


@dataclass(frozen=True)
class RealModel:
    """A model file with one FP32 image input; `shape` is without the batch dimension."""

    title: str
    path: Path
    input_name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_real_model(title: str, path: Path, free_sizes: Mapping[int, int]) -> RealModel:
    """Describe a model file. `free_sizes` gives the dimensions (batch not counted) that the file leaves open."""
    graph = onnx.load(path, load_external_data=False).graph
    stored = {initializer.name for initializer in graph.initializer}
    inputs = [node for node in graph.input if node.name not in stored]
    if len(inputs) != 1:
        raise BenchmarkError(f"{path}: expected one input, found {[node.name for node in inputs]}")
    (node,) = inputs
    shape = tuple(
        dim.dim_value or free_sizes.get(index, 0) for index, dim in enumerate(node.type.tensor_type.shape.dim[1:])
    )
    if 0 in shape:
        raise BenchmarkError(f"{path}: input {node.name} has an open size beside its batch: {shape}; say which to use")
    return RealModel(title, path, node.name, shape)


def find_real_models(root: Path = ROOT) -> tuple[list[RealModel], list[str]]:
    """The real models that are here, and a line for each that is not."""
    candidates: tuple[tuple[str, Path, dict[int, int], str], ...] = (
        ("angle classifier", root / "real_models" / "angle_classifier", {1: 48, 2: 192}, "make real-models"),
        ("resnet50", root / "model_repo" / "resnet50", {}, "make setup"),
    )
    found, missing = [], []
    for title, folder, free_sizes, target in candidates:
        path = folder / "1" / "model.onnx"
        if path.is_file():
            found.append(read_real_model(title, path, free_sizes))
        else:
            missing.append(f"{title}: {path.relative_to(root)} is not here; `{target}` brings it")
    return found, missing


def add_real_model(repository: Path, name: str, model: RealModel, *, batching: bool) -> None:
    """Serve a real model with one instance, auto-completed; with a dynamic batcher or without batching."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    shutil.copy2(model.path, folder / "model.onnx")
    scheduling = "max_batch_size: 8\ndynamic_batching { }" if batching else "max_batch_size: 1"
    (repository / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "onnxruntime"\n{scheduling}\ninstance_group [{{ kind: KIND_CPU count: 1 }}]\n'
    )
