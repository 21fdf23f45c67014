"""What is made first, and what becomes current together."""

from __future__ import annotations

import threading

import pytest

from hone.specialization import Signature
from hone.tuning.signatures import Traffic, values_of
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

ONE, TWO, FOUR = "IN:FP32[1,4]", "IN:FP32[2,4]", "IN:FP32[4,4]"


def rows(number: int) -> Signature:
    return Signature.of([("IN", "FP32", (number, 4))])


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()
    rig.tuner._lanes.close()


def signatures_of(rig, child: int = 0) -> list[str]:
    return [digest.split("/")[1] for digest, _ in rig.children()[child]]


def test_the_signature_with_the_most_engine_time_is_made_first(rig):
    rig.traffic.ran("m", 1, rows(4), 3.0)
    for _ in range(5):
        rig.traffic.ran("m", 1, rows(1), 0.1)
    rig.model({"*": PASS})
    rig.run()
    assert signatures_of(rig) == [FOUR, ONE, TWO]
    assert rig.serving.swaps == [[FOUR], [ONE, TWO]]


def test_without_traffic_the_smallest_batch_is_first(rig):
    rig.model({"*": PASS})
    rig.run()
    assert signatures_of(rig) == [ONE, TWO, FOUR]


def test_traffic_that_comes_while_a_job_waits_counts(rig):
    rig.model({"*": PASS})
    rig.tuner.attend()
    rig.traffic.ran("m", 1, rows(2), 1.0)
    rig.run()
    assert signatures_of(rig) == [TWO, ONE, FOUR]


def test_the_first_wave_serves_while_the_rest_is_made(rig):
    rig.model({"*": PASS, FOUR: "slow"})
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.serving.running, "the first wave serves")
    assert thread.is_alive()
    wait_until(lambda: rig.buckets()[TWO]["outcome"] == "passed", "the second passed")
    rig.tuner.wake()
    assert set(rig.serving.running()) == {ONE}, "it waits for the others of its wave"
    assert rig.status()["state"] == "tuning"
    assert rig.buckets()[ONE]["engine"] == "tvm"
    (rig.folder / "m.onnx.go").touch()
    thread.join(60)
    assert rig.serving.swaps == [[ONE], [TWO, FOUR]]


def test_where_the_first_is_refused_the_next_goes_first(rig):
    rig.model({"*": PASS, ONE: {"outcome": "refused", "reason": "slow"}})
    rig.run()
    assert rig.serving.swaps == [[TWO], [FOUR]]


def test_later_jobs_of_a_version_that_is_tuned_are_one_wave(rig):
    ref = rig.model({"*": PASS})
    rig.cache.put(rig.key(ref, ONE))
    rig.run()
    assert rig.serving.swaps == [[ONE], [TWO, FOUR]], "the first from the cache"


def test_what_is_remembered_comes_in_two_waves_too(rig):
    """After a restart: the first answers before the others are loaded."""
    ref = rig.model({"*": PASS})
    for signature in (ONE, TWO, FOUR):
        rig.cache.put(rig.key(ref, signature))
    rig.run()
    assert rig.serving.swaps == [[ONE], [TWO, FOUR]]
    assert not rig.children()


def test_a_wave_is_warm_as_a_whole_before_it_is_swapped_in(rig):
    rig.model({"*": PASS})
    promote = rig.serving.promote
    warm = []

    def look(ref, specializations):
        warm.append([one.engine.num_runs for one in specializations])
        return promote(ref, specializations)

    rig.serving.promote = look
    rig.run()
    assert warm == [[2], [2, 2]]


# --- what a specialization is worth


def test_live_batches_count_for_the_smallest_bucket_that_holds_them():
    buckets = [rows(1), rows(2), rows(8)]
    shares = {rows(1): 0.1, rows(3): 0.2, rows(8): 0.3, rows(9): 0.4, Signature.of([("IN", "FP32", (1, 5))]): 0.5}
    values = values_of(buckets, shares, batching=True)
    assert values == {rows(1): 0.1, rows(2): 0.0, rows(8): 0.5}
    assert values_of(buckets, shares, batching=False) == {rows(1): 0.1, rows(2): 0.0, rows(8): 0.3}


def test_shares_are_of_all_engine_time():
    traffic = Traffic()
    traffic.ran("a", 1, rows(1), 1.0)
    traffic.ran("a", 1, rows(2), 2.0)
    traffic.ran("b", 1, rows(1), 5.0)
    assert traffic.shares("a", 1) == {rows(1): 0.125, rows(2): 0.25}
    assert traffic.shares("c", 1) == {}


def test_jobs_are_ordered_by_the_time_that_their_signatures_take(rig):
    """Most time goes into a signature of `done` that is known already; what is left of it is worth less."""
    done = rig.model({"*": PASS}, name="done")
    for signature in (ONE, TWO):
        rig.cache.put(rig.key(done, signature))
    rig.model({"*": PASS}, name="other", graph="g2", max_batch_size=1)
    rig.traffic.ran("done", 1, rows(1), 9.0)
    rig.traffic.ran("other", 1, rows(1), 1.0)
    rig.tuner.attend()
    while not rig.children("other") and not rig.children("done"):
        assert rig.tuner.step()
    assert rig.children("other")
    assert not rig.children("done")
