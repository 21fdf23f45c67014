"""An ONNX model with fixed shapes becomes a Relax module, its weights apart: `import_model`.

What cannot be imported is an answer, not an error: `Unsupported` names the operator.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from onnx import NodeProto, TensorProto, helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from hone.compiler.canonical import canonicalize, digest_graph, digest_tensor
from hone.compiler.onnx_graph import ONNX_DOMAINS, Graph, subgraphs
from hone.compiler.rewrites import rewrite
from hone.compiler.simplify import (
    CannotSimplify,
    first_line,
    inline_functions,
    load_with_shapes,
    raise_opset,
    simplify,
)
from hone.types import NUMPY_DTYPES, Array, Shape, TensorSpec

logger = logging.getLogger(__name__)

#: Rewrites may open the way for others (an unrolled loop holds an LSTM); a model needs two or three rounds.
MAX_ROUNDS = 8

_DATATYPES = {dtype.name: datatype for datatype, dtype in NUMPY_DTYPES.items() if datatype != "BYTES"}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The model cannot be compiled; the baseline serves on. `operator` is empty where no single one is to blame."""

    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model as the compiler takes it.

    `mod`'s `main` takes the model's inputs in the order of `inputs`, then the weights in the order of `params`
    (attribute `num_input` tells how many are inputs), and returns one tensor, or a tuple in the order of `outputs`.
    Constants of at most 16 items (64-bit integers: 1024) are in the code.
    """

    mod: tvm.IRModule
    params: dict[str, Array]
    initializers: dict[str, str]
    """Parameter -> the model file's initializer with the same dtype, shape and bytes; derived parameters are absent."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graph_digest: str
    """Of the graph, its interface and its weights; not of the names inside it or the order its nodes are listed in."""


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, which remembers at which operator it is."""

    operator = ""

    def _convert_operator(self, op_name: str, *arguments: Any) -> Any:
        self.operator = op_name
        return super()._convert_operator(op_name, *arguments)


def import_model(path: Path, shapes: Mapping[str, Shape]) -> ImportedModel | Unsupported:
    """Import an ONNX file for one signature: a shape for every input that the file leaves open.

    Raises OSError where the file cannot be read; every other difficulty is an `Unsupported`. What crashes the process
    (TVM can) is for the caller's child process to survive.
    """
    operators = _Progress()
    try:
        graph = load_with_shapes(path, shapes)
        outputs = [value.name for value in graph.model.graph.output]
        sources = {digest: name for name, digest in reversed(_digests(graph.weights).items())}
        make_importable(graph)
        return _to_relax(graph, outputs, sources)
    except CannotSimplify as problem:
        return Unsupported(operators.current, str(problem))


def make_importable(graph: Graph) -> None:
    """Rewrite and simplify until nothing changes. Raises CannotSimplify."""
    rewrite(graph)
    simplify(graph, with_weights=True)
    raise_opset(graph)
    known = set(onnx_frontend._get_convert_map())
    for _ in range(MAX_ROUNDS):
        foreign = {node.op_type for node in graph.nodes} - known
        if not (rewrite(graph) or inline_functions(graph, foreign)):
            return
        simplify(graph, with_weights=False)
