"""What the metadata of a call means: keys of restricted groups, forwarded headers, the trace's parent."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hone.config import Settings
from hone.errors import Restricted
from hone.frontends.grpc_status import Context, abort
from hone.types import ENGINE_PARAMETER, ParameterValue

Handler = Callable[[Any, Context], Awaitable[Any]]

#: Group of `--grpc-restricted-protocol` -> the methods it covers.
RESTRICTED_METHODS: dict[str, tuple[str, ...]] = {
    "tuning": (),  # its endpoints are HTTP's alone; see `CallHeaders.check`
    "health": ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}


class Restriction:
    """One key in front of some methods."""

    def __init__(self, header: str, value: str) -> None:
        self._header = header
        self._value = value.encode()

    def check(self, context: Context) -> None:
        """Raises Restricted unless the call carries the key. The comparison takes the same time wherever it fails."""
        admitted = False
        for key, value in context.invocation_metadata() or ():
            if key == self._header:
                admitted |= hmac.compare_digest(_bytes(value), self._value)
        if not admitted:
            raise Restricted(f"This protocol is restricted, expecting header '{self._header}'")

    def guard(self, method: str, handler: Handler) -> Handler:
        """The handler behind this key."""

        async def guarded(messages: Any, context: Context) -> Any:
            try:
                self.check(context)
            except Restricted as problem:
                await abort(context, problem, method)
            return await handler(messages, context)

        return guarded


def restrictions(settings: Settings) -> dict[str, Restriction]:
    """Method name -> its restriction; methods open to all are absent, and pay nothing."""
    return {
        method: Restriction(group.header, group.value)
        for group in settings.restricted_grpc
        for name in group.groups
        for method in RESTRICTED_METHODS[name]
    }


class CallHeaders:
    """What a request takes from its call's metadata: keys that match the pattern in full become parameters, and the
    traceparent is read where there is tracing. `wanted` is False where there is nothing to do."""

    def __init__(self, settings: Settings) -> None:
        pattern = settings.grpc_header_forward_pattern
        self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None
        self._traces = bool(settings.trace_otlp_endpoint)
        self.wanted = self._pattern is not None or self._traces
        tuning = (
            Restriction(group.header, group.value) for group in settings.restricted_grpc if "tuning" in group.groups
        )
        self._tuning = next(tuning, None)

    def check(self, parameters: Mapping[str, ParameterValue], context: Context) -> None:
        """Raises Restricted where a request steers what the group "tuning" guards, and its call lacks that key."""
        if self._tuning is not None and ENGINE_PARAMETER in parameters:
            self._tuning.check(context)

    def read(self, context: Context) -> tuple[dict[str, ParameterValue] | None, str | None]:
        """Headers to pass on as parameters, and the traceparent."""
        forwarded: dict[str, ParameterValue] = {}
        traceparent: str | None = None
        for key, value in _text_only(context.invocation_metadata() or ()):
            if self._traces and key == "traceparent":
                traceparent = value
            if self._pattern is not None and self._pattern.fullmatch(key):
                forwarded[key] = value
        return forwarded or None, traceparent


def _text_only(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[tuple[str, str]]:
    """Binary metadata (keys that end in -bin) has no form as a parameter."""
    return ((key, value) for key, value in metadata if isinstance(value, str))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
