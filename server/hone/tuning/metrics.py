"""Tuning and its cache in Prometheus: a collector over plain numbers that the tuner's thread writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hone.kernels.statistics import CacheStatistics
from hone.tuning.book import TunerCounters
from hone.tuning.cache_counts import CacheTraffic
from hone.tuning.child_process import CAUSES
from hone.tuning.watch import Cause

STATES = ("off", "queued", "tuning", "paused", "tuned", "baseline", "unsupported", "failed")
#: Why a generation is rolled back: by the watch, by a verdict that was measured again, by an operator.
ROLLBACK_CAUSES = (*get_args(Cause), "measured again", "request", "device lost")
#: How children end, and why.
JOB_ENDS = tuple((outcome, cause) for outcome, causes in CAUSES.items() for cause in causes)
_REPORTED = {
    "candidates_built": "Candidates that were built",
    "candidates_measured": "Candidates that were measured",
    "candidates_failed": "Candidates that did not build, run or compute what they should",
    "workloads_remembered": "Workloads whose kernel was decided before, by this server or another",
    "search_seconds": "Seconds of searching for kernels",
    "compile_seconds": "Seconds of compiling",
    "measure_seconds": "Seconds of measuring",
}


class Tuning(Protocol):
    """What is read at a scrape; see `assembly.BackgroundTuning`."""

    def statuses(self) -> list[dict[str, Any]]: ...

    @property
    def counters(self) -> TunerCounters: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_spared(self) -> int: ...

    @property
    def num_declined(self) -> Mapping[tuple[str, int], int]: ...

    @property
    def cache_statistics(self) -> CacheStatistics: ...

    @property
    def cache_limit_bytes(self) -> int | None: ...


class TuningCollector:
    """A prometheus-client collector. Nothing is kept: each scrape reads what holds then."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def collect(self) -> Iterator[Metric]:
        statuses = self._tuning.statuses()
        yield from _models(statuses)
        yield from _buckets(statuses)
        yield from _jobs(self._tuning.counters, self._tuning.num_queued)
        yield _declined(self._tuning.num_declined)
        yield from _cache(self._tuning.cache_statistics, self._tuning.counters.cache, self._tuning.cache_limit_bytes)
        yield GaugeMetricFamily(
            "hone_cache_unkept_entries",
            "Entries that the cache folder would not take: used from a temporary folder until the server stops",
            value=self._tuning.num_spared,
        )

    def describe(self) -> Iterable[Metric]:
        """Nothing is declared ahead: all names begin with `hone_`, which nobody else uses."""
        return ()


def _models(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "hone_tuning_state",
        "1 for the state that the tuning of a model version is in",
        labels=["model", "version", "state"],
    )
    progress = GaugeMetricFamily("hone_tuning_progress", "Share done, 0 to 1", labels=["model", "version"])
    for told in statuses:
        place = [told["model"], told["version"]]
        for name in STATES:
            state.add_metric([*place, name], float(told["state"] == name))
        progress.add_metric(place, float(told["progress"]))
    yield from (state, progress)


