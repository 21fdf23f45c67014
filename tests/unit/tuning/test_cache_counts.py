"""What tuning processes did with the cache reaches the server's metrics: whole, once, and whatever they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hone.kernels import KernelsCache
from hone.kernels.statistics import CacheStatistics
from hone.tuning.book import TunerCounters
from hone.tuning.cache_counts import CacheTelling, CacheTraffic
from hone.tuning.metrics import TuningCollector
from tests.unit.tuning.fakes import PASS, Rig

DIGEST, SCOPE = "a" * 64, "b" * 64


@pytest.fixture
def child(tmp_path):
    """A cache as a child has it, what it tells of it, and the server's sums of that."""
    cache, sums, events, clock = KernelsCache(tmp_path / "cache"), CacheTraffic(), [], [0.0]

    def emit(event, **fields):
        events.append(event)
        sums.hear({"event": event, **fields})

    telling = CacheTelling(cache.statistics, emit, lambda: clock[0])
    return SimpleNamespace(cache=cache, sums=sums, events=events, clock=clock, telling=telling)


def test_each_count_is_told_once(child):
    child.telling.tell()
    assert child.events == [], "there is nothing to tell"
    for _ in range(3):
        child.cache.get("decisions", DIGEST, SCOPE)
        child.cache.publish("decisions", DIGEST, SCOPE, {"x.json": b"{}"}, {})
        child.cache.get("decisions", DIGEST, SCOPE)
        child.telling.tell()
        child.telling.tell()
    assert child.events == ["cache"] * 3
    assert child.sums.hits == {"decisions": 5}
    assert child.sums.misses == {("decisions", "absent"): 1}
    assert child.sums.publishes == {("decisions", "published"): 1, ("decisions", "present"): 2}
    assert child.sums.num_discarded == 0


def test_what_was_taken_away_is_told_too(child):
    entry = child.cache.publish("decisions", DIGEST, SCOPE, {"x.json": b"{}"}, {})
    entry.files["x.json"].write_bytes(b"[]")
    child.cache.get("decisions", DIGEST, SCOPE)
    child.telling.tell()
    assert child.sums.misses == {("decisions", "corrupt"): 1}
    assert child.sums.num_discarded == 1


def test_it_is_told_before_each_outcome_and_now_and_then_on_the_way(child):
    child.cache.get("kernels", DIGEST, "avx2")
    child.telling.emit("stage", stage="searching")
    assert child.events == ["stage"]
    child.clock[0] = 6.0
    child.telling.emit("stage", stage="searching")
    assert child.events == ["stage", "cache", "stage"]
    child.cache.get("kernels", DIGEST, "avx2")
    child.telling.emit("stage", stage="searching")
    child.telling.emit("specialized", index=0)
    assert child.events[3:] == ["stage", "cache", "specialized"]
    assert child.sums.misses == {("kernels", "absent"): 2}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"hits": None, "misses": 7, "publishes": {"kernels": 1}, "discarded": "many"},
        {"hits": [["wheels", 1], ["kernels", -1], ["kernels", True], ["kernels", 1.5], ["kernels", 1 << 50]]},
        {"hits": [[], ["kernels"], "kernels", [["kernels"], 1], ["kernels", "absent", 1]]},
        {"misses": [["kernels", "bored", 1], ["kernels", 1]], "publishes": [["kernels", "absent", 1]]},
    ],
)
def test_what_is_no_count_says_nothing(told):
    sums = CacheTraffic()
    sums.hear({"event": "cache", **told})
    assert sums == CacheTraffic()


def samples(counters, statistics):
    tuning = SimpleNamespace(
        statuses=list,
        counters=counters,
        num_queued=0,
        num_declined={},
        num_spared=0,
        cache_limit_bytes=None,
        cache_statistics=statistics,
    )
    found = [sample for metric in TuningCollector(tuning).collect() for sample in metric.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def test_metrics_have_the_sum_of_the_server_and_its_children(child):
    child.cache.get("decisions", DIGEST, SCOPE)
    counters = TunerCounters()
    counters.cache.hear(
        {
            "event": "cache",
            "hits": [["kernels", 3], ["decisions", 2]],
            "misses": [["decisions", "absent", 4], ["kernels", "corrupt", 1]],
            "publishes": [["kernels", "published", 5]],
            "discarded": [[1]],
        }
    )
    found = samples(counters, child.cache.statistics)
    assert found["hone_cache_hits_total", "kernels"] == 3
    assert found["hone_cache_misses_total", "decisions", "absent"] == 5
    assert found["hone_cache_misses_total", "kernels", "corrupt"] == 1
    assert found["hone_cache_publishes_total", "kernels", "published"] == 5
    assert found["hone_cache_discarded_total",] == 1
    assert samples(counters, CacheStatistics())["hone_cache_misses_total", "decisions", "absent"] == 4


def test_a_real_child_is_heard(tmp_path):
    """Its words come through its pipe, and are no event for those who follow the job."""
    rig = Rig(tmp_path)
    told = {"event": "cache", "hits": [["kernels", 2]], "misses": [["kernels", "absent", 1]], "publishes": []}
    rig.model({"*": PASS, "says": [told]}, max_batch_size=1)
    rig.run()
    assert rig.status()["state"] == "tuned"
    assert rig.tuner.counters.cache.hits == {"kernels": 2}
    assert rig.tuner.counters.cache.misses == {("kernels", "absent"): 1}
    assert "cache" not in rig.events()
    assert rig.tuner.stop()
