"""ONNX Runtime as the importer uses it: to simplify graphs, and as the word on what an operator does."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# ONNX Runtime reports its use to its maker, from import on, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx
import onnxruntime as ort
from onnx import ModelProto


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


def simplified(model: ModelProto, *, external_weights: bool) -> ModelProto:
    """The model as the *basic* level of graph optimization leaves it.

    ONNX Runtime writes it to a file, which is in memory, so that nothing is left behind by a process that is killed.
    Where the message would be too large, it takes files in a folder, with the weights beside the model.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    if not external_weights:
        with os.fdopen(os.memfd_create("optimized"), "rb") as file:
            options.optimized_model_filepath = f"/proc/self/fd/{file.fileno()}"
            session(model.SerializeToString(), options)
            return onnx.load_model_from_string(file.read())
    with tempfile.TemporaryDirectory(prefix="hone-import-") as folder:
        source, target = Path(folder) / "source.onnx", Path(folder) / "optimized.onnx"
        onnx.save_model(model, source, save_as_external_data=True, location="source.bin")
        options.optimized_model_filepath = str(target)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        session(source, options)
        return onnx.load(target)
