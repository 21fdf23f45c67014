import gzip
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hone.config import Settings
from hone.errors import InvalidRequest, Unsupported
from hone.tracing import TraceControl, Tracer, open_tracer, traces_url
from hone.types import InferRequest

ENDPOINT = "http://127.0.0.1:4318"
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT_ID = 0xB7AD6B7169203331
SAMPLED = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
NOT_SAMPLED = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-00"


def control(rate: int = 1, endpoint: str = ENDPOINT) -> TraceControl:
    return TraceControl(Settings(trace_otlp_endpoint=endpoint, trace_rate=rate))


def request(model: str = "digits", traceparent: str | None = None) -> InferRequest:
    return InferRequest(
        model, "", "id-7", {}, [], protocol="http", received_ns=time.monotonic_ns(), traceparent=traceparent
    )


class Traced:
    """A tracer whose spans can be looked at."""

    def __init__(self, trace_control: TraceControl) -> None:
        self.control = trace_control
        self.exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.exporter)
        self.tracer = Tracer(trace_control, self.exporter, processor, Resource({"service.name": "test"}))

    def record(self, one: InferRequest, **more: Any) -> bool:
        return self.tracer.record(one, "1", end_ns=one.received_ns + 1, **more)

    def spans(self) -> dict[str, ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named


@pytest.fixture
def traced() -> Iterator[Callable[..., Traced]]:
    made: list[Traced] = []

    def make(**settings: Any) -> Traced:
        made.append(Traced(control(**settings)))
        return made[-1]

    yield make
    for one in made:
        assert one.tracer.shutdown(30)


# --- spans


def test_a_request_becomes_the_spans_request_queue_and_compute(traced: Callable[..., Traced]) -> None:
    one = traced()
    infer = request()
    start = infer.received_ns
    before = time.time_ns()
    assert one.tracer.record(
        infer,
        "3",
        queue_start_ns=start + 100,
        compute_start_ns=start + 1_000,
        compute_end_ns=start + 5_000,
        end_ns=start + 6_000,
        attributes={"batch_size": 4},
    )
    spans = one.spans()
    assert set(spans) == {"request", "queue", "compute"}
    root = spans["request"]
    origin = root.start_time
    assert origin is not None
    assert abs(origin - before) < 60e9  # wall clock
    times = {name: (span.start_time - origin, span.end_time - origin) for name, span in spans.items()}
    assert times == {"request": (0, 6_000), "queue": (100, 1_000), "compute": (1_000, 5_000)}
    assert root.parent is None
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.UNSET
    assert dict(root.attributes or {}) == {
        "triton.model_name": "digits",
        "triton.model_version": "3",
        "triton.trace_request_id": "id-7",
        "hone.protocol": "http",
        "batch_size": 4,
    }
    for name in ("queue", "compute"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
        assert spans[name].context.trace_id == root.context.trace_id
    assert root.resource.attributes["service.name"] == "test"


def test_what_was_not_reached_has_no_span(traced: Callable[..., Traced]) -> None:
    one = traced()
    infer = request()
    one.tracer.record(infer, "1", end_ns=infer.received_ns + 10, error="no such input")
    (span,) = one.spans().values()
    assert span.name == "request"
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "no such input"


def test_a_request_that_ends_in_the_queue_ends_its_queue_span(traced: Callable[..., Traced]) -> None:
    one = traced()
    infer = request()
    start = infer.received_ns
    one.tracer.record(infer, "1", queue_start_ns=start + 1, end_ns=start + 10, error="Request timeout expired")
    spans = one.spans()
    assert set(spans) == {"request", "queue"}
    assert spans["queue"].end_time == spans["request"].end_time


def test_a_sampled_parent_is_followed_whatever_the_rate(traced: Callable[..., Traced]) -> None:
    one = traced(rate=1000)
    assert one.record(request(traceparent=SAMPLED))
    (span,) = one.spans().values()
    assert span.parent is not None
    assert span.parent.is_remote
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)


def test_a_parent_that_is_not_sampled_is_obeyed(traced: Callable[..., Traced]) -> None:
    one = traced(rate=1)
    assert not one.record(request(traceparent=NOT_SAMPLED))
    assert one.spans() == {}


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", f"ff-{TRACE_ID:032x}-{PARENT_ID:016x}-01"])
def test_a_malformed_parent_is_as_none(traced: Callable[..., Traced], traceparent: str) -> None:
    one = traced(rate=1)
    assert one.record(request(traceparent=traceparent))
    (span,) = one.spans().values()
    assert span.parent is None


# --- sampling


def test_one_in_rate_requests_is_sampled(traced: Callable[..., Traced]) -> None:
    one = traced(rate=3)
    assert [one.record(request()) for _ in range(9)] == [False, False, True] * 3


def test_rate_zero_leaves_only_sampled_parents(traced: Callable[..., Traced]) -> None:
    one = traced()
    one.control.update("", {"trace_rate": ["0"]})
    assert not any(one.record(request()) for _ in range(5))
    assert one.record(request(traceparent=SAMPLED))


def test_count_is_how_many_are_left(traced: Callable[..., Traced]) -> None:
    one = traced()
    one.control.update("", {"trace_count": ["2"]})
    assert [one.record(request(model)) for model in ("a", "b", "a")] == [True, True, False]
    assert one.control.settings()["trace_count"] == ["0"]
    assert one.record(request(traceparent=SAMPLED))  # parents do not count
    one.control.update("", {"trace_count": ["-1"]})
    assert one.record(request())


def test_level_off_traces_nothing_at_all(traced: Callable[..., Traced]) -> None:
    one = traced()
    one.control.update("", {"trace_level": ["OFF"]})
    assert not one.record(request())
    assert not one.record(request(traceparent=SAMPLED))
    one.control.update("", {"trace_level": ["TIMESTAMPS"]})
    assert one.record(request())


def test_a_model_can_differ_from_the_rest(traced: Callable[..., Traced]) -> None:
    one = traced()
    one.control.update("quiet", {"trace_level": ["OFF"]})
    one.control.update("rare", {"trace_rate": ["2"], "trace_count": ["1"]})
    assert [one.record(request("quiet")), one.record(request("other"))] == [False, True]
    assert [one.record(request("rare")) for _ in range(4)] == [False, True, False, False]
    assert one.control.settings("rare")["trace_count"] == ["0"]
    assert one.control.settings()["trace_count"] == ["-1"]


def test_a_model_without_a_count_of_its_own_draws_on_the_global_one(traced: Callable[..., Traced]) -> None:
    one = traced()
    one.control.update("", {"trace_count": ["1"]})
    one.control.update("digits", {"trace_rate": ["1"]})
    assert [one.record(request("digits")), one.record(request("other"))] == [True, False]
    assert one.control.settings("digits")["trace_count"] == ["0"]


# --- settings


def test_settings_are_tritons() -> None:
    assert control(rate=1000).settings() == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": [""],
        "trace_mode": ["opentelemetry"],
    }
    assert control(endpoint="").settings()["trace_level"] == ["OFF"]


