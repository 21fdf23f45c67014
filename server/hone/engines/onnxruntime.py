"""The baseline engine: ONNX Runtime, which takes any ONNX model and answers at once.

A session has threads of its own, which stop spinning soon after a run: ONNX Runtime's process-wide pool cannot be told
to, and takes a core from the event loop and from other engines (docs/decisions/0008-thread-pools.md). Models that one
thread runs within 100 µs get no further threads, so a thousand small models cost none.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

# ONNX Runtime 1.32 reports its use to its maker and keeps files in the user's home, from import on, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from hone.engines.base import view_memory
from hone.engines.onnx_divisions import guarded_model
from hone.engines.onnx_steadiness import has_steady_operators
from hone.engines.onnxruntime_memory import MemoryLimit
from hone.errors import EngineError, InvalidRequest
from hone.types import BYTES, NUMPY_DTYPES, Array, TensorSpec

# onnx.TensorProto.BFLOAT16; the number is part of the ONNX format, and importing onnx would cost 60 ms.
ONNX_BFLOAT16 = 16
#: ONNX Runtime's name of a tensor type -> onnx.TensorProto.DataType, for the types that operators divide.
_ONNX_TYPES = {
    "tensor(float)": 1,
    "tensor(uint8)": 2,
    "tensor(int8)": 3,
    "tensor(uint16)": 4,
    "tensor(int16)": 5,
    "tensor(int32)": 6,
    "tensor(int64)": 7,
    "tensor(float16)": 10,
    "tensor(double)": 11,
    "tensor(uint32)": 12,
    "tensor(uint64)": 13,
    "tensor(bfloat16)": 16,
}

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


#: Microseconds that a pool's workers wait, spinning, for the next operator; the default is a thousand and more.
_SPIN_DURATION_US = "50"
#: Files of more than this hold models that are worth all threads without asking.
_LARGE_BYTES = 1 << 20
#: A run of a model that takes less on one thread is not divided: waking a thread costs 5 to 10 µs an operator.
_SMALL_SECONDS = 100e-6
_NUM_TRIES = 5
CUDA_PROVIDER, _CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"
#: A model that takes longer is none of those, and its loading is not to wait for it.
_PATIENCE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session is made. `graph_level` is Triton's `optimization.graph.level` (-1 basic, 0 and 1 all);
    `num_threads` run an inference, the calling one included (0: as many as there are cores to use)."""

    graph_level: int = 0
    num_threads: int = 0
    fit_threads: bool = True
    """Whether a small model gets one thread only."""
    gpu: int | None = None
    """CUDA's ordinal of the GPU that the session runs on; None for the CPU."""
    memory: MemoryLimit | None = None
    """What a session on the CPU shares with the others of the process; None for no limit."""


