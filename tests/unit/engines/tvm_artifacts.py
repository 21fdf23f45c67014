"""Artifacts for tests of the tuned engine: small ONNX graphs, compiled with default choices into a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL, MANIFEST, CONSTANTS = "model.onnx", "manifest.json", "constants.npz"

_ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "bfloat16": TensorProto.BFLOAT16,
}


def save_model(path: Path, nodes, inputs, outputs, weights=None) -> Path:
    """`inputs` and `outputs` map names to (dtype, shape); `weights` maps names to arrays."""

    def values(specs):
        return [helper.make_tensor_value_info(name, _ONNX_TYPES[d], shape) for name, (d, shape) in specs.items()]

    graph = helper.make_graph(
        [helper.make_node(op, ins, outs, **attributes) for op, ins, outs, attributes in nodes],
        "test",
        values(inputs),
        values(outputs),
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def small_network(path: Path, *, batch: int = 1, seed: int = 0) -> Path:
    """Two convolutions with bias and ReLU, a pooling, a dense layer, a softmax: every kind of function and a kernel."""
    rng = np.random.default_rng(seed)
    weights = {
        "w0": rng.standard_normal((16, 3, 3, 3)).astype(np.float32) / 5,
        "b0": rng.standard_normal(16).astype(np.float32),
        "w1": rng.standard_normal((32, 16, 3, 3)).astype(np.float32) / 12,
        "b1": rng.standard_normal(32).astype(np.float32),
        "wd": rng.standard_normal((32, 10)).astype(np.float32) / 5,
        "bd": rng.standard_normal(10).astype(np.float32),
    }
    nodes = [
        ("Conv", ["x", "w0", "b0"], ["c0"], {"pads": [1, 1, 1, 1]}),
        ("Relu", ["c0"], ["r0"], {}),
        ("Conv", ["r0", "w1", "b1"], ["c1"], {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("Relu", ["c1"], ["r1"], {}),
        ("GlobalAveragePool", ["r1"], ["p"], {}),
        ("Flatten", ["p"], ["f"], {}),
        ("Gemm", ["f", "wd", "bd"], ["g"], {}),
        ("Softmax", ["g"], ["y"], {"axis": -1}),
    ]
    return save_model(path, nodes, {"x": ("float32", [batch, 3, 12, 12])}, {"y": ("float32", [batch, 10])}, weights)


def compile_to(folder: Path, model: Path, choices=None, *, num_threads: int = 1) -> Path:
    """Compile a model with fixed shapes; the folder gets all that an engine needs. For one thread there are no parallel
    loops, and no pool for them."""
    from hone.compiler.artifact import derived_constants, export_artifact
    from hone.compiler.onnx_import import ImportedModel, import_model
    from hone.compiler.parallel import ParallelPool
    from hone.compiler.pipeline import compile_model
    from hone.compiler.target import CpuTarget
    from hone.engines.tvm_artifact import KERNEL_FILE

    folder.mkdir(parents=True, exist_ok=True)
    imported = import_model(model, {})
    assert isinstance(imported, ImportedModel), imported
    target = CpuTarget.detect(num_threads=num_threads)
    pool = None
    if num_threads > 1:
        told = ParallelPool.here()
        pool = told.digest
        (folder / "kernels" / pool).mkdir(parents=True)
        told.build(folder / "kernels" / pool / KERNEL_FILE)
    compiled = compile_model(imported, target, choices)
    artifact = export_artifact(compiled, imported, "c" * 64, folder, pool)
    for call in compiled.kernels:
        kernel = folder / "kernels" / call.digest
        kernel.mkdir(parents=True)
        call.build(target).export(kernel / KERNEL_FILE)
    np.savez(folder / CONSTANTS, **derived_constants(imported))
    (folder / MODEL).write_bytes(model.read_bytes())
    (folder / MANIFEST).write_text(json.dumps(artifact.manifest), encoding="utf-8")
    return folder


def baseline(model: Path, inputs, outputs):
    """What ONNX Runtime answers, whether this process has a global thread pool for it or not."""
    from hone.compiler.baseline import session

    return session(model).run(outputs, inputs)


def load(folder: Path, runtime, packed=None, *, model: Path | None = None, manifest=None):
    """The engine of a folder made by `compile_to`."""
    from hone.engines.tvm import PackedWeights, TvmEngine
    from hone.engines.tvm_artifact import KERNEL_FILE

    told = manifest or json.loads((folder / MANIFEST).read_text(encoding="utf-8"))

    def constants(_: str):
        with np.load(folder / CONSTANTS) as file:
            return dict(file)

    return TvmEngine.load(
        folder,
        told,
        model=model or folder / MODEL,
        kernels={
            digest: folder / "kernels" / digest / KERNEL_FILE
            for digest in (*told["kernels"], *filter(None, [told["pool"]]))
        },
        constants=constants,
        runtime=runtime,
        packed=packed or PackedWeights(),
    )
