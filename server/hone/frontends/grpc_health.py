"""The standard `grpc.health.v1.Health`, which Kubernetes and proxies ask."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from hone.errors import NotFound
from hone.frontends.grpc_codec import parse
from hone.frontends.grpc_status import Context, abort
from hone.protos import service_pb
from hone.serving.service import InferenceService

SERVICE = "grpc.health.v1.Health"

#: "" is the server as a whole; both follow its readiness.
_KNOWN_SERVICES = frozenset(("", service_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name))

_Status = health_pb2.HealthCheckResponse

#: Readiness has no event to wait on (a model anywhere may change it); a watcher hears of a change this late at most.
WATCH_PERIOD_SECONDS = 0.5


class HealthHandler:
    def __init__(self, service: InferenceService, watch_period_seconds: float = WATCH_PERIOD_SECONDS) -> None:
        self._service = service
        self._watch_period_seconds = watch_period_seconds
        self._closing = asyncio.Event()

    async def check(self, message: bytes, context: Context) -> bytes:
        try:
            request = parse(health_pb2.HealthCheckRequest, message)
            if request.service not in _KNOWN_SERVICES:
                raise NotFound(f"unknown service '{request.service}'")
            return self._response(request.service)
        except Exception as problem:
            await abort(context, problem, "Check")

    async def watch(self, message: bytes, context: Context) -> None:
        """Tell the status now and at every change. A service that is not known stays on the line, as specified."""
        try:
            service = parse(health_pb2.HealthCheckRequest, message).service
        except Exception as problem:
            await abort(context, problem, "Watch")
        told = None
        while True:
            response = self._response(service)
            if response != told:
                await context.write(response)
                told = response
            if self._closing.is_set():
                return
            try:
                async with asyncio.timeout(self._watch_period_seconds):
                    await self._closing.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Tell every watcher NOT_SERVING, and hang up."""
        self._closing.set()

    def _response(self, service: str) -> bytes:
        if service not in _KNOWN_SERVICES:
            status: Any = _Status.SERVICE_UNKNOWN
        elif self._service.ready() and not self._closing.is_set():
            status = _Status.SERVING
        else:
            status = _Status.NOT_SERVING
        encoded: bytes = _Status(status=status).SerializeToString()
        return encoded
