"""What is exported: the statistics of the models that are loaded, and the machine's readings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Metric

from hone.errors import ConfigError
from hone.metrics.devices import (
    CpuReader,
    DeviceReadings,
    GpuReader,
    PinnedUsage,
    device_names,
    host_families,
    no_pinned_memory,
)
from hone.metrics.exposition import CONTENT_TYPE, expose
from hone.metrics.families import (
    Extra,
    HistogramFamily,
    ModelSeries,
    Number,
    TextFamily,
    ValueFamily,
    executions_by_engine,
    latencies,
    requests_by_engine,
)
from hone.metrics.statistics import ENGINE_BOUNDS_US, LATENCY_BOUNDS_US, PHASES, ModelStatistics

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_Read = Callable[[ModelSeries], Iterable[tuple[Extra, Number]]]


class Metrics:
    """Owns the statistics of loaded models and exports them through a registry, in Triton's names.

    Used on the event-loop thread. Other parts of the server may register collectors of their own in the same registry;
    they appear in the same text.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        allow_cpu_metrics: bool = True,
        allow_gpu_metrics: bool = True,
        interval_ms: int = 2000,
        pinned: PinnedUsage = no_pinned_memory,
    ) -> None:
        self._registry = registry
        self._pinned = pinned
        self._series: dict[tuple[str, str], ModelSeries] = {}
        self._num_users: dict[tuple[str, str], int] = {}
        self._devices = DeviceReadings(
            CpuReader() if allow_cpu_metrics else None,
            GpuReader.open() if allow_gpu_metrics else None,
            interval_ms,
        )
        self._families = tuple(_model_families(self._snapshot))
        registry.register(self)

    def model(
        self,
        name: str,
        version: str,
        tags: Mapping[str, str] | None = None,
        gpu_uuid: str | None = None,
        *,
        response_cache: bool = False,
    ) -> ModelStatistics:
        """Statistics of a model version, exported from now on until `remove` was called as often as this.

        A version that is loaded again while it still serves gets the statistics it has, so that its series never
        appear twice and its counters never go back; labels are those of the last call. `tags` become labels
        `_<tag>`. Raises ConfigError for a tag that cannot be a label.
        """
        labels = {"model": name, "version": version}
        for tag, value in (tags or {}).items():
            if not _LABEL_NAME.fullmatch(f"_{tag}"):
                raise ConfigError(
                    name, f"metric_tags['{tag}']", "expected letters, digits and underscores: it becomes a label"
                )
            labels[f"_{tag}"] = value
        if gpu_uuid is not None:
            labels["gpu_uuid"] = gpu_uuid
        key = (name, version)
        known = self._series.get(key)
        statistics = ModelStatistics(name, version) if known is None else known.statistics
        self._series[key] = ModelSeries(statistics, labels, response_cache=response_cache)
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return statistics

    def remove(self, statistics: ModelStatistics) -> None:
        """Give back what `model` returned; with the last user its series disappear.

        Raises ValueError when these statistics are not exported (any more).
        """
        key = (statistics.name, statistics.version)
        series = self._series.get(key)
        if series is None or series.statistics is not statistics:
            raise ValueError(f"statistics of model '{key[0]}' version {key[1]} were removed before")
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key], self._series[key]

    def render(self) -> tuple[bytes, str]:
        """Everything in the registry as Prometheus text, and its content type, in one go."""
        return b"".join(expose(self._registry)), CONTENT_TYPE

    async def stream(self) -> AsyncIterator[bytes]:
        """The same text in pieces; the event loop is free between them, and while a driver is asked for readings."""
        if self._devices.slow:
            await asyncio.to_thread(self._devices.families)
        for piece in expose(self._registry):
            yield piece
            await asyncio.sleep(0)

    def close(self) -> None:
        self._registry.unregister(self)
        self._devices.close()

    # --- prometheus-client's collector protocol

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from host_families(self._pinned)
        yield from self._devices.families()

    def describe(self) -> Iterable[Metric]:
        """Names only; without it the registry could not tell that somebody else registers one of them."""
        return (*self._families, *host_families(), *device_names())

    def _snapshot(self) -> Iterator[ModelSeries]:
        return iter(tuple(self._series.values()))


