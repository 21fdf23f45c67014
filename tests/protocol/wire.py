"""A request as the protocol means it, and its answer, apart from HTTP and gRPC."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np

#: Datatype of the protocol -> numpy dtype, written down again rather than taken from the server.
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": np.object_,
}
DATATYPES = tuple(DTYPES)
#: What JSON and typed contents cannot carry.
RAW_ONLY = ("FP16", "BF16")

ParameterValue = Any


@dataclass(frozen=True)
class Typed:
    """A gRPC parameter in a form of one's choice, e.g. Typed("uint64_param", 7)."""

    form: str
    value: Any


@dataclass
class Input:
    """One input; `data` is typed (JSON, or typed contents), `raw` binary. Any, all or none of the sources may be set:
    what is wrong with that is the server's to say. `field` overrides which typed contents carry `data`."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any = None
    raw: bytes | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    field: str = ""


@dataclass
class Output:
    """One requested output; `binary` None leaves the choice to the request (HTTP)."""

    name: str
    binary: bool | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass
class Tensor:
    """One output of an answer; `array` is None where the data went to shared memory."""

    datatype: str
    shape: tuple[int, ...]
    array: Any
    parameters: dict[str, Any]

    def tolist(self) -> Any:
        return self.array.tolist()


@dataclass
class Answer:
    """What came back. `status` is the HTTP status, or the name of the gRPC code; `error` "" means success."""

    protocol: str
    status: int | str
    error: str = ""
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status in (200, "OK")

    def __getitem__(self, output: str) -> Tensor:
        assert self.ok, f"{self.status}: {self.error}"
        return self.outputs[output]


def accepted(answer: Answer) -> Any:
    """The document of an answer that must be a success."""
    assert answer.ok, f"{answer.protocol}: {answer.status}: {answer.error}"
    return answer.document


def refused(answer: Answer, http: int, grpc: str, *fragments: str) -> str:
    """Assert that the answer is this error, and that its message has these fragments. Returns the message."""
    expected = http if answer.protocol == "http" else grpc
    assert answer.status == expected, f"{answer.protocol}: {answer.status}: {answer.error}"
    for fragment in fragments:
        assert fragment in answer.error, answer.error
    return answer.error


def invalid(answer: Answer, *fragments: str) -> str:
    return refused(answer, 400, "INVALID_ARGUMENT", *fragments)


class Client(Protocol):
    """What both clients can do. Every call returns an Answer, whatever the server said."""

    protocol: str

    def infer(
        self,
        model: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output] | None = None,
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        binary: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """`binary`: how an HTTP response is to carry outputs that do not say so themselves."""

    def live(self, headers: Mapping[str, str] | None = None) -> Answer: ...
    def ready(self, headers: Mapping[str, str] | None = None) -> Answer: ...
    def model_ready(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def server_metadata(self, headers: Mapping[str, str] | None = None) -> Answer: ...
    def metadata(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def config(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def statistics(self, model: str = "", version: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def index(self, ready: Any = None, repository: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def load(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        repository: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer: ...
    def unload(
        self,
        model: str,
        *,
        parameters: Mapping[str, ParameterValue] | None = None,
        repository: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer: ...
    def trace(
        self, model: str = "", settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Settings are lists of strings, or None to clear; none asks only."""

    def log(self, settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Answer: ...
    def register(
        self, region: str, key: str, byte_size: int, offset: int = 0, headers: Mapping[str, str] | None = None
    ) -> Answer: ...
    def unregister(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer: ...
    def regions(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        """Document: region name -> {key, offset, byte_size}."""

    def cuda(self, call: str, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        """`call` is status, register or unregister."""

    def close(self) -> None: ...


# --- tensors --------------------------------------------------------------------------------------------------------


def raw_bytes(datatype: str, array: Any) -> bytes:
    """An array as the protocol's binary form."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(item)) + item for item in np.asarray(array, np.object_).flat)
    return np.ascontiguousarray(array, DTYPES[datatype]).tobytes()


def from_raw(datatype: str, shape: Sequence[int], raw: bytes) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(raw, DTYPES[datatype]).reshape(shape)
    items = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        assert position + length <= len(raw), "an output's string runs past the end"
        items.append(raw[position : position + length])
        position += length
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array.reshape(shape)


def from_list(datatype: str, shape: Sequence[int], data: Any) -> Any:
    """From the flat or nested list of a JSON response."""
    if datatype != "BYTES":
        return np.array(data, DTYPES[datatype]).reshape(shape)
    array = np.empty(len(data), np.object_)
    array[:] = [item.encode() for item in data]
    return array.reshape(shape)


def raw_input(name: str, datatype: str, array: Any) -> Input:
    array = np.asarray(array, DTYPES[datatype])
    return Input(name, datatype, array.shape, raw=raw_bytes(datatype, array))


def typed_input(name: str, datatype: str, array: Any) -> Input:
    """BYTES items stay bytes here; each protocol writes them its way."""
    array = np.asarray(array, DTYPES[datatype])
    return Input(name, datatype, array.shape, data=array.reshape(-1).tolist())


FORMS = {"raw": raw_input, "typed": typed_input}


def sample(datatype: str, shape: Sequence[int]) -> Any:
    """Values that would show a wrong width, sign or byte order; extremes first."""
    count = int(np.prod(shape, dtype=np.int64))
    if datatype == "BYTES":
        items = [b"", "Grüße, 世界".encode(), b"plain", b'"quoted"\\ \n']
        array = np.empty(count, np.object_)
        array[:] = [items[i % len(items)] for i in range(count)]
        return array.reshape(shape)
    if datatype == "BOOL":
        return (np.arange(count) % 3 == 0).reshape(shape)
    dtype = DTYPES[datatype]
    if datatype in ("FP16", "FP32", "FP64", "BF16"):
        info = ml_dtypes.finfo(dtype)
        seeds = [float(info.max), float(info.min), float(info.tiny), -0.0, 1.5, -2.25]
    else:
        limits = np.iinfo(dtype)
        seeds = [int(limits.max), int(limits.min), 1, 2, 3]
    return np.array([seeds[i % len(seeds)] for i in range(count)], dtype).reshape(shape)
