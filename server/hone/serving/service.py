"""The one core that both front ends call: inference, and everything clients may ask about models and server.

Every method runs on the event loop and raises HoneError subclasses only; none of them blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hone import __version__
from hone.errors import HoneError, InvalidRequest, QueueFull, QueueTimeout, Unavailable, Unsupported
from hone.logs import LogControl
from hone.protos import config_pb
from hone.repository import check_model_name
from hone.serving.classification import classify
from hone.serving.execution import Pending
from hone.serving.lifecycle import ModelLifecycle
from hone.serving.model import ServedModel
from hone.serving.registry import ModelRegistry
from hone.serving.reply import Reply
from hone.serving.shared_memory import SharedMemoryRegions
from hone.specialization import TuningControl
from hone.strings import to_length_prefixed
from hone.tracing import TraceControl, Tracer
from hone.types import (
    BYTES,
    ENGINE_PARAMETER,
    Array,
    IndexEntry,
    InferOutput,
    InferRequest,
    InferResponse,
    LoadParameters,
    ModelMetadata,
    RegionStatus,
    RequestedOutput,
    ServerMetadata,
)

_log = logging.getLogger(__name__)

#: Longest that the answer to a tuning action waits for the action to take effect.
_ACTION_SECONDS = 5.0

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "tuning",
)


class InferenceService:
    """See the module. `known_names` lists the models on disk for the index (a cheap look, no parsing)."""

    def __init__(
        self,
        *,
        server_name: str,
        registry: ModelRegistry,
        lifecycle: ModelLifecycle,
        regions: SharedMemoryRegions,
        log_control: LogControl,
        trace_control: TraceControl,
        tracer: Tracer | None,
        control_mode: str,
        strict_readiness: bool,
        ready_requires_model: bool,
        known_names: Callable[[], list[str]],
        tuning: TuningControl | None = None,
        broken: Callable[[], str] = lambda: "",
    ) -> None:
        """`broken`: why only a new process can serve as it should; empty while this one can."""
        self.regions = regions
        self._server_name = server_name
        self._registry = registry
        self._lifecycle = lifecycle
        self._log_control = log_control
        self._trace_control = trace_control
        self._tracer = tracer
        self._control_mode = control_mode
        self._strict_readiness = strict_readiness
        self._ready_requires_model = ready_requires_model
        self._known_names = known_names
        self._tuning = tuning
        self._broken = broken
        self._started = False
        self._stopping = False

    # --- inference

    def lease(self, name: str, version: str) -> ServedModel:
        """Hold a model version while a request is decoded, run and answered: `with service.lease(...) as lease`.

        Raises ModelNotFound, NoVersionAvailable, VersionNotReady, InvalidRequest, ServerStopping.
        """
        return self._registry.lease(name, version)

    async def infer(self, lease: ServedModel, request: InferRequest) -> InferResponse:
        """Run one request. Cancelling the awaiting task cancels the request.

        Raises InvalidRequest, QueueFull, QueueTimeout, EngineError and what shared memory raises.
        """
        if not request.received_ns:
            request.received_ns = time.monotonic_ns()
        reply = Reply(lease.loop)
        pending: Pending | None = None
        try:
            pending = lease.admit(request, reply)
            lease.scheduler.submit(pending)
            response = self._respond(lease, request, await reply)
            if pending.choice:
                response.parameters[ENGINE_PARAMETER] = pending.engine
        except asyncio.CancelledError:
            if pending is not None:
                lease.scheduler.cancel(pending)
            self._record_failure(lease, request, pending, "CANCELED", "cancelled by the client")
            raise
        except HoneError as problem:
            self._record_failure(lease, request, pending, _reason(problem), str(problem))
            raise
        ended_ns = time.monotonic_ns()
        lease.statistics.record_request(
            request.protocol,
            pending.batch_size,
            ended_ns - request.received_ns,
            pending.queue_ns,
            pending.input_ns,
            pending.infer_ns,
            pending.output_ns,
            pending.engine,
        )
        if self._tracer is not None:
            _trace(self._tracer, lease, request, pending, ended_ns)
        if _log.isEnabledFor(logging.DEBUG):
            _log_request(lease, request, ended_ns, "answered")
        return response

    def _record_failure(
        self, lease: ServedModel, request: InferRequest, pending: Pending | None, reason: str, problem: str
    ) -> None:
        ended_ns = time.monotonic_ns()
        lease.statistics.record_failure(request.protocol, reason, ended_ns - request.received_ns)
        if self._tracer is not None:
            _trace(self._tracer, lease, request, pending, ended_ns, error=problem)
        if _log.isEnabledFor(logging.DEBUG):
            _log_request(lease, request, ended_ns, f"failed: {problem}")

    def _respond(self, lease: ServedModel, request: InferRequest, arrays: dict[str, Array]) -> InferResponse:
        if request.outputs:
            outputs = [self._output(lease, wanted, arrays[wanted.name]) for wanted in request.outputs]
        else:
            outputs = [
                InferOutput(name, lease.output_datatype(name), lease.output_shape(name, array), array)
                for name, array in arrays.items()
            ]
        return InferResponse(lease.name, lease.version_text, request.id, outputs)

    def _output(self, lease: ServedModel, wanted: RequestedOutput, array: Array) -> InferOutput:
        name = wanted.name
        if wanted.classification:
            classes = classify(name, array, wanted.classification, lease.labels(name), batched=lease.batching)
            output = InferOutput(name, BYTES, classes.shape, classes, binary=wanted.binary)
        else:
            shape = lease.output_shape(name, array)
            output = InferOutput(name, lease.output_datatype(name), shape, array, binary=wanted.binary)
        if wanted.region is not None:
            data = _wire_bytes(output.data)
            place = wanted.region
            if len(data) > place.byte_size:
                raise InvalidRequest(
                    f"shared memory size specified with the request for output '{name}' ({place.byte_size} bytes)"
                    f" should be at least {len(data)} bytes to hold the results"
                )
            view = self.regions.view(place)
            view[: len(data)] = data
            place.byte_size = len(data)
            output.region = place
        return output

    # --- health and metadata

    @property
    def broken(self) -> str:
        """Why only a new process can serve as it should (requests are answered all the same); empty while this can."""
        return self._broken()

    def live(self) -> bool:
        """Whether a restart would change nothing."""
        return not self._broken()

    def ready(self) -> bool:
        """Started, not stopping nor broken, and (when strict) every model meant to be served is ready."""
        if not self._started or self._stopping or self._broken():
            return False
        if self._ready_requires_model and not any(True for _ in self._registry.served()):
            return False
        return not self._strict_readiness or self._registry.all_ready()

    def model_ready(self, name: str, version: str) -> bool:
        """Raises ModelNotFound for names and versions that are not known at all."""
        try:
            self._registry.find(name, version)
        except Unavailable:
            return False
        return not self._stopping

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._server_name, __version__, EXTENSIONS)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        model = self._registry.find(name, version)
        entry = self._registry.entry(name)
        served = entry.served if entry is not None else {}
        versions = (model.version_text,) if version else tuple(str(number) for number in sorted(served))
        metadata = model.metadata
        return ModelMetadata(name, versions, metadata.platform, metadata.inputs, metadata.outputs)

    def model_config(self, name: str, version: str) -> config_pb.ModelConfig:
        return self._registry.find(name, version).config

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Entries of Triton's `model_stats`. Raises InvalidRequest for unknown models and versions (row 65)."""
        if not name:
            return [model.statistics.to_dict() for model in self._registry.served()]
        entry = self._registry.entry(name)
        if entry is None or not entry.served:
            raise InvalidRequest(f"requested model '{name}' is not available")
        if not version:
            return [entry.served[number].statistics.to_dict() for number in sorted(entry.served)]
        try:
            return [self._registry.find(name, version).statistics.to_dict()]
        except (Unavailable, HoneError) as problem:
            raise InvalidRequest(f"requested model version is not available for model '{name}'") from problem

    # --- repository

    def index(self, ready: bool = False) -> list[IndexEntry]:
        return self._registry.index([] if ready else self._known_names(), ready_only=ready)

    async def load(self, name: str, parameters: LoadParameters) -> None:
        """Raises what `ModelLifecycle.load` raises, and Unavailable outside explicit mode."""
        self._check_control()
        check_model_name(name)
        await self._lifecycle.load(name, parameters)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unknown models are no error. There are no ensembles yet, so no model has dependents."""
        self._check_control()
        check_model_name(name)
        await self._lifecycle.unload(name)

    def _check_control(self) -> None:
        if self._control_mode != "explicit":
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled"
                if self._control_mode == "poll"
                else "explicit model load / unload is not allowed with model control mode 'none'"
            )
        if self._stopping:
            raise Unavailable("Server exiting")

    # --- tuning

    def tuning_status(self, model: str, version: str = "") -> dict[str, Any]:
        """State, progress, buckets and history (docs/tuning.md). Raises ModelNotFound and what `find` raises."""
        served = self._registry.find(model, version)
        if self._tuning is None:
            return {
                "model": model,
                "version": served.version_text,
                "state": "off",
                "progress": 0.0,
                "reason": "the server was started with --tuning=off",
                "job": {},
                "buckets": [],
                "history": [],
            }
        return self._tuning.status(model, served.version_text)

    async def tuning_action(self, model: str, version: str, action: str) -> dict[str, Any]:
        """Have the tuner act; the status when that has taken effect, or at last after some seconds (the tuner may be
        loading a module). Raises Unavailable where tuning is off, on this server or for the model, InvalidRequest."""
        served = self._registry.find(model, version)
        if self._tuning is None:
            raise Unavailable("tuning is off on this server: start it with --tuning=on")
        done = asyncio.wrap_future(self._tuning.act(model, served.version_text, action))
        await asyncio.wait([done], timeout=_ACTION_SECONDS)
        if done.done():
            done.result()
        return self._tuning.status(model, served.version_text)

    # --- settings

    def trace_settings(self, model: str = "") -> dict[str, list[str]]:
        self._check_traced(model)
        return self._trace_control.settings(model)

    def update_trace_settings(self, model: str, settings: Mapping[str, list[str] | None]) -> dict[str, list[str]]:
        self._check_traced(model)
        return self._trace_control.update(model, settings)

    def log_settings(self) -> dict[str, bool | int | str]:
        return self._log_control.settings()

    def update_log_settings(self, settings: Mapping[str, bool | int | str]) -> dict[str, bool | int | str]:
        return self._log_control.update(settings)

    def _check_traced(self, model: str) -> None:
        if model and self._registry.entry(model) is None:
            raise InvalidRequest(f"Request for unknown model : {model}")

    # --- shared memory

    def region_statuses(self, name: str = "") -> list[RegionStatus]:
        return self.regions.statuses(name)

    def register_region(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.regions.register(name, key, offset, byte_size)

    def unregister_region(self, name: str) -> None:
        self.regions.unregister(name)

    # --- life

    def start(self) -> None:
        """The first load has ended: readiness is now up to the models."""
        self._started = True

    def stop(self) -> None:
        """Not ready from now on; requests already leased go on, new ones are refused."""
        self._stopping = True

    def refuse(self) -> None:
        """Refuse new inference requests."""
        self._registry.stop()


def _log_request(lease: ServedModel, request: InferRequest, ended_ns: int, outcome: str) -> None:
    _log.debug(
        "request %s",
        outcome,
        extra={
            "model": lease.name,
            "version": lease.version_text,
            "request_id": request.id,
            "protocol": request.protocol,
            "duration_us": (ended_ns - request.received_ns) // 1000,
        },
    )


def _trace(
    tracer: Tracer,
    lease: ServedModel,
    request: InferRequest,
    pending: Pending | None,
    ended_ns: int,
    error: str | None = None,
) -> None:
    queued_at_ns = pending.queued_at_ns if pending is not None else 0
    ran = pending is not None and pending.queue_ns > 0
    compute_ns = queued_at_ns + pending.queue_ns if pending is not None and ran else 0
    tracer.record(
        request,
        lease.version_text,
        queue_start_ns=queued_at_ns,
        compute_start_ns=compute_ns,
        compute_end_ns=compute_ns + pending.input_ns + pending.infer_ns + pending.output_ns if pending and ran else 0,
        end_ns=ended_ns,
        error=error,
    )


def _reason(problem: HoneError) -> str:
    """Triton's failure reason of `nv_inference_request_failure`."""
    if isinstance(problem, (QueueFull, QueueTimeout, Unavailable)):
        return "REJECTED"
    if isinstance(problem, (InvalidRequest, Unsupported)):
        return "OTHER"
    return "BACKEND"


def _wire_bytes(array: Array) -> bytes | memoryview:
    """The tensor as the protocol writes it."""
    if array.dtype == np.object_:
        return to_length_prefixed(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
