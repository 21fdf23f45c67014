"""Compares PyTorch's side of B7 with ONNX Runtime, on the CPU in float32: `python -m benchmarks.gpu.check_torch`.

Wants PyTorch beside onnx and onnxruntime, in an environment of its own; `PYTHONPATH=server:.` brings the rest. Also
holds that `torch.compile` takes each graph whole. Exit code 1: something is off.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.cpu_models import MODELS, find_model, provide
from benchmarks.gpu.nets import NETS, write
from benchmarks.gpu.torch_graph import TorchGraph
from benchmarks.gpu.torch_nodes import graph_nodes
from benchmarks.processes import BenchmarkError

TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*NETS, *(model.name for model in MODELS if model.build is None)]
    parser.add_argument("names", nargs="*", default=known, help="nets of nets.py, and models of `make real-models`")
    parser.add_argument("--batch", type=int, default=2)
    told = parser.parse_args(arguments)
    is_right = True
    with tempfile.TemporaryDirectory() as made:
        for name in told.names:
            folder = Path(made) / name
            try:
                path = write(name, folder) if name in NETS else provide(find_model(name), folder)
            except BenchmarkError as problem:
                print(f"{name}: left out: {problem}")
                continue
            line, good = check(name, path, folder, told.batch)
            print(f"{name}: {line}", flush=True)
            is_right &= good
    return 0 if is_right else 1


def check(name: str, path: Path, folder: Path, batch: int) -> tuple[str, bool]:
    """What was found, and whether it holds."""
    torch: Any = importlib.import_module("torch")

    generator = np.random.default_rng(0)
    inputs = NETS[name].inputs if name in NETS else find_model(name).inputs
    arrays: dict[str, Any] = {one.name: one.values(batch, generator) for one in inputs}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.onnx").exists():
        (folder / "model.onnx").symlink_to(path)
    nodes = graph_nodes(onnx.load(path).graph)
    (folder / "nodes.json").write_text(json.dumps(nodes), encoding="utf-8")
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    expected = session.run(nodes["outputs"], arrays)
    try:
        graph = TorchGraph(folder, arrays, "cpu", "float32")
    except NotImplementedError as problem:
        return str(problem), False
    given = [torch.from_numpy(array) for array in arrays.values()]
    with torch.inference_mode():
        error = _off([one.numpy() for one in graph(*given)], expected)
        compiled = torch.compile(graph, backend="eager", fullgraph=True, dynamic=False)
        whole = _off([one.numpy() for one in compiled(*given)], expected)
    half = TorchGraph(folder, arrays, "cpu", "bfloat16")
    with torch.inference_mode():
        low = _off([one.numpy() for one in half(*given)], expected)
    wholes = [node["op"] for node in nodes["nodes"] if node["op"] in ("Linear", "Gelu", "SDPA")]
    found = ", ".join(f"{wholes.count(op)} {op}" for op in dict.fromkeys(wholes))
    told = f"error {error:.1e}, compiled {whole:.1e}, in bfloat16 {low:.1e}"
    return f"{told}{f' ({found})' if found else ''}", bool(max(error, whole) <= TOLERANCE and low < 0.5)


def _off(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference, as a share of the output's largest magnitude."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