class OnnxRuntimeEngine:
    """One ONNX model on ONNX Runtime's CPU provider. A session is thread-safe: several threads may call `run`."""

    kind = "onnxruntime"

    def __init__(
        self,
        session: ort.InferenceSession,
        num_threads: int = 1,
        memory: MemoryLimit | None = None,
        *,
        is_steady: bool = False,
    ) -> None:
        """`memory` is the limit that the session was made with."""
        self.session: Any = session
        self.num_threads = num_threads
        self._memory = memory
        self.inputs = tuple(_spec(node, "input") for node in session.get_inputs())
        self.outputs = tuple(_spec(node, "output") for node in session.get_outputs())
        self.initializers = tuple(_spec(node, "initializer") for node in session.get_overridable_initializers())
        self._text_inputs = frozenset(s.name for s in (*self.inputs, *self.initializers) if s.datatype == BYTES)
        self._text_outputs = frozenset(spec.name for spec in self.outputs if spec.datatype == BYTES)
        # numpy has no bfloat16 of its own, so such models go through OrtValues (28 µs more a call).
        self._through_values = any(spec.datatype == "BF16" for spec in (*self.inputs, *self.outputs))
        # Texts have no size that a shape would tell.
        self.is_steady = is_steady and not self._text_inputs and not self._text_outputs

    @classmethod
    def load(cls, path: Path, settings: SessionSettings = SessionSettings()) -> OnnxRuntimeEngine:
        """Make a session of an ONNX file on the CPU; `onnxruntime_cuda.load_baseline` is for GPUs too. Raises
        EngineError with ONNX Runtime's reason, less the path."""
        if settings.gpu is not None:
            raise ValueError(f"expected settings for the CPU, found those for GPU {settings.gpu}")
        num_threads, memory = settings.num_threads or len(os.sched_getaffinity(0)), settings.memory
        try:
            is_large = _is_large(path)
            is_steady = not is_large and has_steady_operators(path)
            if num_threads > 1 and settings.fit_threads and not is_large:
                session = make_session(path, settings.graph_level, 1, memory=memory)
                alone = cls(session, 1, memory, is_steady=is_steady)
                if alone._is_small():
                    return alone
                alone.close()
            session = make_session(path, settings.graph_level, num_threads, memory=memory)
            return cls(session, num_threads, memory, is_steady=is_steady)
        except EngineError:
            raise
        except Exception as problem:  # its exceptions have no common root below Exception
            raise EngineError(reason_of(problem, path)) from problem

    def _is_small(self) -> bool:
        """Whether one thread runs the model in no time, on zeros: asked once, when the model is loaded."""
        if self._text_inputs or self._through_values:
            return False
        zeros = {
            spec.name: np.zeros([max(dim, 1) if dim else 0 for dim in spec.shape], NUMPY_DTYPES[spec.datatype])
            for spec in self.inputs
        }
        names = [spec.name for spec in self.outputs]
        limit = ort.RunOptions()
        alarm = threading.Timer(_PATIENCE_SECONDS, setattr, (limit, "terminate", True))
        alarm.start()
        try:
            for _ in range(_NUM_TRIES):
                began = time.perf_counter()
                self.session.run(names, zeros, limit)
                seconds = time.perf_counter() - began
                if seconds < _SMALL_SECONDS:
                    return True
        except Exception:  # ended by the alarm; or it does not take zeros of these sizes, and nothing is known of it
            return False
        finally:
            alarm.cancel()
        return False

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
            results = self._run_session(inputs, outputs)
        except Exception as problem:  # its exceptions have no common root below Exception
            if self._memory is None or not self._memory.explain(problem):
                raise EngineError(f"onnxruntime: {reason_of(problem)}") from problem
            results = self._run_again(inputs, outputs, self._memory)
        if self._text_outputs:
            return [
                _from_text(array) if name in self._text_outputs else array
                for name, array in zip(outputs, results, strict=True)
            ]
        return results

    def close(self) -> None:
        self.session = None

    def _run_session(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Raises ONNX Runtime's exceptions."""
        if self._through_values:
            return self._run_values(inputs, outputs)
        results: list[Array] = self.session.run(outputs, inputs)
        return results

    def _run_again(self, inputs: Mapping[str, Array], outputs: Sequence[str], memory: MemoryLimit) -> list[Array]:
        """Once there is as much memory as other runs leave. Raises EngineError."""
        memory.give_back()
        try:
            return self._run_session(inputs, outputs)
        except Exception as problem:  # its exceptions have no common root below Exception
            raise EngineError(memory.explain(problem) or f"onnxruntime: {reason_of(problem)}") from problem

    def _run_values(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        bfloat16 = NUMPY_DTYPES["BF16"]
        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
            if array.dtype == bfloat16
            else ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        return [_from_value(value) for value in self.session.run_with_ort_values(outputs, values)]


def _is_large(path: Path) -> bool:
    """By the weights, in the file or beside it."""
    return sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file()) > _LARGE_BYTES


def cuda_provider(gpu: int, stream: int | None = None, max_bytes: int | None = None) -> dict[str, str]:
    """Options of the CUDA provider on the GPU of this ordinal; what it launches goes to `stream` where one is given,
    and its arena takes `max_bytes` of the GPU's memory at most, and then no more than was asked of it."""
    options = {"device_id": str(gpu)} | ({"user_compute_stream": str(stream)} if stream is not None else {})
    if max_bytes is not None:
        options |= {"gpu_mem_limit": str(max_bytes), "arena_extend_strategy": "kSameAsRequested"}
    return options


def make_session(
    path: Path,
    graph_level: int,
    num_threads: int,
    cuda: Mapping[str, str] | None = None,
    memory: MemoryLimit | None = None,
) -> ort.InferenceSession:
    """On the CPU, or with the CUDA provider of these options, one thread at a time. Raises EngineError
    where that does not start, and what ONNX Runtime raises."""
    complaint = _load_cuda_libraries() if cuda is not None else ""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = _GRAPH_LEVELS.get(graph_level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.intra_op_num_threads = num_threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_DURATION_US)
    if memory is not None:
        memory.bind(options)
    providers: list[Any] = [_CPU_PROVIDER] if cuda is None else [(CUDA_PROVIDER, dict(cuda)), _CPU_PROVIDER]
    session = _open(path, guarded_model(path, partial(_ask_types, path, providers)), options, providers)
    if cuda is not None and CUDA_PROVIDER not in session.get_providers():
        # A provider whose libraries do not load is left out with no more than a line in ONNX Runtime's own log.
        gpu, said = cuda["device_id"], f" ({complaint})" if complaint else ""
        raise EngineError(
            f"onnxruntime: {CUDA_PROVIDER} did not start on GPU {gpu}: are CUDA 13 and cuDNN installed?{said}"
        )
    return session


@cache
def _load_cuda_libraries() -> str:
    """Loads what the CUDA provider needs out of PyPI's packages (cuBLAS, cuDNN, ...), among which its own library does
    not look. What was not found, in ONNX Runtime's words: the system's own may do."""
    said = io.StringIO()
    with redirect_stdout(said):
        ort.preload_dlls()
    return next((line.strip() for line in said.getvalue().splitlines() if line.strip()), "")


def _open(
    path: Path, content: bytes | None, options: ort.SessionOptions, providers: Sequence[Any]
) -> ort.InferenceSession:
    """A session of a file, or of `content` in its place, whose external data lie beside the file."""
    if content is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    # Without enable_fallback=False it prints its troubles and tries the same again.
    session = ort.InferenceSession(
        str(path) if content is None else content, options, providers=list(providers), enable_fallback=False
    )
    if content is not None:
        # It would keep the whole model a second time, to start over with other providers: nothing here asks for that.
        session._model_bytes = None
    return session


def _ask_types(path: Path, providers: Sequence[Any], content: bytes, names: Sequence[str]) -> list[int | None]:
    """Types of outputs as ONNX Runtime infers them (see `TypeOracle`), with the providers that will run the model: each
    knows operators that the others do not. Raises its exceptions."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # Nothing is to be computed yet: folding a division of constants could be the very fault that is looked for.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    types = {node.name: node.type for node in _open(path, content, options, providers).get_outputs()}
    return [_ONNX_TYPES.get(types[name]) for name in names]


def has_cuda() -> bool:
    """Whether the ONNX Runtime that is installed is the one for NVIDIA GPUs."""
    return CUDA_PROVIDER in ort.get_available_providers()


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


def reason_of(problem: Exception, path: Path | None = None) -> str:
    """First line of the engine's explanation, without the server's paths."""
    text = str(problem).strip() or type(problem).__name__
    if path is not None:
        text = text.replace(str(path), path.name)
    return text.splitlines()[0]
