"""Small ONNX models as text, and what ONNX Runtime makes of them, for the importer's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper, parser

from hone.compiler.onnx_graph import Graph
from hone.compiler.simplify import load_with_shapes


def model(
    text: str, weights: Mapping[str, Any] | None = None, *, opset: int = 17, domains: str = ""
) -> onnx.ModelProto:
    """A model of a graph in ONNX's text form; `weights` become initializers."""
    header = f'<ir_version: 8, opset_import: ["": {opset}{domains}]>'
    parsed = parser.parse_model(header + text)
    parsed.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items())
    return parsed


def run(proto: onnx.ModelProto, inputs: Mapping[str, Any], *, optimize: bool = True) -> list[Any]:
    """ONNX Runtime's outputs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def graph_of(proto: onnx.ModelProto, inputs: Mapping[str, Any], folder: Path) -> Graph:
    """The graph as the importer begins with it, its inputs' shapes fixed."""
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return load_with_shapes(path, {name: np.asarray(value).shape for name, value in inputs.items()})


def operators(graph: Graph) -> set[str]:
    return {node.op_type for node in graph.nodes}


def assert_same(got: list[Any], wanted: list[Any], *, tolerance: float = 1e-5) -> None:
    """Equal dtypes, shapes and values; floating point within a tolerance."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if b.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(a, b)