def test_clearing_a_model_makes_it_follow_the_global_settings() -> None:
    one = control()
    one.update("", {"trace_rate": "7"})
    assert one.update("digits", {"trace_rate": ["5"], "trace_count": ["3"]})["trace_rate"] == ["5"]
    assert one.settings("other")["trace_rate"] == ["7"]
    one.update("", {"trace_rate": ["9"]})
    assert one.settings("digits")["trace_rate"] == ["5"]
    cleared = one.update("digits", {"trace_rate": None, "trace_count": None})
    assert (cleared["trace_rate"], cleared["trace_count"]) == (["9"], ["-1"])
    one.update("", {"trace_rate": ["11"]})
    assert one.settings("digits")["trace_rate"] == ["11"]


def test_clearing_a_global_setting_brings_the_start_value_back() -> None:
    one = control(rate=50)
    one.update("", {"trace_rate": ["9"], "trace_level": ["OFF"], "trace_count": ["4"], "log_frequency": ["2"]})
    assert one.update("", dict.fromkeys(("trace_rate", "trace_level", "trace_count", "log_frequency"))) == (
        control(rate=50).settings()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace_bogus": ["1"]}, "unknown trace setting 'trace_bogus'"),
        ({"trace_rate": ["-1"]}, "'trace_rate': expected an integer of at least 0, got '-1'"),
        ({"trace_rate": ["1.5"]}, "'trace_rate'"),
        ({"trace_rate": ["٣"]}, "'trace_rate'"),
        ({"trace_rate": ["9" * 30]}, "'trace_rate'"),
        ({"trace_rate": ["1", "2"]}, "expected one string"),
        ({"trace_rate": []}, "expected one string"),
        ({"trace_rate": [5]}, "expected one string"),
        ({"trace_count": ["-2"]}, "'trace_count': expected an integer of at least -1"),
        ({"log_frequency": ["x"]}, "'log_frequency'"),
        ({"trace_level": ["LOUD"]}, "'trace_level'"),
        ({"trace_level": []}, "'trace_level'"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "'trace_level'"),
    ],
)
@pytest.mark.parametrize("model", ["", "digits"])
def test_wrong_updates_are_refused_whole(model: str, changes: dict[str, Any], message: str) -> None:
    one = control()
    before = one.settings(model)
    with pytest.raises(InvalidRequest, match=message):
        one.update(model, {"trace_level": ["OFF"], **changes})
    assert one.settings(model) == before


