"""Every setting of the server: one frozen model, read once in the CLI; nothing below reads the environment.

Sources, strongest first: command-line flags, `HONE_*` environment variables, a TOML file, the defaults here.
Names are Triton's flags with underscores where Triton has the flag. Each field's description is its manual page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: Groups of endpoints that `--http-restricted-api` and `--grpc-restricted-protocol` can put behind a key.
RESTRICTED_GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
    "tuning",
)

MIB = 1024 * 1024


class RestrictedGroup(BaseModel):
    """Endpoints that answer only when the request carries `header: value`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[str, ...]
    header: str
    value: str = Field(repr=False)

    @classmethod
    def parse(cls, text: str) -> RestrictedGroup:
        """Triton's form `<group>,<group>:<header>=<value>`. Raises ValueError naming what is wrong with it."""
        groups, colon, key = text.partition(":")
        header, equals, value = key.partition("=")
        names = tuple(name.strip() for name in groups.split(","))
        if not colon or not equals or not header or not value:
            raise ValueError(
                "expected '<group>[,<group>...]:<header>=<value>', e.g. 'model-repository:admin-key=secret'"
            )
        for name in names:
            if name not in RESTRICTED_GROUPS:
                raise ValueError(f"unknown group '{name}', expected one of {', '.join(RESTRICTED_GROUPS)}")
        return cls(groups=names, header=header.strip().lower(), value=value)