class _Snapshots:
    """The series of the moment at which somebody starts to iterate; models may come and go during a scrape."""

    def __init__(self, take: Callable[[], Iterator[ModelSeries]]) -> None:
        self._take = take

    def __iter__(self) -> Iterator[ModelSeries]:
        return self._take()


def _model_families(snapshot: Callable[[], Iterator[ModelSeries]]) -> Iterator[TextFamily]:
    series = _Snapshots(snapshot)

    def counter(name: str, documentation: str, read: _Read) -> TextFamily:
        return ValueFamily(name, documentation, "counter", series, read)

    def gauge(name: str, documentation: str, read: _Read) -> TextFamily:
        return ValueFamily(name, documentation, "gauge", series, read)

    def one(value: Callable[[ModelStatistics], Number]) -> _Read:
        return lambda series: ((None, value(series.statistics)),)

    def cached(value: Callable[[ModelStatistics], Number]) -> _Read:
        return lambda series: ((None, value(series.statistics)),) if series.response_cache else ()

    yield counter("nv_inference_request_success", "Requests that succeeded", one(lambda s: s.num_successes))
    yield counter(
        "nv_inference_request_failure",
        "Requests that failed, by reason",
        lambda series: ((("reason", reason), count) for reason, count in series.statistics.failures.items()),
    )
    yield counter(
        "nv_inference_count", "Inferences; a request of batch size n counts as n", one(lambda s: s.num_inferences)
    )
    yield counter("nv_inference_exec_count", "Executions of the model", one(lambda s: s.num_executions))
    for index, phase in enumerate(PHASES):
        yield counter(
            f"nv_inference_{phase}_duration_us",
            f"Cumulative {_PHASE_TEXTS[phase]} in microseconds",
            one(partial(_phase_us, index)),
        )
    yield gauge("nv_inference_pending_request_count", "Requests that wait in the queue", one(lambda s: s.num_pending))
    yield gauge("nv_model_load_duration_secs", "Time that loading took in seconds", one(lambda s: s.load_seconds))
    yield counter(
        "nv_cache_num_hits_per_model", "Requests answered from the response cache", cached(lambda s: s.num_cache_hits)
    )
    yield counter(
        "nv_cache_num_misses_per_model", "Requests the response cache lacked", cached(lambda s: s.num_cache_misses)
    )
    yield counter(
        "nv_cache_hit_duration_per_model",
        "Cumulative time of look-ups that hit in microseconds",
        cached(lambda s: s.cache_hit_ns // 1_000),
    )
    yield counter(
        "nv_cache_miss_duration_per_model",
        "Cumulative time of look-ups that missed, insertion included, in microseconds",
        cached(lambda s: s.cache_miss_ns // 1_000),
    )
    for index, phase in enumerate(PHASES):
        yield HistogramFamily(
            f"nv_inference_{phase}_duration_histogram_us",
            f"Distribution of {_PHASE_TEXTS[phase]} in microseconds",
            series,
            LATENCY_BOUNDS_US,
            latencies(index),
        )
    for name, text, read in (
        ("hone_request_duration_histogram_us", "time from receiving a request to its response", requests_by_engine),
        ("hone_execution_duration_histogram_us", "time that one execution took in the engine", executions_by_engine),
    ):
        yield HistogramFamily(
            name, f"Distribution of the {text} in microseconds, by engine", series, ENGINE_BOUNDS_US, read
        )


def _phase_us(phase: int, statistics: ModelStatistics) -> int:
    return statistics.phase_ns(phase) // 1_000


_PHASE_TEXTS = {
    "request": "time from receiving a request to its response",
    "queue": "time in the queue",
    "compute_input": "time to prepare inputs",
    "compute_infer": "time to run the model",
    "compute_output": "time to take outputs apart",
}
