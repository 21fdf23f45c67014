"""Quantiles out of histograms, and what one second of serving is told as."""

from __future__ import annotations

import pytest

from hone.dashboard.latency import quantile_us, since, summary
from hone.dashboard.readings import MAX_POINTS, Readings
from hone.metrics import ENGINE_BOUNDS_US, ModelStatistics


def counts(**hits: int) -> list[int]:
    """Hits of buckets by their upper bound, as `us100=3`; `above=1` for the last."""
    found = [0] * (len(ENGINE_BOUNDS_US) + 1)
    for name, hit in hits.items():
        found[-1 if name == "above" else ENGINE_BOUNDS_US.index(int(name.removeprefix("us")))] = hit
    return found


def answer(statistics: ModelStatistics, us: int, engine: str = "onnxruntime", times: int = 1) -> None:
    for _ in range(times):
        statistics.record_request("http", 1, us * 1000, 1, 1, us * 500, 1, engine)
        statistics.record_execution(1, 1, us * 500, 1, engine)


def test_a_quantile_lies_in_the_bucket_of_its_rank():
    found = counts(us100=98, us1000=2)
    assert 70 < quantile_us(found, 0.5) < 100
    assert quantile_us(found, 0.98) == 100
    assert 700 < quantile_us(found, 0.99) < 1000
    assert quantile_us(found, 1.0) == 1000


def test_no_hits_and_hits_above_all_bounds():
    assert quantile_us(counts(), 0.5) == 0
    assert quantile_us(counts(above=1), 0.5) == ENGINE_BOUNDS_US[-1]
    assert 0 < quantile_us(counts(us5=1), 0.5) < 5


@pytest.mark.parametrize("us", [6, 40, 333, 2_500, 90_000])
def test_a_quantile_is_as_near_as_the_buckets_are_fine(us):
    statistics = ModelStatistics("m", "1")
    answer(statistics, us, times=100)
    _, p50, p99 = summary(statistics.engines["onnxruntime"].request_counts)
    assert us / 1.7 < p50 <= p99 < us * 1.7


def test_only_what_is_new_counts():
    assert since([3, 5], [1, 5]) == [2, 0]
    assert since([3, 5], None) == [3, 5]


def test_a_second_is_told_by_engine():
    statistics, readings = ModelStatistics("m", "1"), Readings()
    answer(statistics, 100, times=10)
    first = readings.read([statistics], 1.0, 1.0)["m", "1"]
    assert first["requests_per_second"] == 0, "what was before the first look is no rate"
    assert first["total"]["request"]["onnxruntime"][0] == 10
    answer(statistics, 100, times=4)
    answer(statistics, 50, "tvm", times=6)
    statistics.record_failure("http", "BACKEND", 1)
    told = readings.read([statistics], 3.0, 2.0)["m", "1"]
    assert told["requests_per_second"] == 5
    assert told["errors_per_second"] == 0.5
    assert told["num_failures"] == 1
    assert [told["window"]["request"][engine][0] for engine in ("onnxruntime", "tvm")] == [4, 6]
    assert told["window"]["execution"]["tvm"][1] < told["window"]["request"]["tvm"][1]
    assert told["total"]["request"]["onnxruntime"][0] == 14


def test_a_model_that_rests_costs_nothing_and_is_told_once():
    statistics, readings = ModelStatistics("m", "1"), Readings()
    readings.read([statistics], 1.0, 1.0)
    answer(statistics, 100)
    busy = readings.read([statistics], 2.0, 1.0)["m", "1"]
    rests = readings.read([statistics], 3.0, 1.0)["m", "1"]
    assert rests is not busy
    assert rests["requests_per_second"] == 0
    assert readings.read([statistics], 4.0, 1.0)["m", "1"] is rests
    assert [point["rps"] for point in readings.points("m")["1"]] == [1.0, 0.0]


def test_points_are_bounded_and_go_with_their_model():
    statistics, readings = ModelStatistics("m", "1"), Readings()
    for second in range(MAX_POINTS + 10):
        answer(statistics, 100)
        readings.read([statistics], float(second), 1.0)
    points = readings.points("m")["1"]
    assert len(points) == MAX_POINTS
    assert points[-1]["t"] == MAX_POINTS + 9
    readings.read([], 1e6, 1.0)
    assert readings.points("m") == {}


def test_a_model_loaded_anew_begins_anew():
    readings = Readings()
    old, new = ModelStatistics("m", "1"), ModelStatistics("m", "1")
    answer(old, 100, times=100)
    readings.read([old], 1.0, 1.0)
    answer(new, 100)
    assert readings.read([new], 2.0, 1.0)["m", "1"]["requests_per_second"] == 0
