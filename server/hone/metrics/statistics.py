"""What is counted for one model version: plain integers and lists, so that counting costs a request next to nothing.

Everything here belongs to the event-loop thread. Nothing is summed while a request runs: readers sum over protocols.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Upper bounds of the latency histograms, inclusive, the same for all five: 100 us to 10 s, and +Inf after them.
#: They contain every bound of the histograms proposed for Triton, so that queries for those keep working.
LATENCY_BOUNDS_US = (
    *(100, 250, 500),
    *(1_000, 2_500, 5_000),
    *(10_000, 25_000, 50_000),
    *(100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000),
)
_BOUNDS_NS = tuple(bound * 1_000 for bound in LATENCY_BOUNDS_US)

#: Upper bounds of the histograms that are split by engine, 5 us to 10 s. Finer than the others, six a decade: they are
#: there to be compared, and engines differ by less than a factor of two.
ENGINE_BOUNDS_US = (5, 7, *(round(step * 10**power) for power in range(1, 7) for step in (1, 1.5, 2, 3, 5, 7)), 10**7)
_ENGINE_BOUNDS_NS = tuple(bound * 1_000 for bound in ENGINE_BOUNDS_US)

#: Why a request failed, in Triton's words.
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

#: What each histogram measures, in the order of `ProtocolLatencies.counts` and `.sums_ns`.
PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class MemoryUsage(NamedTuple):
    """Memory held by a model version on one device: type is CPU, CPU_PINNED or GPU."""

    type: str
    id: int
    byte_size: int


class ProtocolLatencies:
    """Requests that succeeded over one protocol: per phase the hits of each bucket (not cumulative) and the sum."""

    __slots__ = ("counts", "num_inferences", "sums_ns")

    def __init__(self) -> None:
        self.counts: tuple[list[int], ...] = tuple([0] * (len(_BOUNDS_NS) + 1) for _ in PHASES)
        self.sums_ns = [0] * len(PHASES)
        self.num_inferences = 0


class EngineLatencies:
    """What ran on one kind of engine: hits of each bucket (not cumulative) and sums, of requests and of executions."""

    __slots__ = ("execution_counts", "execution_ns", "request_counts", "request_ns")

    def __init__(self) -> None:
        self.request_counts = [0] * (len(_ENGINE_BOUNDS_NS) + 1)
        self.execution_counts = [0] * (len(_ENGINE_BOUNDS_NS) + 1)
        self.request_ns = self.execution_ns = 0


class ModelStatistics:
    """Counts of one model version since it was first loaded; they only grow, also across reloads in place.

    Durations are nanoseconds. `num_pending` is changed by `+= 1` and `-= 1` only: while a version is being replaced
    in place, the old and the new one share these statistics.
    """

    __slots__ = (
        "_executions",
        "_failure_ns",
        "_last_inference_ns",
        "cache_hit_ns",
        "cache_miss_ns",
        "engines",
        "failures",
        "latencies",
        "load_seconds",
        "memory_usage",
        "name",
        "num_cache_hits",
        "num_cache_misses",
        "num_pending",
        "version",
    )

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.num_pending = 0
        self.load_seconds = 0.0
        self.memory_usage: tuple[MemoryUsage, ...] = ()
        self.latencies: dict[str, ProtocolLatencies] = {}
        self.engines: dict[str, EngineLatencies] = {}
        self.failures: dict[str, int] = dict.fromkeys(FAILURE_REASONS, 0)
        self._failure_ns = 0
        self._executions: dict[int, list[int]] = {}
        self._last_inference_ns = 0
        self.num_cache_hits = self.cache_hit_ns = 0
        self.num_cache_misses = self.cache_miss_ns = 0

    def record_request(
        self,
        protocol: str,
        batch_size: int,
        request_ns: int,
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        engine: str = "",
    ) -> None:
        """A request that succeeded. `batch_size` is its own; 0, of models that do not batch, counts as 1. `engine` is
        the kind of engine that ran it; empty for none."""
        latencies = self.latencies.get(protocol)
        if latencies is None:
            latencies = self.latencies[protocol] = ProtocolLatencies()
        latencies.num_inferences += batch_size or 1
        request, queue, compute_input, compute_infer, compute_output = latencies.counts
        request[bisect_left(_BOUNDS_NS, request_ns)] += 1
        queue[bisect_left(_BOUNDS_NS, queue_ns)] += 1
        compute_input[bisect_left(_BOUNDS_NS, input_ns)] += 1
        compute_infer[bisect_left(_BOUNDS_NS, infer_ns)] += 1
        compute_output[bisect_left(_BOUNDS_NS, output_ns)] += 1
        sums = latencies.sums_ns
        sums[0] += request_ns
        sums[1] += queue_ns
        sums[2] += input_ns
        sums[3] += infer_ns
        sums[4] += output_ns
        if engine:
            ran = self.engines.get(engine)
            if ran is None:
                ran = self.engines[engine] = EngineLatencies()
            ran.request_counts[bisect_left(_ENGINE_BOUNDS_NS, request_ns)] += 1
            ran.request_ns += request_ns
        self._last_inference_ns = time.time_ns()

    def record_execution(self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int, engine: str = "") -> None:
        """One run of an engine of this kind, of however many requests. `batch_size` 0, of models that do not batch,
        counts as 1."""
        execution = self._executions.get(batch_size or 1)
        if execution is None:
            execution = self._executions[batch_size or 1] = [0, 0, 0, 0]
        execution[0] += 1
        execution[1] += input_ns
        execution[2] += infer_ns
        execution[3] += output_ns
        if engine:
            ran = self.engines.get(engine)
            if ran is None:
                ran = self.engines[engine] = EngineLatencies()
            ran.execution_counts[bisect_left(_ENGINE_BOUNDS_NS, infer_ns)] += 1
            ran.execution_ns += infer_ns

    def record_failure(self, protocol: str, reason: str, request_ns: int) -> None:
        """A request that did not succeed; `reason` is one of FAILURE_REASONS (KeyError otherwise).

        Triton's series of failures are not told apart by protocol, so neither are these.
        """
        self.failures[reason] += 1
        self._failure_ns += request_ns

    def record_cache_hit(self, lookup_ns: int) -> None:
        """A request answered from the response cache, after a look-up of this long."""
        self.num_cache_hits += 1
        self.cache_hit_ns += lookup_ns

    def record_cache_miss(self, overhead_ns: int) -> None:
        """A request the response cache could not answer; looking up and inserting cost this much."""
        self.num_cache_misses += 1
        self.cache_miss_ns += overhead_ns

    # --- reading

    @property
    def num_inferences(self) -> int:
        return sum(latencies.num_inferences for latencies in self.latencies.values())

    @property
    def num_executions(self) -> int:
        return sum(execution[0] for execution in self._executions.values())

    @property
    def num_successes(self) -> int:
        return sum(sum(latencies.counts[0]) for latencies in self.latencies.values())

    def phase_ns(self, phase: int) -> int:
        """Cumulative duration of a phase (index into PHASES) over all protocols."""
        return sum(latencies.sums_ns[phase] for latencies in self.latencies.values())

    def to_dict(self) -> dict[str, Any]:
        """The entry of `model_stats` in Triton's statistics: integers, durations in ns, `last_inference` in ms."""
        successes = self.num_successes
        phases = {phase: _duration(successes, self.phase_ns(index)) for index, phase in enumerate(PHASES)}
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self._last_inference_ns // 1_000_000,
            "inference_count": self.num_inferences,
            "execution_count": self.num_executions,
            "inference_stats": {
                "success": phases.pop("request"),
                "fail": _duration(sum(self.failures.values()), self._failure_ns),
                **phases,
                "cache_hit": _duration(self.num_cache_hits, self.cache_hit_ns),
                "cache_miss": _duration(self.num_cache_misses, self.cache_miss_ns),
            },
            "response_stats": {},
            "batch_stats": list(self._batch_stats()),
            "memory_usage": [usage._asdict() for usage in self.memory_usage],
        }

    def _batch_stats(self) -> Iterator[dict[str, Any]]:
        for batch_size, (count, input_ns, infer_ns, output_ns) in sorted(self._executions.items()):
            yield {
                "batch_size": batch_size,
                "compute_input": _duration(count, input_ns),
                "compute_infer": _duration(count, infer_ns),
                "compute_output": _duration(count, output_ns),
            }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
