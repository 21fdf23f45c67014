"""ONNX Runtime as the importer uses it: to simplify graphs, and as the word on what an operator does."""

from __future__ import annotations

import os
from pathlib import Path

# ONNX Runtime reports its use to its maker, from import on, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort


def session(model: Path | bytes, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """A quiet session that needs no threads of its own. Raises ONNX Runtime's exceptions, whose root is Exception."""
    options = options or ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else str(model)
    try:
        return _open(source, options)
    except Exception as problem:
        # A process with a shared pool refuses sessions that bring their own, one without refuses the opposite; and
        # there is no asking which it is.
        if "use_per_session_threads must be false" not in str(problem):
            raise
    options.use_per_session_threads = False
    return _open(source, options)


def _open(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    # Without enable_fallback=False it prints its troubles and tries the same again.
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], enable_fallback=False)


def simplify_file(source: Path, target: Path, *, external_weights: bool) -> None:
    """Write the model as the *basic* level of graph optimization leaves it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    if external_weights:
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    session(source, options)
