"""A service behind the gRPC front end, without models: what it answers is written by each test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from hone.config import Settings
from hone.errors import AlreadyExists, InvalidRequest, ModelNotFound, NotFound
from hone.frontends.grpc import GrpcServer
from hone.frontends.grpc_stream import StreamLimits
from hone.protos import config_pb, service_pb
from hone.types import (
    IndexEntry,
    InferOutput,
    InferRequest,
    InferResponse,
    LoadParameters,
    ModelMetadata,
    RegionSlice,
    RegionStatus,
    ServerMetadata,
    TensorMetadata,
)

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


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
    def __init__(self, name: str, service: "FakeService") -> None:
        self.name = name
        self._service = service

    def __enter__(self) -> "FakeLease":
        self._service.num_leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._service.num_leases -= 1


Answer = Callable[[InferRequest], Awaitable[InferResponse]]


async def echo(request: InferRequest) -> InferResponse:
    """Every input comes back under its own name; outputs asked for into regions are written there."""
    outputs = []
    regions = {wanted.name: wanted.region for wanted in request.outputs}
    for tensor in request.inputs.values():
        outputs.append(
            InferOutput(tensor.name, tensor.datatype, tensor.shape, tensor.data, region=regions.get(tensor.name))
        )
    return InferResponse(
        request.model_name, request.model_version or "1", request.id, outputs, dict(request.parameters)
    )


class FakeService:
    """Implements what the front end uses of `InferenceService`. It knows one model, `identity`, version 1."""

    def __init__(self, answer: Answer = echo) -> None:
        self.answer = answer
        self.regions = FakeRegions()
        self.requests: list[InferRequest] = []
        self.calls: list[tuple[str, Any]] = []
        self.num_leases = 0
        self.num_cancelled = 0
        self.is_ready = True
        self.changed = asyncio.Event()
        """Set whenever a request arrives or is cancelled; tests wait for it with `until`."""

    def lease(self, name: str, version: str) -> FakeLease:
        if name != "identity" or version not in ("", "1"):
            raise ModelNotFound(name, int(version) if version else None)
        return FakeLease(name, self)

    async def infer(self, lease: FakeLease, request: InferRequest) -> InferResponse:
        assert self.num_leases > 0
        assert lease.name == request.model_name
        self.requests.append(request)
        self.changed.set()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.changed.set()
            raise

    async def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for `condition`, which changes only with arrivals and cancellations."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str) -> bool:
        with self.lease(name, version):
            return self.is_ready

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "1.2.3", ("classification", "logging"))

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        with self.lease(name, version):
            return ModelMetadata(
                name,
                ("1", "3"),
                "onnxruntime_onnx",
                (TensorMetadata("INPUT0", "FP32", (-1, 16)),),
                (TensorMetadata("OUTPUT0", "BYTES", (-1,)),),
            )

    def model_config(self, name: str, version: str) -> config_pb.ModelConfig:
        with self.lease(name, version):
            return config_pb.ModelConfig(name=name, max_batch_size=8)

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        self.calls.append(("statistics", (name, version)))
        if name not in ("", "identity"):
            raise InvalidRequest(f"requested model '{name}' is not available")
        durations = {
            key: {"count": index, "ns": index * 1000}
            for index, key in enumerate(
                ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"), start=1
            )
        }
        durations |= {"cache_hit": {"count": 0, "ns": 0}, "cache_miss": {"count": 0, "ns": 0}}
        return [
            {
                "name": "identity",
                "version": "1",
                "last_inference": 1_700_000_000_000,
                "inference_count": 7,
                "execution_count": 3,
                "inference_stats": durations,
                "response_stats": {},
                "batch_stats": [
                    {
                        "batch_size": 4,
                        "compute_input": {"count": 1, "ns": 10},
                        "compute_infer": {"count": 1, "ns": 20},
                        "compute_output": {"count": 1, "ns": 30},
                    }
                ],
                "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 2**40}],
            }
        ]

    def index(self, ready: bool = False) -> list[IndexEntry]:
        entries = [IndexEntry("identity", "1", "READY", ""), IndexEntry("broken", "2", "UNAVAILABLE", "no such file")]
        return entries[:1] if ready else entries

    async def load(self, name: str, parameters: LoadParameters) -> None:
        self.calls.append(("load", (name, parameters)))
        if name == "broken":
            raise InvalidRequest("load failed for model 'broken': version 1 is at UNAVAILABLE state: why;")

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self.calls.append(("unload", (name, unload_dependents)))

    def trace_settings(self, model: str = "") -> dict[str, list[str]]:
        self.calls.append(("trace_settings", model))
        return {"trace_level": ["TIMESTAMPS"], "trace_rate": ["1000"]}

    def update_trace_settings(self, model: str, settings: dict[str, list[str] | None]) -> dict[str, list[str]]:
        self.calls.append(("update_trace_settings", (model, settings)))
        return {name: value or ["1000"] for name, value in settings.items()}

    def log_settings(self) -> dict[str, bool | int | str]:
        return {"log_info": True, "log_verbose_level": 2, "log_format": "default"}

    def update_log_settings(self, settings: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        self.calls.append(("update_log_settings", settings))
        return {**self.log_settings(), **settings}

    def region_statuses(self, name: str = "") -> list[RegionStatus]:
        return [RegionStatus("region", "/key", 8, 2**33)]

    def register_region(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.calls.append(("register_region", (name, key, offset, byte_size)))
        if name == "taken":
            raise AlreadyExists("shared memory region 'taken' already in manager")

    def unregister_region(self, name: str) -> None:
        self.calls.append(("unregister_region", name))


@asynccontextmanager
async def serving(
    service: FakeService, *, grace: float = 5, stream_limits: StreamLimits | None = None, **settings: Any
) -> AsyncIterator[GrpcServer]:
    """A front end of `service` on a free port."""
    server = GrpcServer(
        service,  # type: ignore[arg-type]
        Settings(grpc_port=0, **settings),
        stream_limits=stream_limits,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace)


@asynccontextmanager
async def connected(
    server: GrpcServer, options: tuple[tuple[str, Any], ...] = UNLIMITED
) -> AsyncIterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    """tritonclient's generated stub, connected to `server`."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer_request(array: np.ndarray | None = None, **fields: Any) -> Any:
    """A ModelInferRequest of one FP32 input for `identity`."""
    data = np.arange(16, dtype=np.float32).reshape(1, 16) if array is None else array
    fields.setdefault("model_name", "identity")
    request = service_pb.ModelInferRequest(**fields)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=data.shape)
    request.raw_input_contents.append(data.tobytes())
    return request
