"""The values that pass between hone's parts, and the seams (protocols) that `app` connects.

Nothing here does work. A tensor is a numpy array whose first axis is the batch where the model batches; BYTES
tensors are object arrays of `bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
ParameterValue: TypeAlias = bool | int | float | str

BYTES = "BYTES"

#: Parameter by which a request chooses the engine that runs it, and by which its response says which one did.
ENGINE_PARAMETER = "hone_engine"

#: Datatype of the protocol -> numpy dtype. BYTES has object items and no fixed size.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    BYTES: np.dtype(np.object_),
}

#: Largest number of items a shape may claim; more cannot be addressed by the protocol's signed 64-bit sizes.
MAX_ELEMENTS = 2**63 - 1


def num_elements(shape: Sequence[int]) -> int:
    """Product of the dimensions, in unbounded integers (an overflow is the caller's to refuse)."""
    return math.prod(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as an engine sees it: -1 stands for any size, the batch dimension included."""

    name: str
    datatype: str
    shape: Shape


@dataclass(slots=True)
class RegionSlice:
    """A place in a registered shared-memory region."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class InferInput:
    """One decoded input. `data` has the shape the client gave (views over received bytes where possible)."""

    name: str
    datatype: str
    shape: Shape
    data: Array


@dataclass(slots=True)
class RequestedOutput:
    """What a client asks of one output. `classification` > 0 asks for the top classes instead of the tensor."""

    name: str
    classification: int = 0
    binary: bool = False
    region: RegionSlice | None = None


@dataclass(slots=True)
class InferRequest:
    """One inference, decoded. `timeout_us` 0 means none; `priority` 0 means the model's default."""

    model_name: str
    model_version: str
    id: str
    inputs: dict[str, InferInput]
    outputs: list[RequestedOutput]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    protocol: str = ""
    received_ns: int = 0
    """`time.monotonic_ns()` when the front end had the whole request."""
    traceparent: str | None = None


@dataclass(slots=True)
class InferOutput:
    """One output, in the order asked for. `region` is set when the bytes are to go to shared memory."""

    name: str
    datatype: str
    shape: Shape
    data: Array
    binary: bool = False
    region: RegionSlice | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class InferResponse:
    model_name: str
    model_version: str
    id: str
    outputs: list[InferOutput]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output as clients see it: the leading -1 of batching models included."""

    name: str
    datatype: str
    shape: Shape
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of the repository index: state is UNKNOWN, READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class SharedMemoryAccess(Protocol):
    """What codecs need of registered shared-memory regions."""

    def view(self, place: RegionSlice) -> memoryview:
        """Readable and writable view of the place. Raises NotFound (unknown region), InvalidRequest (out of range)."""


class EngineInstance(Protocol):
    """An engine as one executor thread uses it; never called by two threads at once."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run once. Inputs are C-contiguous; the arrays returned own their memory or keep its owner alive, and do not
        overlap the inputs. Raises EngineError."""


class Engine(Protocol):
    """Something that can run one model version on one device. Thread-safe but for `close`, which comes last."""

    kind: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    initializers: tuple[TensorSpec, ...]
    """Constants that a request may override, by giving an input of that name."""
    is_steady: bool
    """Whether inputs of the same shapes always mean the same work, whatever they hold, and all of it on the CPU."""

    def instantiate(self) -> EngineInstance:
        """A new instance for the calling executor thread; weights are shared between instances."""

    def close(self) -> None:
        """Give memory back. Called once, when no instance is running."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """What a load request may carry: a config in JSON form, and files by their path inside the model's folder."""

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered system shared-memory region."""

    name: str
    key: str
    offset: int
    byte_size: int
