"""OpenTelemetry traces of requests: the spans request, queue and compute, made after the fact and sent by OTLP/HTTP.

Without an endpoint there is no tracer at all, and the request path's `tracer is not None` is all that tracing costs;
the SDK is imported only when there is one. The SDK's standard `OTEL_*` variables (headers, certificates, resource
attributes) keep their meaning; where to send and what to sample is told by hone's settings alone.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from hone.config import Settings
from hone.errors import InvalidRequest, Unsupported
from hone.types import InferRequest, ParameterValue

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

#: Spans that may wait for a slow collector, spans sent at once, and milliseconds between two sends.
MAX_QUEUED_SPANS, MAX_SPANS_PER_EXPORT, EXPORT_INTERVAL_MS = 8192, 512, 1000
EXPORT_TIMEOUT_SECONDS = 10.0

_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
#: Smallest value of each setting that is a number.
_MINIMUM = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_INTEGER = re.compile(r"-?[0-9]{1,18}")


class TraceControl:
    """What is traced, in the terms of Triton's trace extension: globally, and per model where that differs.

    Values are lists of strings. `trace_level` TIMESTAMPS switches tracing on. `trace_rate` N samples every Nth request
    of those that bring no `traceparent`; 0 leaves only requests whose parent is sampled, which are always traced.
    `trace_count` is how many more requests the rate may sample, -1 for any number; a model without a count of its own
    draws on the global one. `log_frequency` is kept and has no effect: traces go to a collector, not to a file.
    """

    def __init__(self, settings: Settings) -> None:
        self._has_exporter = bool(settings.trace_otlp_endpoint)
        self._initial: dict[str, list[str]] = {
            "trace_level": ["TIMESTAMPS" if self._has_exporter else "OFF"],
            "trace_rate": [str(settings.trace_rate)],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
        }
        self._global = dict(self._initial)
        self._overrides: dict[str, dict[str, list[str]]] = {}
        self._counts = {"": _Remaining(-1)}
        self._samplers: dict[str, _Sampler] = {}
        self._rebuild()

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """What holds for a model, or for models without settings of their own."""
        values = {**self._global, **self._overrides.get(model, {})}
        values["trace_count"] = [str(self._counts.get(model, self._counts[""]).number)]
        return {
            **{name: list(value) for name, value in values.items()},
            "trace_file": [""],
            "trace_mode": ["opentelemetry"],
        }

    def update(self, model: str, changes: Mapping[str, str | Sequence[str] | None]) -> dict[str, list[str]]:
        """Change all of the settings named, or none; model "" is the global ones. Returns what holds then.

        None clears: a model's setting follows the global one again, a global one is as at start. Raises InvalidRequest
        for unknown settings and values, Unsupported for what cannot be changed or offered here.
        """
        wanted = {name: self._check(name, value) for name, value in changes.items()}
        values = self._overrides.setdefault(model, {}) if model else self._global
        for name, value in wanted.items():
            if value is not None:
                values[name] = value
            elif model:
                values.pop(name, None)
            else:
                values[name] = self._initial[name]
        if "trace_count" in wanted:
            if "trace_count" in values:
                self._counts[model] = _Remaining(int(values["trace_count"][0]))
            else:
                self._counts.pop(model, None)
        if model and not values:
            del self._overrides[model]
        self._rebuild()
        return self.settings(model)

    def enabled(self, model: str) -> bool:
        return self._sampler(model).enabled

    def sample(self, model: str) -> bool:
        """Whether this request, which brings no parent, is traced. Counts it."""
        return self._sampler(model).sample()

    def _sampler(self, model: str) -> _Sampler:
        return self._samplers.get(model) or self._samplers[""]

    def _rebuild(self) -> None:
        self._samplers = {
            model: _Sampler(self.settings(model), self._counts.get(model, self._counts[""]))
            for model in ("", *self._overrides)
        }

    def _check(self, name: str, value: str | Sequence[str] | None) -> list[str] | None:
        if name in ("trace_file", "trace_mode"):
            what = "trace file location" if name == "trace_file" else "trace mode"
            raise Unsupported(f"{what} can not be updated through network protocol")
        if name not in self._initial:
            expected = ", ".join(self._initial)
            raise InvalidRequest(f"unknown trace setting '{name}', expected one of {expected}")
        if value is None:
            return None
        values = [value] if isinstance(value, str) else list(value)
        if name == "trace_level":
            return self._check_levels(values)
        if len(values) != 1 or not isinstance(values[0], str):
            raise InvalidRequest(f"trace setting '{name}': expected one string, got {values!r}")
        if not _INTEGER.fullmatch(values[0]) or int(values[0]) < _MINIMUM[name]:
            raise InvalidRequest(
                f"trace setting '{name}': expected an integer of at least {_MINIMUM[name]}, got {values[0]!r}"
            )
        return values

    def _check_levels(self, levels: list[str]) -> list[str]:
        if not levels or any(level not in _LEVELS for level in levels) or ("OFF" in levels and len(levels) > 1):
            raise InvalidRequest(f"trace setting 'trace_level': expected ['OFF'] or ['TIMESTAMPS'], got {levels!r}")
        if "TENSORS" in levels:
            raise Unsupported("trace level 'TENSORS' is not supported: traces carry times only")
        if "TIMESTAMPS" in levels and not self._has_exporter:
            raise Unsupported("trace level 'TIMESTAMPS' needs a server that was started with --trace-otlp-endpoint")
        return sorted(set(levels))


class _Remaining:
    """How many more requests may be sampled; -1 for any number. Models without a number of their own share one."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Sampler:
    __slots__ = ("_num_seen", "_rate", "_remaining", "enabled")

    def __init__(self, settings: Mapping[str, list[str]], remaining: _Remaining) -> None:
        self.enabled = settings["trace_level"] != ["OFF"]
        self._rate = int(settings["trace_rate"][0])
        self._remaining = remaining
        self._num_seen = 0

    def sample(self) -> bool:
        if not self.enabled or not self._rate or not self._remaining.number:
            return False
        self._num_seen += 1
        if self._num_seen % self._rate:
            return False
        if self._remaining.number > 0:
            self._remaining.number -= 1
        return True


