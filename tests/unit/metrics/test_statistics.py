import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.metrics import ENGINE_BOUNDS_US, FAILURE_REASONS, LATENCY_BOUNDS_US, MemoryUsage, ModelStatistics
from hone.metrics.statistics import PHASES


def test_new_statistics_are_all_zero() -> None:
    assert ModelStatistics("digits", "3").to_dict() == {
        "name": "digits",
        "version": "3",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {
            name: {"count": 0, "ns": 0}
            for name in (
                "success",
                "fail",
                "queue",
                "compute_input",
                "compute_infer",
                "compute_output",
                "cache_hit",
                "cache_miss",
            )
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_to_dict_is_tritons_entry() -> None:
    statistics = ModelStatistics("digits", "1")
    before_ms = time.time_ns() // 1_000_000
    statistics.record_request("http", 3, 1_000, 20, 300, 400, 50)
    statistics.record_request("grpc", 0, 2_000, 40, 300, 400, 50)
    statistics.record_execution(4, 300, 400, 50)
    statistics.record_execution(1, 7, 8, 9)
    statistics.record_execution(4, 3, 4, 5)
    statistics.record_failure("http", "REJECTED", 60)
    statistics.record_failure("grpc", "BACKEND", 70)
    statistics.record_cache_hit(11)
    statistics.record_cache_miss(12)
    statistics.record_cache_miss(13)
    statistics.memory_usage = (MemoryUsage("CPU", 0, 4096),)

    entry = statistics.to_dict()

    assert before_ms <= entry.pop("last_inference") <= time.time_ns() // 1_000_000
    assert entry == {
        "name": "digits",
        "version": "1",
        "inference_count": 4,  # 3, and a request of a model that does not batch
        "execution_count": 3,
        "inference_stats": {
            "success": {"count": 2, "ns": 3_000},
            "fail": {"count": 2, "ns": 130},
            "queue": {"count": 2, "ns": 60},
            "compute_input": {"count": 2, "ns": 600},
            "compute_infer": {"count": 2, "ns": 800},
            "compute_output": {"count": 2, "ns": 100},
            "cache_hit": {"count": 1, "ns": 11},
            "cache_miss": {"count": 2, "ns": 25},
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 1,
                "compute_input": {"count": 1, "ns": 7},
                "compute_infer": {"count": 1, "ns": 8},
                "compute_output": {"count": 1, "ns": 9},
            },
            {
                "batch_size": 4,
                "compute_input": {"count": 2, "ns": 303},
                "compute_infer": {"count": 2, "ns": 404},
                "compute_output": {"count": 2, "ns": 55},
            },
        ],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 4096}],
    }


def test_unknown_failure_reason_is_refused() -> None:
    with pytest.raises(KeyError):
        ModelStatistics("digits", "1").record_failure("http", "BORED", 1)


def test_every_reason_is_counted_apart() -> None:
    statistics = ModelStatistics("digits", "1")
    for count, reason in enumerate(FAILURE_REASONS, start=1):
        for _ in range(count):
            statistics.record_failure("http", reason, 0)
    assert statistics.failures == {"REJECTED": 1, "CANCELED": 2, "BACKEND": 3, "OTHER": 4}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.integers(0, 20_000_000_000)] * len(PHASES)), max_size=20))
def test_buckets_hold_what_is_at_most_their_bound(requests: list[tuple[int, ...]]) -> None:
    statistics = ModelStatistics("digits", "1")
    for request in requests:
        statistics.record_request("http", 1, *request)
    for phase in range(len(PHASES)):
        durations = [request[phase] for request in requests]
        if not requests:
            assert statistics.latencies == {}
            continue
        counts = statistics.latencies["http"].counts[phase]
        for index, bound_us in enumerate(LATENCY_BOUNDS_US):
            assert sum(counts[: index + 1]) == sum(1 for ns in durations if ns <= bound_us * 1_000)
        assert sum(counts) == len(durations)
        assert statistics.phase_ns(phase) == sum(durations)


def test_buckets_cover_100_us_to_10_s_and_the_bounds_proposed_for_triton() -> None:
    assert (LATENCY_BOUNDS_US[0], LATENCY_BOUNDS_US[-1]) == (100, 10_000_000)
    assert list(LATENCY_BOUNDS_US) == sorted(set(LATENCY_BOUNDS_US))
    assert {100, 500, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000} <= set(LATENCY_BOUNDS_US)


def test_bounds_by_engine_are_fine_enough_to_compare() -> None:
    assert (ENGINE_BOUNDS_US[0], ENGINE_BOUNDS_US[-1]) == (5, 10_000_000)
    assert list(ENGINE_BOUNDS_US) == sorted(set(ENGINE_BOUNDS_US))
    assert max(above / below for below, above in itertools.pairwise(ENGINE_BOUNDS_US)) < 1.7
