"""The gRPC front end: grpc.aio with generic handlers of raw messages, one table of methods, no interceptors."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any

# gRPC 1.85 hands every event of a server's sockets through threads of its own; the poller it had before needs one hand
# less (docs/decisions/0005-grpc-polling.md). Read once, when the library is loaded; what the user set stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

import grpc
import grpc.aio

from hone.config import Settings
from hone.frontends.grpc_control import control_handlers
from hone.frontends.grpc_health import SERVICE as HEALTH_SERVICE
from hone.frontends.grpc_health import HealthHandler
from hone.frontends.grpc_infer import InferHandler
from hone.frontends.grpc_metadata import CallHeaders, Restriction, restrictions
from hone.frontends.grpc_stream import StreamHandler, StreamLimits
from hone.protos import service_pb
from hone.serving.service import InferenceService

SERVICE: str = service_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

#: gRPC's numbers of the levels of `--grpc-infer-response-compression-level`; which algorithm a level means depends on
#: what the client accepts.
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


class GrpcServer:
    """Serves `service` at the address in the settings from `start` to `stop`; `port` is where it listens."""

    def __init__(
        self, service: InferenceService, settings: Settings, *, stream_limits: StreamLimits | None = None
    ) -> None:
        self._service = service
        self._settings = settings
        self._stream_limits = stream_limits or StreamLimits()
        self._server: grpc.aio.Server | None = None
        self._streams: StreamHandler | None = None
        self._health: HealthHandler | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and serve. Raises OSError: address taken or not ours, certificate or key unusable."""
        settings = self._settings
        headers = CallHeaders(settings)
        infer = InferHandler(self._service, headers, settings.grpc_max_message_size)
        self._streams = StreamHandler(self._service, headers, settings.grpc_max_message_size, self._stream_limits)
        self._health = HealthHandler(self._service)
        keys = restrictions(settings)
        unary = {"ModelInfer": infer.model_infer, **control_handlers(self._service)}
        methods = {name: grpc.unary_unary_rpc_method_handler(_guarded(keys, name, unary[name])) for name in unary}
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            _guarded(keys, "ModelStreamInfer", self._streams.model_stream_infer)
        )
        health = {
            "Check": grpc.unary_unary_rpc_method_handler(_guarded(keys, "Check", self._health.check)),
            "Watch": grpc.unary_stream_rpc_method_handler(_guarded(keys, "Watch", self._health.watch)),
        }
        server = grpc.aio.server(
            handlers=(
                grpc.method_handlers_generic_handler(SERVICE, methods),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            ),
            options=_options(settings),
        )
        self.port = _bind(server, settings)
        await server.start()
        self._server = server

    async def stop(self, grace: float) -> None:
        """Accept no new calls; those in flight get `grace` seconds, and are cancelled after. Streams answer what they
        have read, then end with UNAVAILABLE. Safe to call twice, and before `start`."""
        if self._server is None or self._streams is None or self._health is None:
            return
        self._streams.close()
        self._health.close()
        await self._server.stop(grace)


def _guarded(keys: dict[str, Restriction], method: str, handler: Any) -> Any:
    return keys[method].guard(method, handler) if method in keys else handler


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.grpc_max_message_size),
        ("grpc.max_send_message_length", settings.grpc_max_message_size),
        ("grpc.default_compression_level", _COMPRESSION_LEVELS[settings.grpc_infer_response_compression_level]),
        # Without this a second server takes every other connection of the first, in silence.
        ("grpc.so_reuseport", 0),
        # Clients may keep calls alive with a ping every ten seconds; Triton's limit of five minutes ends the
        # connections of those that do. The server's own pings find clients that are gone without a word.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 0),
    ]


def _bind(server: grpc.aio.Server, settings: Settings) -> int:
    host, port = settings.grpc_address, settings.grpc_port
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    credentials = _credentials(settings) if settings.grpc_use_ssl else None
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as problem:
        raise _bind_error(host, port, address) from problem
    if not bound:
        raise _bind_error(host, port, address)
    return bound


def _bind_error(host: str, port: int, address: str) -> OSError:
    """gRPC says only that it failed: ask the system for the reason."""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
    except OSError as reason:
        return OSError(reason.errno, f"gRPC cannot listen on {address}: {reason.strerror}")
    return OSError(f"gRPC cannot listen on {address}")


def _credentials(settings: Settings) -> grpc.ServerCredentials:
    """Raises OSError where a file cannot be read, or certificate and key do not belong together."""
    certificate, key = settings.grpc_server_cert, settings.grpc_server_key
    assert certificate is not None and key is not None, "Settings sees to it"
    _check_pair(certificate, key)
    root = settings.grpc_root_cert.read_bytes() if settings.grpc_root_cert is not None else None
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=root,
        require_client_auth=settings.grpc_use_ssl_mutual,
    )


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC takes any pair of files, and then fails each handshake: find out now."""

    def no_password() -> str:
        raise OSError("grpc_server_key: the private key is encrypted, expected one without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as problem:
        raise OSError(
            f"grpc_server_cert and grpc_server_key: expected a PEM certificate and its private key: {problem.reason}"
        ) from problem