def open_tracer(settings: Settings, control: TraceControl, server_version: str) -> Tracer | None:
    """The tracer that sends to `trace_otlp_endpoint`; None where that is empty. Starts the SDK's export thread.

    Raises ValueError for an endpoint that is no http or https URL.
    """
    if not settings.trace_otlp_endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    meters = NoOpMeterProvider()
    exporter = OTLPSpanExporter(
        endpoint=traces_url(settings.trace_otlp_endpoint), timeout=EXPORT_TIMEOUT_SECONDS, meter_provider=meters
    )
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=MAX_QUEUED_SPANS,
        schedule_delay_millis=EXPORT_INTERVAL_MS,
        max_export_batch_size=MAX_SPANS_PER_EXPORT,
        export_timeout_millis=EXPORT_TIMEOUT_SECONDS * 1000,
        meter_provider=meters,
    )
    ours = Resource({"service.name": "hone", "service.version": server_version})
    return Tracer(control, exporter, processor, ours.merge(OTELResourceDetector().detect()))


def traces_url(endpoint: str) -> str:
    """The full URL for spans: an endpoint without a path gets OTLP's `/v1/traces`."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"trace_otlp_endpoint: expected a URL like 'http://host:4318', got '{endpoint}'")
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


class Tracer:
    """Makes the spans of finished requests and hands them to the SDK. Used on the event-loop thread."""

    def __init__(
        self, control: TraceControl, exporter: SpanExporter, processor: SpanProcessor, resource: Resource
    ) -> None:
        """`processor` is one that sends to `exporter`."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.metrics import NoOpMeterProvider
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._control = control
        self._exporter = exporter
        self._stopping: threading.Thread | None = None
        self._trace = trace
        self._root = Context()  # empty: nothing that happens to be current becomes a parent
        self._propagator = TraceContextTextMapPropagator()
        # Sampling is decided here, before anything is built; whoever builds this object shuts it down.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, meter_provider=NoOpMeterProvider()
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("hone")

    def record(
        self,
        request: InferRequest,
        version: str,
        *,
        queue_start_ns: int = 0,
        compute_start_ns: int = 0,
        compute_end_ns: int = 0,
        end_ns: int,
        attributes: Mapping[str, ParameterValue] | None = None,
        error: str | None = None,
    ) -> bool:
        """Trace a request that was answered, failed or was cancelled, if it is to be traced; whether it was.

        Times are `time.monotonic_ns()`; 0 stands for a point that was not reached, and what was going on until then
        ends with the request. The request's span begins at `request.received_ns` and is a child of its
        `traceparent`; a parent that says "not sampled" is obeyed.
        """
        model = request.model_name
        parent: Context | None = None
        if request.traceparent is not None and self._control.enabled(model):
            parent = self._propagator.extract({"traceparent": request.traceparent})
            remote = self._trace.get_current_span(parent).get_span_context()
            if not remote.is_valid:
                parent = None
            elif not remote.trace_flags.sampled:
                return False
        if parent is None and not self._control.sample(model):
            return False

        to_wall_clock = time.time_ns() - time.monotonic_ns()
        details: dict[str, ParameterValue] = {
            "triton.model_name": model,
            "triton.model_version": version,
            "triton.trace_request_id": request.id,
            "hone.protocol": request.protocol,
            **(attributes or {}),
        }
        span = self._tracer.start_span(
            "request",
            context=self._root if parent is None else parent,
            kind=self._trace.SpanKind.SERVER,
            attributes=details,
            start_time=(request.received_ns or queue_start_ns or end_ns) + to_wall_clock,
        )
        inside = self._trace.set_span_in_context(span)
        phases = (("queue", queue_start_ns, compute_start_ns), ("compute", compute_start_ns, compute_end_ns))
        for name, start, end in phases:
            if start:
                child = self._tracer.start_span(name, context=inside, start_time=start + to_wall_clock)
                child.end(end_time=(end or end_ns) + to_wall_clock)
        if error is not None:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(end_time=end_ns + to_wall_clock)
        return True

    def shutdown(self, timeout_seconds: float) -> bool:
        """Send what waits and stop the export thread; False when that took longer and spans were lost.

        Blocks: call it off the event loop. The SDK's own shutdown has no deadline, so it gets a thread to block in;
        after the deadline nothing is tried again, and a later call waits for what is still on its way.
        """
        if self._stopping is None:
            self._stopping = threading.Thread(target=self._provider.shutdown, name="hone-trace-shutdown", daemon=True)
            self._stopping.start()
        self._stopping.join(timeout_seconds)
        if not self._stopping.is_alive():
            return True
        self._exporter.shutdown()
        return False