@pytest.mark.parametrize("name", ["trace_file", "trace_mode"])
def test_file_and_mode_cannot_be_changed(name: str) -> None:
    with pytest.raises(Unsupported, match="can not be updated through network protocol"):
        control().update("", {name: ["x"]})


def test_levels_that_are_not_offered() -> None:
    with pytest.raises(Unsupported, match="TENSORS"):
        control().update("", {"trace_level": ["TIMESTAMPS", "TENSORS"]})
    without_exporter = control(endpoint="")
    with pytest.raises(Unsupported, match="--trace-otlp-endpoint"):
        without_exporter.update("digits", {"trace_level": ["TIMESTAMPS"]})
    assert without_exporter.update("", {"trace_rate": ["5"], "trace_level": ["OFF"]})["trace_rate"] == ["5"]


# --- export


class Collector:
    """A local OTLP/HTTP collector. `hold` keeps it from answering."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.hold = threading.Event()
        self.hold.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                collector.hold.wait(60)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.hold.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = Collector()
    yield one
    one.close()


def open_to(endpoint: str) -> Tracer:
    settings = Settings(trace_otlp_endpoint=endpoint, trace_rate=1)
    tracer = open_tracer(settings, TraceControl(settings), "0.1.0")
    assert tracer is not None
    return tracer


def record(tracer: Tracer) -> None:
    infer = request()
    start = infer.received_ns
    assert tracer.record(
        infer, "1", queue_start_ns=start, compute_start_ns=start + 1, compute_end_ns=start + 2, end_ns=start + 3
    )


def test_spans_reach_a_collector_at_shutdown(collector: Collector) -> None:
    tracer = open_to(collector.url)
    for _ in range(3):
        record(tracer)
    assert tracer.shutdown(30)
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    resources = [resource for _, body in collector.requests for resource in body.resource_spans]
    attributes = {a.key: a.value.string_value for resource in resources for a in resource.resource.attributes}
    assert (attributes["service.name"], attributes["service.version"]) == ("hone", "0.1.0")
    names = [span.name for r in resources for scope in r.scope_spans for span in scope.spans]
    assert sorted(names) == ["compute"] * 3 + ["queue"] * 3 + ["request"] * 3


def test_standard_resource_variables_are_heard(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "digits-service")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # where to send is hone's setting alone
    tracer = open_to(f"{collector.url}/custom/path")
    record(tracer)
    assert tracer.shutdown(30)
    ((path, body),) = collector.requests
    assert path == "/custom/path"
    attributes = {a.key: a.value.string_value for a in body.resource_spans[0].resource.attributes}
    assert attributes["service.name"] == "digits-service"


def test_shutdown_has_a_deadline(collector: Collector) -> None:
    collector.hold.clear()
    tracer = open_to(collector.url)
    record(tracer)
    assert not tracer.shutdown(0.05)
    collector.hold.set()
    assert tracer.shutdown(30)


def test_a_collector_that_is_down_costs_log_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        port = free.server_address[1]
    tracer = open_to(f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        record(tracer)
        assert not tracer.shutdown(0.2)  # the SDK would go on trying for seconds
        assert tracer.shutdown(30)
    assert any("opentelemetry" in one.name for one in caplog.records)


def test_without_an_endpoint_there_is_no_tracer_and_no_sdk() -> None:
    code = """
import sys
from hone.config import Settings
from hone.tracing import TraceControl, open_tracer
settings = Settings()
assert open_tracer(settings, TraceControl(settings), "1") is None
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://otel:4318", "http://otel:4318/v1/traces"),
        ("https://otel:4318/", "https://otel:4318/v1/traces"),
        ("http://otel/custom?x=1", "http://otel/custom?x=1"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_standard_one(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["otel:4318", "grpc://otel:4317", "http://", "/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="trace_otlp_endpoint"):
        open_to(endpoint)
