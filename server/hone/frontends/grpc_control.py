"""The calls beside inference: health, metadata, configuration, statistics, repository, shared memory, settings."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from hone.errors import Unsupported
from hone.frontends import grpc_messages as messages
from hone.frontends.grpc_codec import parse
from hone.frontends.grpc_metadata import Handler
from hone.frontends.grpc_status import Context, abort
from hone.protos import service_pb
from hone.serving.service import InferenceService

log = logging.getLogger(__name__)

Answer = Callable[[Any], Awaitable[Any]]


def control_handlers(service: InferenceService) -> dict[str, Handler]:
    """Method name -> handler of bytes, for every method but ModelInfer and ModelStreamInfer.

    Methods of `_Control` carry the names of the protocol's; the message types follow from those.
    """
    control = _Control(service)
    return {
        method.name: _handler(method.name, service_pb.__dict__[method.input_type.name], getattr(control, method.name))
        for method in service_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
        if not method.name.startswith(("ModelInfer", "ModelStreamInfer"))
    }


def _handler(method: str, message_type: Any, answer: Answer) -> Handler:
    async def handle(message: bytes, context: Context) -> bytes:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", method)
        try:
            response = await answer(parse(message_type, message))
            encoded: bytes = response.SerializeToString()
            return encoded
        except Exception as problem:
            await abort(context, problem, method)

    return handle


class _Control:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def ServerLive(self, _request: Any) -> Any:
        return service_pb.ServerLiveResponse(live=self._service.live())

    async def ServerReady(self, _request: Any) -> Any:
        return service_pb.ServerReadyResponse(ready=self._service.ready())

    async def ModelReady(self, request: Any) -> Any:
        return service_pb.ModelReadyResponse(ready=self._service.model_ready(request.name, request.version))

    async def ServerMetadata(self, _request: Any) -> Any:
        return messages.server_metadata(self._service.server_metadata())

    async def ModelMetadata(self, request: Any) -> Any:
        return messages.model_metadata(self._service.model_metadata(request.name, request.version))

    async def ModelConfig(self, request: Any) -> Any:
        return messages.model_config(self._service.model_config(request.name, request.version))

    async def ModelStatistics(self, request: Any) -> Any:
        return messages.model_statistics(self._service.statistics(request.name, request.version))

    async def RepositoryIndex(self, request: Any) -> Any:
        messages.refuse_repository_name(request)
        return messages.repository_index(self._service.index(request.ready))

    async def RepositoryModelLoad(self, request: Any) -> Any:
        messages.refuse_repository_name(request)
        await self._service.load(request.model_name, messages.load_parameters(request))
        return service_pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any) -> Any:
        messages.refuse_repository_name(request)
        await self._service.unload(request.model_name, messages.unload_dependents(request))
        return service_pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(self, request: Any) -> Any:
        return messages.region_statuses(self._service.region_statuses(request.name))

    async def SystemSharedMemoryRegister(self, request: Any) -> Any:
        self._service.register_region(request.name, request.key, request.offset, request.byte_size)
        return service_pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any) -> Any:
        self._service.unregister_region(request.name)
        return service_pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, _request: Any) -> Any:
        raise _no_cuda_shared_memory()

    async def CudaSharedMemoryRegister(self, _request: Any) -> Any:
        raise _no_cuda_shared_memory()

    async def CudaSharedMemoryUnregister(self, _request: Any) -> Any:
        raise _no_cuda_shared_memory()

    async def TraceSetting(self, request: Any) -> Any:
        updates = messages.trace_updates(request)
        if updates:
            return messages.trace_settings(self._service.update_trace_settings(request.model_name, updates))
        return messages.trace_settings(self._service.trace_settings(request.model_name))

    async def LogSettings(self, request: Any) -> Any:
        updates = messages.log_updates(request)
        if updates:
            return messages.log_settings(self._service.update_log_settings(updates))
        return messages.log_settings(self._service.log_settings())


def _no_cuda_shared_memory() -> Unsupported:
    return Unsupported("CUDA shared memory is not supported by this server, use system shared memory")
