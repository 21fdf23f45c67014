"""The baseline engine: ONNX Runtime, which takes any ONNX model and answers at once.

Sessions run on one intra-op thread pool shared by the whole process, so that a thousand idle models cost no threads;
`configure_thread_pool` sets its size once, before the first session.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# ONNX Runtime 1.32 reports its use to its maker and keeps files in the user's home, from import on, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from hone.engines.base import view_memory
from hone.errors import EngineError, InvalidRequest
from hone.types import BYTES, NUMPY_DTYPES, Array, TensorSpec

_log = logging.getLogger(__name__)

# onnx.TensorProto.BFLOAT16; the number is part of the ONNX format, and importing onnx would cost 60 ms.
_ONNX_BFLOAT16 = 16

#: ONNX Runtime's name of a tensor type -> datatype of the protocol.
DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": BYTES,
}

_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def configure_thread_pool(num_threads: int) -> None:
    """Size the process-wide intra-op pool. Takes effect only before the first session is made."""
    ort.set_global_thread_pool_sizes(num_threads, 1)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session is made. `graph_level` is Triton's `optimization.graph.level` (-1 basic, 0 and 1 all)."""

    graph_level: int = 0


class OnnxRuntimeEngine:
    """One ONNX model on ONNX Runtime's CPU provider. A session is thread-safe: several threads may call `run`."""

    kind = "onnxruntime"

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session: Any = session
        self.inputs = tuple(_spec(node, "input") for node in session.get_inputs())
        self.outputs = tuple(_spec(node, "output") for node in session.get_outputs())
        self.initializers = tuple(_spec(node, "initializer") for node in session.get_overridable_initializers())
        self._text_inputs = frozenset(s.name for s in (*self.inputs, *self.initializers) if s.datatype == BYTES)
        self._text_outputs = frozenset(spec.name for spec in self.outputs if spec.datatype == BYTES)
        # numpy has no bfloat16 of its own, so such models go through OrtValues (28 µs more a call).
        self._through_values = any(spec.datatype == "BF16" for spec in (*self.inputs, *self.outputs))

    @classmethod
    def load(cls, path: Path, settings: SessionSettings = SessionSettings()) -> OnnxRuntimeEngine:
        """Make a session of an ONNX file. Raises EngineError with ONNX Runtime's reason, less the path."""
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        options.graph_optimization_level = _GRAPH_LEVELS.get(
            settings.graph_level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        )
        try:
            try:
                return cls(_session(path, options))
            except Exception as problem:  # its exceptions have no common root below Exception
                if "EnvCreatedWithGlobalThreadPools" not in str(problem):
                    raise
                # The process made a session before it configured the pool (a test, a notebook): no pool is shared then.
                _log.warning("ONNX Runtime's shared thread pool was not configured in time: %s has its own", path.name)
                options.use_per_session_threads = True
                return cls(_session(path, options))
        except EngineError:
            raise
        except Exception as problem:
            raise EngineError(_reason(problem, path)) from problem

    def instantiate(self) -> OnnxRuntimeEngine:
        """A session is thread-safe and shares its weights: every executor thread uses the same one."""
        return self

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """The arrays returned are ONNX Runtime's own output buffers, which they keep alive: not copied, not reused."""
        if self._text_inputs:
            inputs = {
                name: _to_text(name, array) if name in self._text_inputs else array for name, array in inputs.items()
            }
        try:
            results: list[Array] = (
                self._run_values(inputs, outputs) if self._through_values else self._session.run(outputs, inputs)
            )
        except Exception as problem:
            raise EngineError(f"onnxruntime: {_reason(problem)}") from problem
        if self._text_outputs:
            return [
                _from_text(array) if name in self._text_outputs else array
                for name, array in zip(outputs, results, strict=True)
            ]
        return results

    def close(self) -> None:
        self._session = None

    def _run_values(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        bfloat16 = NUMPY_DTYPES["BF16"]
        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
            if array.dtype == bfloat16
            else ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        return [_from_value(value) for value in self._session.run_with_ort_values(outputs, values)]


def _session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    # Without enable_fallback=False it prints its troubles and tries the same again.
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=False)


def _from_value(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()  # type: ignore[no-any-return]
    shape = value.shape()
    num_bytes = 2 * int(np.prod(shape, dtype=np.int64))
    if num_bytes == 0:
        return np.empty(shape, NUMPY_DTYPES["BF16"])
    return view_memory(value.data_ptr(), num_bytes, value).view(NUMPY_DTYPES["BF16"]).reshape(shape)


def _spec(node: Any, what: str) -> TensorSpec:
    datatype = DATATYPES.get(node.type)
    if datatype is None:
        raise EngineError(f"{what} '{node.name}' has type {node.type}, which the protocol cannot carry")
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    return TensorSpec(node.name, datatype, shape)


def _to_text(name: str, array: Array) -> Array:
    """ONNX strings are UTF-8 text; the protocol's BYTES may be anything."""
    text = np.empty(array.size, dtype=np.object_)
    try:
        for i, item in enumerate(array.flat):
            text[i] = item.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InvalidRequest(
            f"input '{name}': element {i} is not valid UTF-8, which ONNX string tensors require"
        ) from problem
    return text.reshape(array.shape)


def _from_text(array: Array) -> Array:
    data = np.empty(array.size, dtype=np.object_)
    for i, item in enumerate(array.flat):
        data[i] = str(item).encode("utf-8")
    return data.reshape(array.shape)


def _reason(problem: Exception, path: Path | None = None) -> str:
    """First line of the engine's explanation, without the server's paths."""
    text = str(problem).strip() or type(problem).__name__
    if path is not None:
        text = text.replace(str(path), path.name)
    return text.splitlines()[0]