def _buckets(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ["model", "version", "signature", "device"]
    engine = GaugeMetricFamily("hone_engine", "1 for the engine that runs a signature now", labels=[*labels, "engine"])
    generation = GaugeMetricFamily(
        "hone_generation", "Generation that runs a signature; 0 is the baseline", labels=labels
    )
    speedup = GaugeMetricFamily(
        "hone_speedup", "Baseline's time over the tuned engine's, as measured here", labels=labels
    )
    error = GaugeMetricFamily("hone_max_error", "Worst difference of the outputs from the baseline's", labels=labels)
    provisional = GaugeMetricFamily("hone_provisional", "1 for a verdict to be measured again", labels=labels)
    for told in statuses:
        for bucket in told["buckets"]:
            values = [told["model"], told["version"], bucket["signature"], bucket["device"]]
            for name in ("onnxruntime", "tvm"):
                engine.add_metric([*values, name], float(bucket["engine"] == name))
            generation.add_metric(values, float(bucket["generation"]))
            provisional.add_metric(values, float(bucket["provisional"]))
            for family, field in ((speedup, "speedup"), (error, "max_error")):
                if bucket[field] is not None:
                    family.add_metric(values, float(bucket[field]))
    yield from (engine, generation, speedup, error, provisional)


def _jobs(counters: TunerCounters, num_queued: int) -> Iterator[Metric]:
    yield GaugeMetricFamily("hone_tuning_queue", "Jobs that wait", value=num_queued)
    # A series that first appears with its first event hides that event from `increase`: so all causes are there, at 0.
    jobs = dict.fromkeys(JOB_ENDS, 0) | dict(counters.jobs)
    yield _counted("hone_tuning_jobs", "Children that ended", ["outcome", "reason"], jobs)
    yield _counted("hone_tuning_specializations", "Specializations by outcome", ["outcome"], counters.specializations)
    rollbacks = dict.fromkeys(ROLLBACK_CAUSES, 0) | dict(counters.num_rollbacks)
    yield _counted("hone_tuning_rollbacks", "Generations that were rolled back", ["cause"], rollbacks)
    for name, documentation in _REPORTED.items():
        yield CounterMetricFamily(f"hone_tuning_{name}", documentation, value=counters.report.get(name, 0.0))
    for name, documentation, value in (
        ("promotions", "Generations that were made current", counters.num_promotions),
        ("quarantines", "Artifacts that are kept out from now on", counters.num_quarantines),
        ("promote_seconds", "Seconds of loading, warming and checking before swaps", counters.promote_seconds),
        ("swap_seconds", "Seconds of the swaps themselves", counters.swap_seconds),
        ("child_seconds", "Seconds that tuning processes ran", counters.child_seconds),
    ):
        yield CounterMetricFamily(f"hone_tuning_{name}", documentation, value=value)
    yield GaugeMetricFamily(
        "hone_tuning_peak_memory_bytes", "Largest resident memory of a tuning process", value=counters.peak_bytes
    )


def _declined(counts: Mapping[tuple[str, int], int]) -> Metric:
    family = CounterMetricFamily(
        "hone_declined_executions",
        "Executions whose inputs a tuned engine left to the baseline: an index out of range, a division by zero",
        labels=["model", "version"],
    )
    for (model, version), count in dict(counts).items():
        family.add_metric([model, str(version)], count)
    return family


def _cache(statistics: CacheStatistics, children: CacheTraffic, limit_bytes: int | None) -> Iterator[Metric]:
    """What the server did itself and what its tuning processes have told."""
    counts = statistics.snapshot()
    yield _counted(
        "hone_cache_hits",
        "Entries that the server and its tuning processes looked for and found",
        ["kind"],
        Counter(counts.hits) + children.hits,
    )
    yield _counted(
        "hone_cache_misses",
        "Entries that the server and its tuning processes did not find, or could not use",
        ["kind", "reason"],
        Counter(counts.misses) + children.misses,
    )
    yield _counted(
        "hone_cache_publishes",
        "Entries that the server and its tuning processes published, or could not",
        ["kind", "outcome"],
        Counter(counts.publishes) + children.publishes,
    )
    yield _counted("hone_cache_evictions", "Entries evicted", ["kind"], counts.evictions)
    num_discarded = counts.num_discarded + children.num_discarded
    yield CounterMetricFamily("hone_cache_discarded", "Corrupt entries taken away", value=num_discarded)
    yield GaugeMetricFamily("hone_cache_bytes", "Size of all entries", value=counts.size_bytes)
    limit = GaugeMetricFamily("hone_cache_limit_bytes", "Size that the cache is kept under, where there is a limit")
    if limit_bytes is not None:
        limit.add_metric([], limit_bytes)
    yield limit
    yield GaugeMetricFamily("hone_cache_entries", "Number of entries", value=counts.num_entries)


def _counted(name: str, documentation: str, labels: list[str], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=labels)
    for key, count in dict(counts).items():
        family.add_metric([key] if isinstance(key, str) else list(key), count)
    return family