class Settings(BaseModel):
    """Settings of `hone serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # --- repository
    model_repository: tuple[Path, ...] = Field(
        default=(Path("model_repo"),), description="Folder of models; may be given several times."
    )
    model_control_mode: Literal["none", "poll", "explicit"] = Field(
        default="none", description="none: load all at start; poll: follow the folder; explicit: load by request."
    )
    repository_poll_secs: float = Field(
        default=2.0, allow_inf_nan=False, gt=0, description="Seconds between two looks at the repository in poll mode."
    )
    load_model: tuple[str, ...] = Field(
        default=(), description="Model to load at start in explicit mode; may be given several times; '*' for all."
    )
    model_config_name: str = Field(default="", description="Use configs/NAME.pbtxt of each model that has it.")
    model_load_thread_count: int = Field(default=4, ge=1, le=64, description="Models loaded at the same time.")
    model_load_retry_count: int = Field(default=0, ge=0, le=10, description="Times a failed load is tried again.")
    allow_file_override: bool = Field(default=False, description="Let load requests bring model files along.")
    default_max_batch_size: int = Field(
        default=4, ge=0, description="max_batch_size of auto-completed models that can batch."
    )
    exit_on_error: bool = Field(default=False, description="Stop when a model of the first load fails.")

    # --- what is served
    server_name: str = Field(
        default="triton", description="Name in the server metadata; Triton's clients expect 'triton'."
    )
    strict_readiness: bool = Field(
        default=True, description="Ready only while every model meant to be served is ready."
    )
    ready_requires_model: bool = Field(default=False, description="An empty repository is not ready.")
    exit_timeout_secs: float = Field(
        default=30.0, allow_inf_nan=False, ge=0, description="Seconds that requests in flight get at shutdown."
    )
    intra_op_threads: int = Field(
        default=0,
        ge=0,
        description="Threads that run one inference, shared out among a model's instances; 0 for all usable cores.",
    )
    onnxruntime_memory_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="Memory that ONNX Runtime may take for all running requests together, in MiB; 0 for no limit.",
    )

    # --- HTTP
    allow_http: bool = Field(default=True, description="Serve HTTP.")
    http_address: str = Field(default="127.0.0.1", description="Address that HTTP binds to.")
    http_port: int = Field(default=8000, ge=0, le=65535, description="Port of HTTP; 0 takes a free one.")
    http_max_input_size: int = Field(
        default=64 * MIB, ge=1, description="Largest request in bytes, also after decompression and JSON expansion."
    )
    http_max_connections: int = Field(default=4096, ge=1, description="Connections at the same time; more get 503.")
    http_restricted_api: tuple[str, ...] = Field(
        default=(), repr=False, description="'<group>,...:<header>=<value>': endpoints behind a key."
    )
    http_header_forward_pattern: str = Field(
        default="", description="Regular expression: request headers passed on as parameters."
    )
    dashboard: Literal["on", "off"] = Field(
        default="on", description="Serve the dashboard at / of the HTTP port, and its data under /dashboard/."
    )

    # --- gRPC
    allow_grpc: bool = Field(default=True, description="Serve gRPC.")
    grpc_address: str = Field(default="127.0.0.1", description="Address that gRPC binds to.")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="Port of gRPC; 0 takes a free one.")
    grpc_max_message_size: int = Field(
        default=2**31 - 1, ge=1, le=2**31 - 1, description="Largest message in bytes, either way."
    )
    grpc_restricted_protocol: tuple[str, ...] = Field(
        default=(),
        repr=False,
        description="'<group>,...:<key>=<value>': calls behind the header triton-grpc-protocol-<key>.",
    )
    grpc_header_forward_pattern: str = Field(
        default="", description="Regular expression: metadata passed on as parameters."
    )
    grpc_use_ssl: bool = Field(default=False, description="Encrypt gRPC with TLS.")
    grpc_use_ssl_mutual: bool = Field(default=False, description="Ask gRPC clients for a certificate too.")
    grpc_server_cert: Path | None = Field(default=None, description="PEM certificate of the gRPC server.")
    grpc_server_key: Path | None = Field(default=None, description="PEM private key of the gRPC server.")
    grpc_root_cert: Path | None = Field(
        default=None, description="PEM certificates that client certificates are checked against."
    )
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = Field(
        default="none", description="gzip level of gRPC responses."
    )

    # --- shared memory
    allow_client_shm: bool = Field(default=False, description="Let clients register system shared memory.")

    # --- metrics, logs, traces
    allow_metrics: bool = Field(default=True, description="Serve Prometheus metrics.")
    allow_gpu_metrics: bool = Field(default=True, description="Include GPU metrics where NVML is present.")
    allow_cpu_metrics: bool = Field(default=True, description="Include CPU and memory metrics.")
    metrics_address: str = Field(default="127.0.0.1", description="Address that metrics bind to.")
    metrics_port: int = Field(default=8002, ge=0, le=65535, description="Port of metrics; 0 takes a free one.")
    metrics_interval_ms: int = Field(
        default=2000, ge=10, description="Milliseconds between two readings of CPU and GPU."
    )
    log_verbose: int = Field(default=0, ge=0, description="0: events; 1 and more: requests too.")
    log_info: bool = Field(default=True, description="Log events.")
    log_warning: bool = Field(default=True, description="Log warnings.")
    log_error: bool = Field(default=True, description="Log errors.")
    log_format: Literal["human", "json"] = Field(default="human", description="Form of log lines.")
    trace_otlp_endpoint: str = Field(
        default="", description="OTLP/HTTP endpoint for OpenTelemetry traces; empty for none."
    )
    trace_rate: int = Field(
        default=1000, ge=0, description="One in this many requests is traced, beside those with a sampled traceparent."
    )

    # --- tuning
    tuning: Literal["off", "on", "cache"] = Field(
        default="on",
        description="Tune models in the background: off, on, or cache (use what the cache holds, build nothing).",
    )
    kernels_cache: Path = Field(default=Path("kernels_cache"), description="Folder that keeps what tuning learns.")
    kernels_cache_mib: int = Field(
        default=0,
        ge=0,
        description="Size that the cache is kept under, in MiB, least recently used first; 0 for no limit.",
    )
    tuning_budget_secs: float = Field(
        default=1200.0, allow_inf_nan=False, ge=0, description="Seconds that tuning one model version may take."
    )
    tuning_cpu_share: float = Field(
        default=0.5, gt=0, le=1, description="Share of the cores that compiling may use, at low priority."
    )
    tuning_memory_mib: int = Field(
        default=4096, ge=256, description="Memory of the tuning process with everything it starts, in MiB."
    )
    tuning_pause: bool = Field(default=True, description="Tuning steps aside while requests are in flight.")

    @field_validator("http_restricted_api", "grpc_restricted_protocol")
    @classmethod
    def _restrictions_parse(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        seen: set[str] = set()
        for text in texts:
            for group in RestrictedGroup.parse(text).groups:
                if group in seen:
                    raise ValueError(f"group '{group}' is restricted twice")
                seen.add(group)
        return texts

    @field_validator("http_header_forward_pattern", "grpc_header_forward_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as problem:
            raise ValueError(f"not a regular expression: {problem}") from problem
        return pattern

    @field_validator("trace_otlp_endpoint")
    @classmethod
    def _endpoint_is_url(cls, endpoint: str) -> str:
        parts = urlsplit(endpoint)
        if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("expected a URL such as http://127.0.0.1:4318")
        return endpoint

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if self.grpc_use_ssl_mutual and not self.grpc_use_ssl:
            raise ValueError("grpc_use_ssl_mutual needs grpc_use_ssl")
        needed = (
            {"grpc_server_cert": self.grpc_server_cert, "grpc_server_key": self.grpc_server_key}
            if self.grpc_use_ssl
            else {}
        )
        if self.grpc_use_ssl_mutual:
            needed["grpc_root_cert"] = self.grpc_root_cert
        for name, path in needed.items():
            if path is None:
                raise ValueError(f"{name} is required with grpc_use_ssl{'_mutual' if name == 'grpc_root_cert' else ''}")
            if not path.is_file():
                raise ValueError(f"{name}: no such file")
        if not (self.allow_http or self.allow_grpc):
            raise ValueError("allow_http and allow_grpc are both off: nothing to serve")
        return self

    @property
    def restricted_http(self) -> tuple[RestrictedGroup, ...]:
        return tuple(RestrictedGroup.parse(text) for text in self.http_restricted_api)

    @property
    def restricted_grpc(self) -> tuple[RestrictedGroup, ...]:
        """Headers are the full metadata keys, Triton's prefix included."""
        parsed = (RestrictedGroup.parse(text) for text in self.grpc_restricted_protocol)
        return tuple(g.model_copy(update={"header": f"triton-grpc-protocol-{g.header}"}) for g in parsed)
