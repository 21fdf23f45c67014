"""A service behind the HTTP front end, without models: what it answers is written by each test."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hone.errors import (
    AlreadyExists,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NoVersionAvailable,
    Unavailable,
    Unsupported,
    VersionNotReady,
    unexpected_output,
)
from hone.protos import config_pb
from hone.types import (
    NUMPY_DTYPES,
    IndexEntry,
    InferOutput,
    InferRequest,
    InferResponse,
    LoadParameters,
    ModelMetadata,
    ParameterValue,
    RegionSlice,
    RegionStatus,
    ServerMetadata,
    TensorMetadata,
)


class FakeRegions:
    """Named pieces of memory."""

    def __init__(self) -> None:
        self.memory: dict[str, bytearray] = {}

    def view(self, place: RegionSlice) -> memoryview:
        if place.region not in self.memory:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        memory = self.memory[place.region]
        if place.offset + place.byte_size > len(memory):
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        return memoryview(memory)[place.offset : place.offset + place.byte_size]


class FakeLease:
    def __init__(self, service: "FakeService", metadata: ModelMetadata, max_batch_size: int) -> None:
        self.metadata = metadata
        self.config = config_pb.ModelConfig(name=metadata.name, max_batch_size=max_batch_size)
        self.name = metadata.name
        self.version = "1"
        self._service = service

    def __enter__(self) -> "FakeLease":
        self._service.num_leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._service.num_leases -= 1


def model(name: str, inputs: list[tuple[str, str, tuple[int, ...]]]) -> ModelMetadata:
    """A model whose every input `X` comes back as output `X`."""
    tensors = tuple(TensorMetadata(*spec) for spec in inputs)
    return ModelMetadata(name, ("1",), "onnxruntime_onnx", tensors, tensors)


def models() -> dict[str, tuple[ModelMetadata, int]]:
    """Name -> metadata and max_batch_size."""
    known = {f"echo_{name.lower()}": (model(f"echo_{name.lower()}", [("IN", name, (-1,))]), 0) for name in NUMPY_DTYPES}
    known["batched"] = (model("batched", [("IN", "FP32", (-1, 4))]), 8)
    known["fixed"] = (model("fixed", [("IN", "FP32", (2, 3))]), 0)
    known["two"] = (model("two", [("A", "FP32", (-1,)), ("B", "INT32", (-1,))]), 0)
    known["grid"] = (model("grid", [("IN", "FP32", (-1, -1))]), 0)
    known["strings"] = (model("strings", [("IN", "BYTES", (-1, 1))]), 8)
    known["sentence"] = (model("sentence", [("IN", "BYTES", (2,))]), 0)
    known["none"] = (model("none", []), 0)
    return known


Answer = Callable[[InferRequest], Awaitable[InferResponse]]


@dataclass
class FakeService:
    """Implements what the front end uses of `InferenceService`. `loading`, `unloaded` and `stopped` are models that
    cannot answer; `fault` is raised by everything when set."""

    regions: FakeRegions = field(default_factory=FakeRegions)
    requests: list[InferRequest] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    answer: Answer | None = None
    fault: Exception | None = None
    is_live: bool = True
    is_ready: bool = True
    broken: str = ""
    num_leases: int = 0
    num_cancelled: int = 0
    allow_shm: bool = True
    explicit: bool = True
    response_parameters: dict[str, ParameterValue] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    models: dict[str, tuple[ModelMetadata, int]] = field(default_factory=models)
    statuses: dict[str, RegionStatus] = field(default_factory=dict)

    def _find(self, name: str, version: str) -> tuple[ModelMetadata, int]:
        if self.fault is not None:
            raise self.fault
        if name == "loading":
            raise VersionNotReady(name, 1)
        if name == "unloaded":
            raise NoVersionAvailable(name)
        if name not in self.models:
            raise ModelNotFound(name)
        if version not in {"", "1"}:
            raise ModelNotFound(name, int(version))
        return self.models[name]

    def lease(self, name: str, version: str) -> FakeLease:
        return FakeLease(self, *self._find(name, version))

    async def infer(self, lease: FakeLease, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        self.changed.set()
        if self.answer is None:
            return self.echo(request)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.changed.set()
            raise

    def echo(self, request: InferRequest) -> InferResponse:
        names = [output.name for output in request.outputs] or list(request.inputs)
        wanted = {output.name: output for output in request.outputs}
        outputs = []
        for name in names:
            if name not in request.inputs:
                raise unexpected_output(request.model_name, name)
            tensor = request.inputs[name]
            output = InferOutput(name, tensor.datatype, tensor.shape, tensor.data)
            if name in wanted:
                output.binary, output.region = wanted[name].binary, wanted[name].region
            if output.region is not None:
                data = tensor.data.tobytes()
                self.regions.view(output.region)[: len(data)] = data
                output.region.byte_size = len(data)
            outputs.append(output)
        return InferResponse(request.model_name, "1", request.id, outputs, dict(self.response_parameters))

    async def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for `condition`, which changes only with arrivals and cancellations."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def live(self) -> bool:
        return self.is_live

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str) -> bool:
        if name == "loading":
            return False
        self._find(name, version)
        return True

    def server_metadata(self) -> ServerMetadata:
        if self.fault is not None:
            raise self.fault
        return ServerMetadata("triton", "1.2.3", ("classification", "logging"))

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        return self._find(name, version)[0]

    def model_config(self, name: str, version: str) -> config_pb.ModelConfig:
        return config_pb.ModelConfig(name=name, max_batch_size=self._find(name, version)[1])

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        self.calls.append(("statistics", (name, version)))
        if name and name not in self.models:
            raise InvalidRequest(f"requested model '{name}' is not available")
        return [{"name": name or "identity", "version": "1", "inference_count": 3}]

    def index(self, ready: bool = False) -> list[IndexEntry]:
        self.calls.append(("index", ready))
        entries = [
            IndexEntry("identity", "1", "READY", ""),
            IndexEntry("broken", "1", "UNAVAILABLE", "no such file"),
            IndexEntry("idle", "", "", ""),
        ]
        return entries[:1] if ready else entries

    async def load(self, name: str, parameters: LoadParameters) -> None:
        self._check_control(name)
        if parameters.files and parameters.config is None:
            raise InvalidRequest("Load parameter 'config' must be specified for model file override")
        if parameters.config is not None:
            try:
                json.loads(parameters.config)
            except ValueError as problem:
                raise InvalidRequest(f"Invalid config override: {problem}") from problem
        self.calls.append(("load", (name, parameters)))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._check_control(name)
        self.calls.append(("unload", (name, unload_dependents)))

    def _check_control(self, name: str) -> None:
        if self.fault is not None:
            raise self.fault
        if not self.explicit:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        if not name.strip():
            raise InvalidRequest("Model name cannot be empty")

    def tuning_status(self, model: str, version: str = "") -> dict[str, Any]:
        self.lease(model, version)
        return {
            "model": model,
            "version": version or "1",
            "state": "off",
            "progress": 0.0,
            "reason": "",
            "buckets": [],
            "history": [],
        }

    async def tuning_action(self, model: str, version: str, action: str) -> dict[str, Any]:
        self.calls.append(("tuning", (model, version, action)))
        if action not in ("start", "retune", "pause", "cancel", "roll_back", "pin_baseline"):
            raise InvalidRequest(f"unknown action '{action}'")
        return self.tuning_status(model, version)

    def trace_settings(self, model: str = "") -> dict[str, list[str]]:
        return self.update_trace_settings(model, {})

    def update_trace_settings(self, model: str, settings: dict[str, list[str] | None]) -> dict[str, list[str]]:
        self.calls.append(("trace", (model, settings)))
        if model and model not in self.models:
            raise InvalidRequest(f"Request for unknown model : {model}")
        if "trace_file" in settings:
            raise Unsupported("trace file location can not be updated through network protocol")
        return {"trace_level": ["OFF"], "trace_rate": ["1000"], "trace_count": ["-1"]}

    def log_settings(self) -> dict[str, bool | int | str]:
        return {"log_file": "", "log_info": True, "log_verbose_level": 0}

    def update_log_settings(self, settings: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        self.calls.append(("logging", settings))
        if "log_file" in settings:
            raise Unsupported("log file location can not be updated through network protocol")
        return {**self.log_settings(), **settings}

    def region_statuses(self, name: str = "") -> list[RegionStatus]:
        self._check_shm()
        if name and name not in self.statuses:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return [status for key, status in self.statuses.items() if name in {"", key}]

    def register_region(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self._check_shm()
        if name in self.statuses:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if byte_size > 1 << 20:
            raise InvalidRequest(f"Invalid offset or byte_size for shared memory region '{name}'")
        self.statuses[name] = RegionStatus(name, key, offset, byte_size)
        self.regions.memory[name] = bytearray(byte_size)

    def unregister_region(self, name: str) -> None:
        self._check_shm()
        if name:
            self.statuses.pop(name, None)
        else:
            self.statuses.clear()

    def _check_shm(self) -> None:
        if not self.allow_shm:
            raise Unsupported("shared memory is not allowed on this server: start it with --allow-client-shm=true")
