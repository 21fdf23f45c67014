"""The text that Prometheus reads: Triton's names to the letter, and the same numbers as the registry's samples."""

from collections import Counter as Multiset

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.pinned import PinnedPool
from hone.errors import ConfigError
from hone.metrics import CONTENT_TYPE, LATENCY_BOUNDS_US, Metrics
from tests.fake_cuda import FakeCudart

MODEL_COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
HISTOGRAMS = tuple(
    f"nv_inference_{phase}_duration_histogram_us"
    for phase in ("request", "queue", "compute_input", "compute_infer", "compute_output")
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry, allow_cpu_metrics=False, allow_gpu_metrics=False)


def render(metrics: Metrics) -> str:
    body, content_type = metrics.render()
    assert content_type == CONTENT_TYPE == "text/plain; charset=utf-8"
    text = body.decode()
    assert text.endswith("\n")
    return text


def lines_of(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample as prometheus-client's own parser reads it; fails on a series that appears twice.

    That parser, too, appends `_total` to counters, which is taken away again.
    """
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keys = [(sample.name.removesuffix("_total"), frozenset(sample.labels.items())) for sample in samples]
    assert [key for key, count in Multiset(keys).items() if count > 1] == []
    return dict(zip(keys, (sample.value for sample in samples), strict=True))


def record_some(metrics: Metrics, name: str = "digits", version: str = "1", protocol: str = "http") -> None:
    statistics = metrics.model(name, version)
    statistics.record_request(protocol, 2, 1_500_000, 99_000, 5_000, 1_000_000, 4_000, "onnxruntime")
    statistics.record_request(protocol, 1, 30_000_000, 100_000, 5_000, 20_000_000, 4_000)
    statistics.record_execution(3, 5_000, 1_000_000, 4_000)
    statistics.record_failure(protocol, "REJECTED", 10)
    statistics.num_pending += 7
    statistics.load_seconds = 1.25


def test_model_series_are_tritons_to_the_letter(metrics: Metrics) -> None:
    record_some(metrics)
    text = render(metrics)
    labels = '{model="digits",version="1"}'
    for expected in (
        "# TYPE nv_inference_request_success counter",
        f"nv_inference_request_success{labels} 2",
        "# TYPE nv_inference_request_failure counter",
        'nv_inference_request_failure{model="digits",reason="REJECTED",version="1"} 1',
        'nv_inference_request_failure{model="digits",reason="CANCELED",version="1"} 0',
        'nv_inference_request_failure{model="digits",reason="BACKEND",version="1"} 0',
        'nv_inference_request_failure{model="digits",reason="OTHER",version="1"} 0',
        "# TYPE nv_inference_count counter",
        f"nv_inference_count{labels} 3",
        "# TYPE nv_inference_exec_count counter",
        f"nv_inference_exec_count{labels} 1",
        "# TYPE nv_inference_request_duration_us counter",
        f"nv_inference_request_duration_us{labels} 31500",
        f"nv_inference_queue_duration_us{labels} 199",
        f"nv_inference_compute_input_duration_us{labels} 10",
        f"nv_inference_compute_infer_duration_us{labels} 21000",
        f"nv_inference_compute_output_duration_us{labels} 8",
        "# TYPE nv_inference_pending_request_count gauge",
        f"nv_inference_pending_request_count{labels} 7",
        "# TYPE nv_model_load_duration_secs gauge",
        f"nv_model_load_duration_secs{labels} 1.25",
        "# TYPE nv_pinned_memory_pool_total_bytes gauge",
        "nv_pinned_memory_pool_total_bytes 0",
        "nv_pinned_memory_pool_used_bytes 0",
    ):
        assert expected in text.splitlines()
    assert "_total{" not in text
    assert "_created" not in text
    for name in MODEL_COUNTERS:
        assert f"# TYPE {name} counter\n" in text
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} ") == 1


def test_histogram_lines(metrics: Metrics) -> None:
    record_some(metrics)
    text = render(metrics)
    name = "nv_inference_queue_duration_histogram_us"
    labels = 'model="digits",protocol="http",version="1"'
    assert f"# TYPE {name} histogram" in text.splitlines()
    # 99 us and, at the bound, 100 us
    expected = [f'{name}_bucket{{{labels},le="{bound}"}} 2' for bound in LATENCY_BOUNDS_US]
    assert lines_of(text, f"{name}_bucket") == [*expected, f'{name}_bucket{{{labels},le="+Inf"}} 2']
    assert lines_of(text, f"{name}_sum") == [f"{name}_sum{{{labels}}} 199"]
    assert lines_of(text, f"{name}_count") == [f"{name}_count{{{labels}}} 2"]
    request = "nv_inference_request_duration_histogram_us_bucket"
    assert f'{request}{{{labels},le="1000"}} 0' in text.splitlines()
    assert f'{request}{{{labels},le="2500"}} 1' in text.splitlines()
    assert f'{request}{{{labels},le="50000"}} 2' in text.splitlines()


def test_histograms_tell_protocols_apart_and_appear_with_their_first_request(metrics: Metrics) -> None:
    statistics = metrics.model("digits", "1")
    for name in HISTOGRAMS:
        assert name not in render(metrics)
    statistics.record_request("http", 1, 1, 1, 1, 1, 1)
    statistics.record_request("grpc", 1, 1, 1, 1, 1, 1)
    statistics.record_request("grpc", 1, 1, 1, 1, 1, 1)
    samples = samples_of(render(metrics))
    for name in HISTOGRAMS:
        for protocol, count in (("http", 1), ("grpc", 2)):
            labels = {"model": "digits", "version": "1", "protocol": protocol}
            assert samples[f"{name}_count", frozenset(labels.items())] == count


def test_latencies_are_told_apart_by_engine(metrics: Metrics) -> None:
    statistics = metrics.model("digits", "1")
    statistics.record_request("http", 1, 400_000, 1, 1, 300_000, 1, "onnxruntime")
    statistics.record_request("http", 1, 200_000, 1, 1, 100_000, 1, "tvm")
    statistics.record_request("grpc", 1, 210_000, 1, 1, 100_000, 1, "tvm")
    statistics.record_execution(1, 1, 300_000, 1, "onnxruntime")
    statistics.record_execution(2, 1, 7_001, 1, "tvm")
    text = render(metrics)
    tvm = 'engine="tvm",model="digits",version="1"'
    requests = lines_of(text, "hone_request_duration_histogram_us_bucket")
    assert f'hone_request_duration_histogram_us_bucket{{{tvm},le="150"}} 0' in requests
    assert f'hone_request_duration_histogram_us_bucket{{{tvm},le="200"}} 1' in requests
    assert f'hone_request_duration_histogram_us_bucket{{{tvm},le="300"}} 2' in requests
    assert f'hone_request_duration_histogram_us_bucket{{{tvm.replace("tvm", "onnxruntime")},le="300"}} 0' in requests
    assert (
        lines_of(text, "hone_request_duration_histogram_us_sum")[1]
        == f"hone_request_duration_histogram_us_sum{{{tvm}}} 410"
    )
    assert lines_of(text, "hone_execution_duration_histogram_us_bucket")[-39:-37] == [
        f'hone_execution_duration_histogram_us_bucket{{{tvm},le="7"}} 0',
        f'hone_execution_duration_histogram_us_bucket{{{tvm},le="10"}} 1',
    ]
    assert (
        lines_of(text, "hone_execution_duration_histogram_us_count")[1]
        == f"hone_execution_duration_histogram_us_count{{{tvm}}} 1"
    )


def test_text_and_registry_agree_on_every_sample(metrics: Metrics, registry: CollectorRegistry) -> None:
    record_some(metrics)
    record_some(metrics, "other", "12", "grpc")
    metrics.model("tagged", "1", {"team": 'a "b"'}, gpu_uuid="GPU-1", response_cache=True).record_cache_hit(5_000)
    walked = {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in registry.collect()
        for sample in family.samples
    }
    assert samples_of(render(metrics)) == walked
    assert (
        registry.get_sample_value("nv_inference_request_success", {"model": "other", "version": "12"})
        == walked["nv_inference_request_success", frozenset({("model", "other"), ("version", "12")})]
        == 2
    )


def test_lines_of_a_family_are_together(metrics: Metrics) -> None:
    for index in range(3):
        record_some(metrics, f"model_{index}")
    seen: list[str] = []
    for line in render(metrics).splitlines():
        name = line.split()[2] if line.startswith("#") else line.split("{")[0].split(" ")[0]
        for suffix in ("_bucket", "_sum", "_count"):
            if name.removesuffix(suffix).endswith("_histogram_us"):
                name = name.removesuffix(suffix)
        if not seen or seen[-1] != name:
            seen.append(name)
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ('say "hi"', r'model="say \"hi\""'),
        ("a\nb", r'model="a\nb"'),
        ("back\\slash", r'model="back\\slash"'),
        ("\\n", r'model="\\n"'),
        ("模型 %s %d {}", 'model="模型 %s %d {}"'),
    ],
)
def test_labels_are_escaped(metrics: Metrics, name: str, written: str) -> None:
    record_some(metrics, name)
    text = render(metrics)
    assert lines_of(text, "nv_inference_count") == [f'nv_inference_count{{{written},version="1"}} 3']
    for sample_name, labels in samples_of(text):
        if sample_name.startswith("nv_inference"):
            assert ("model", name) in labels


@settings(deadline=None, max_examples=50)
@given(names=st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4))
def test_any_model_name_survives_the_round_trip(names: set[str]) -> None:
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
    for name in names:
        record_some(metrics, name)
    read = {dict(labels)["model"] for name, labels in samples_of(render(metrics)) if name == "nv_inference_count"}
    assert read == names


def test_tags_and_gpu_become_labels_in_alphabetical_order(metrics: Metrics) -> None:
    metrics.model("digits", "1", {"team": "vision", "Area": "x"}, gpu_uuid="GPU-7")
    assert lines_of(render(metrics), "nv_inference_count") == [
        'nv_inference_count{_Area="x",_team="vision",gpu_uuid="GPU-7",model="digits",version="1"} 0'
    ]


def test_a_tag_that_cannot_be_a_label_is_refused(metrics: Metrics) -> None:
    with pytest.raises(ConfigError, match=r"'digits'.*metric_tags\['a-b'\]"):
        metrics.model("digits", "1", {"a-b": "x"})
    assert "digits" not in render(metrics)


def test_cache_series_only_for_models_with_a_cache(metrics: Metrics) -> None:
    metrics.model("plain", "1")
    cached = metrics.model("cached", "1", response_cache=True)
    cached.record_cache_hit(2_000)
    cached.record_cache_miss(3_000)
    cached.record_cache_miss(4_000)
    text = render(metrics)
    labels = '{model="cached",version="1"}'
    assert lines_of(text, "nv_cache_num_hits_per_model") == [f"nv_cache_num_hits_per_model{labels} 1"]
    assert lines_of(text, "nv_cache_num_misses_per_model") == [f"nv_cache_num_misses_per_model{labels} 2"]
    assert lines_of(text, "nv_cache_hit_duration_per_model") == [f"nv_cache_hit_duration_per_model{labels} 2"]
    assert lines_of(text, "nv_cache_miss_duration_per_model") == [f"nv_cache_miss_duration_per_model{labels} 7"]


def test_series_of_a_removed_version_disappear(metrics: Metrics) -> None:
    record_some(metrics, "digits", "1")
    second = metrics.model("digits", "2")
    second.record_request("http", 1, 1, 1, 1, 1, 1)
    metrics.remove(second)
    text = render(metrics)
    assert 'version="2"' not in text
    assert 'nv_inference_count{model="digits",version="1"} 3' in text
    with pytest.raises(ValueError, match="removed before"):
        metrics.remove(second)


def test_without_models_no_model_family_is_written(metrics: Metrics) -> None:
    metrics.remove(metrics.model("digits", "1"))
    assert "nv_inference" not in render(metrics)


def test_a_version_loaded_again_keeps_its_counters_until_its_last_user_leaves(metrics: Metrics) -> None:
    old = metrics.model("digits", "1", {"team": "a"})
    old.record_request("http", 1, 1, 1, 1, 1, 1)
    new = metrics.model("digits", "1", {"team": "b"})
    assert new is old
    new.record_request("http", 1, 1, 1, 1, 1, 1)
    expected = ['nv_inference_request_success{_team="b",model="digits",version="1"} 2']
    assert lines_of(render(metrics), "nv_inference_request_success") == expected
    metrics.remove(old)
    assert lines_of(render(metrics), "nv_inference_request_success") == expected
    metrics.remove(new)
    assert "digits" not in render(metrics)
    # loaded anew: a new start, and the old object is no longer exported
    assert metrics.model("digits", "1") is not old


def test_counters_never_go_back(metrics: Metrics) -> None:
    statistics = metrics.model("digits", "1")
    previous: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for round_number in range(20):
        statistics.record_request(("http", "grpc")[round_number % 2], 1, 10**round_number % 10**11, 999, 999, 999, 999)
        statistics.record_execution(round_number, 999, 999, 999)
        statistics.record_failure("http", "OTHER", 5)
        current = samples_of(render(metrics))
        assert previous.keys() <= current.keys()
        assert all(current[key] >= value for key, value in previous.items())
        previous = current
    assert previous["nv_inference_request_success", frozenset({("model", "digits"), ("version", "1")})] == 20


def test_collectors_of_others_appear_in_prometheus_clients_own_form(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    swaps = Counter("hone_swaps", "Engines swapped\nin", ["model"], registry=registry)
    swaps.labels("digits").inc()
    Gauge("hone_speedup", "Speed-up", registry=registry).set(1.5)
    Histogram("hone_swap_seconds", "Seconds", registry=registry, buckets=(1.0,)).observe(0.5)
    Info("hone_build", "Build", registry=registry).info({"version": "0.1.0"})
    lines = render(metrics).splitlines()
    for expected in (
        "# HELP hone_swaps_total Engines swapped\\nin",
        "# TYPE hone_swaps_total counter",
        'hone_swaps_total{model="digits"} 1.0',
        "hone_speedup 1.5",
        'hone_swap_seconds_bucket{le="1.0"} 1.0',
        'hone_build_info{version="0.1.0"} 1.0',
    ):
        assert expected in lines
    assert not any("_created" in line for line in lines)


def test_names_of_ours_cannot_be_taken_by_others(metrics: Metrics, registry: CollectorRegistry) -> None:
    for name in ("nv_inference_count", "nv_cpu_utilization", "nv_gpu_power_usage"):
        with pytest.raises(ValueError, match="Duplicated"):
            Gauge(name, "Mine", registry=registry)


def test_closing_takes_everything_out_of_the_registry(metrics: Metrics, registry: CollectorRegistry) -> None:
    record_some(metrics)
    metrics.close()
    assert list(registry.collect()) == []


async def test_streaming_gives_the_same_text_in_pieces_of_whole_lines(metrics: Metrics) -> None:
    for index in range(200):
        record_some(metrics, f"model_{index}")
    pieces = [piece async for piece in metrics.stream()]
    assert len(pieces) > 3
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == metrics.render()[0]


async def test_models_may_come_and_go_while_text_is_streamed(metrics: Metrics) -> None:
    statistics = [metrics.model(f"model_{index}", "1") for index in range(300)]
    for one in statistics:
        one.record_request("http", 1, 1, 1, 1, 1, 1)
    text = b""
    async for piece in metrics.stream():
        text += piece
        if statistics:
            metrics.remove(statistics.pop())
            statistics[0].record_request(f"protocol_{len(statistics)}", 1, 1, 1, 1, 1, 1)
            metrics.model(f"late_{len(statistics)}", "1")
    samples_of(text.decode())  # well-formed, nothing twice


def test_pinned_memory_is_what_the_pool_has_now() -> None:
    pool = PinnedPool(CudaRuntime(FakeCudart()))
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False, pinned=lambda: pool.usage)

    def told() -> list[str]:
        return [
            lines_of(render(metrics), f"nv_pinned_memory_pool_{what}_bytes")[0].split()[1] for what in ("total", "used")
        ]

    assert told() == ["0", "0"]
    held = [pool.take(5000), pool.take(100)]
    assert told() == ["12288", "12288"]
    held.pop()
    assert told() == ["12288", "8192"]
    held.clear()
    assert told() == ["12288", "0"]
    metrics.close()
