"""What the tuner does about mistakes in hone itself, and about things that happen at the same moment."""

from __future__ import annotations

import pytest

from hone.kernels.statistics import CacheStatistics
from hone.tuning.metrics import TuningCollector
from hone.tuning.probation import Death, Served
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

ONE, TWO = "IN:FP32[1,4]", "IN:FP32[2,4]"
FAULT = "a fault in hone, see the server's log"


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()
    rig.tuner._lanes.close()


def mistake(*args, **fields):
    raise RuntimeError("a mistake")


def work(rig):
    """Until there is nothing to do, or a mistake."""
    while rig.tuner.step():
        pass


def test_a_job_that_ends_is_promoted_and_told_whatever_goes_wrong_then(rig):
    rig.model({"*": PASS})
    rig.tuner.attend()
    rig.serving.tunable = mistake
    with pytest.raises(RuntimeError, match="a mistake"):
        work(rig)
    assert len(rig.serving.running()) == 3
    assert rig.status()["state"] == "tuned"


def test_a_job_that_ends_is_told_also_where_it_cannot_be_promoted(rig, monkeypatch):
    rig.model({"*": {"outcome": "refused", "reason": "slow"}}, max_batch_size=1)
    rig.tuner.attend()
    monkeypatch.setattr(rig.tuner._promoter, "promote", mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        work(rig)
    assert rig.status()["state"] == "baseline"


def test_children_are_looked_after_whatever_goes_wrong_elsewhere(rig, monkeypatch):
    rig.model({"*": "slow"}, max_batch_size=1)
    rig.tuner.step()
    monkeypatch.setattr(rig.tuner, "attend", mistake)
    (rig.folder / "m.onnx.go").touch()

    def serves():
        with pytest.raises(RuntimeError, match="a mistake"):
            rig.tuner.step()
        return rig.serving.running()

    wait_until(serves, "what the child made serves")


def test_tasks_of_a_job_that_a_mistake_ends_have_an_outcome(rig, monkeypatch):
    rig.model({"*": PASS, TWO: "slow"}, max_batch_size=2)
    rig.tuner.step()
    wait_until(lambda: rig.tuner.step() and rig.serving.running(), "the first passed")
    monkeypatch.setattr(rig.tuner._lanes._makers["cpu"], "_specialized", mistake)
    (rig.folder / "m.onnx.go").touch()
    with pytest.raises(RuntimeError, match="a mistake"):
        work(rig)
    told = {signature: (bucket["outcome"], bucket["reason"]) for signature, bucket in rig.buckets().items()}
    assert told == {ONE: ("passed", ""), TWO: ("failed", FAULT)}


def test_tasks_of_a_job_that_cannot_begin_have_an_outcome(rig, monkeypatch):
    rig.model({"*": PASS}, max_batch_size=2)
    maker = rig.tuner._lanes._makers["cpu"]
    monkeypatch.setattr(maker, "_spec", mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        work(rig)
    assert {(one["outcome"], one["reason"]) for one in rig.buckets().values()} == {("failed", FAULT)}
    assert rig.status()["state"] == "failed"
    monkeypatch.undo()
    rig.tuner.act("m", "", "start")
    rig.run()
    assert set(rig.serving.running()) == {ONE, TWO}


def test_a_job_that_cannot_be_ordered_holds_no_device(rig, monkeypatch):
    rig.model({"*": PASS}, max_batch_size=1)
    monkeypatch.setattr(rig.tuner._planner, "ordered", mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        rig.tuner.step()
    assert rig.tuner._devices.free() == [("cpu:0", "cpu")]


def test_what_failed_is_not_promoted_again_by_a_reload_at_the_same_moment(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    rig.watch.failed(ref, 1, "tvm: it broke")
    rig.model({"*": PASS}, max_batch_size=1, baseline=rig.serving.versions[ref].baseline)
    rig.run()
    assert rig.serving.running() == {}
    assert len(rig.serving.swaps) == 1
    assert rig.buckets()[ONE]["outcome"] == "quarantined"


def test_what_another_server_put_into_quarantine_is_not_promoted(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    (record,) = rig.tuner._book.records.values()
    rig.tuner._promoter.roll_back_all(record, "a test")
    rig.cache.out[rig.key(ref, ONE)] = "it broke there"
    rig.tuner._promoter.promote(ref)
    assert rig.serving.running() == {}
    (bucket,) = record.buckets.values()
    assert (bucket.outcome, bucket.reason) == ("quarantined", "it broke there")


class Flaky:
    """A quarantine that fails for one artifact, as long as it is told to."""

    def __init__(self, cache, digest):
        self.cache, self.digest = cache, digest
        self.fails, self.num_tries = True, 0

    def quarantine(self, digest, *args):
        if digest == self.digest:
            self.num_tries += 1
            if self.fails:
                raise OSError(24, "Too many open files")
        return self.cache.quarantine(digest, *args)

    strike = quarantine


@pytest.fixture
def flaky(rig):
    """Both signatures have served and failed; the quarantine cannot take the first of them."""
    ref = rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    serving = rig.serving.running()
    assert set(serving) == {ONE, TWO}
    rig.tuner._promoter._quarantine = flaky = Flaky(rig.cache, rig.key(ref, ONE))
    for text in (ONE, TWO):
        rig.watch.failed(ref, serving[text], "tvm: it broke")
    return flaky


def test_an_incident_that_cannot_be_handled_does_not_take_the_next_along(rig, flaky, caplog):
    rig.tuner.attend()
    assert list(rig.cache.out) == [flaky.digest.replace(ONE, TWO)]
    buckets = rig.buckets()
    assert buckets[TWO]["outcome"] == "quarantined"
    assert (buckets[ONE]["outcome"], buckets[ONE]["generation"]) == ("refused", 0), "it does not serve, and is told so"
    assert rig.status()["state"] == "baseline"
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert all(word in told[0] for word in ("m generation 1", "it failed on a request: tvm: it broke", "again"))


def test_an_incident_that_could_not_be_handled_is_handled_later(rig, flaky):
    rig.tuner.attend()
    rig.tuner.attend()
    assert flaky.num_tries == 1, "there is a pause in between"
    flaky.fails = False
    rig.pass_time(1.5)
    rig.tuner.attend()
    assert flaky.digest in rig.cache.out
    assert rig.buckets()[ONE]["outcome"] == "quarantined"
    assert rig.events().count("rolled_back") == rig.events().count("quarantined") == 2
    assert rig.tuner.counters.num_rollbacks == {"error": 2}
    assert rig.tuner.counters.num_quarantines == 2
    rig.pass_time(1000)
    rig.tuner.attend()
    assert flaky.num_tries == 2


@pytest.mark.parametrize("seconds", [0, 10_000])
def test_what_cannot_be_quarantined_is_not_promoted_again(rig, flaky, seconds):
    for _ in range(20):  # it is not tried for ever
        rig.tuner.attend()
        rig.pass_time(seconds)
    assert flaky.num_tries == (6 if seconds else 1)
    (ref,) = rig.serving.versions
    rig.serving.unload(ref)
    rig.run()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    assert rig.serving.running() == {}
    assert {bucket["outcome"] for bucket in rig.buckets().values()} == {"quarantined"}


def test_an_incident_that_cannot_be_told_is_told_later(rig):
    ref = rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    note, fails = rig.tuner._book.note, [True]
    rig.tuner._book.note = lambda *args, **fields: mistake() if fails and fails.pop() else note(*args, **fields)
    for generation in rig.serving.running().values():
        rig.watch.failed(ref, generation, "tvm: it broke")
    rig.tuner.attend()
    assert set(rig.cache.out) == {rig.key(ref, ONE), rig.key(ref, TWO)}
    rig.pass_time(1.5)
    rig.tuner.attend()
    assert {bucket["outcome"] for bucket in rig.buckets().values()} == {"quarantined"}
    assert rig.status()["state"] == "baseline"
    assert rig.tuner.counters.num_quarantines == 2


def test_a_death_that_cannot_be_held_against_anybody_leaves_the_tuner_alive(rig, flaky):
    promoter = rig.tuner._promoter
    promoter.blame([Death("SIGSEGV", (Served(flaky.digest, "cpu"), Served("other", "cpu")))])
    assert list(rig.cache.out) == ["other"]
    flaky.cache.out.clear()
    rig.watch._incidents.clear()
    rig.serving.routes.clear()
    (record,) = rig.tuner._book.records.values()
    promoter.renew(record)
    promoter.promote(record.version.ref)
    assert set(rig.serving.running()) == {TWO}
    assert rig.buckets()[ONE]["reason"] == "a server died of SIGSEGV while it ran, on probation"


@pytest.mark.parametrize("action", ["retune", "start"])
def test_time_that_a_child_took_before_a_start_does_not_count_after_it(rig, action):
    rig.model({"*": "slow"}, max_batch_size=1)
    rig.tuner.step()
    wait_until(lambda: rig.tuner.step() and rig.children(), "the child works")
    rig.pass_time(50.0)
    rig.tuner.act("m", "", action)
    rig.tuner.attend()
    (rig.folder / "m.onnx.go").touch()
    rig.run()
    assert rig.status()["state"] == "tuned"
    (record,) = rig.tuner._book.records.values()
    assert record.spent_seconds.get("cpu", 0.0) < 10.0


def test_both_kinds_of_device_have_series_of_their_own(tmp_path):
    rig = Rig(tmp_path, kinds=[("cpu:0", "cpu"), ("gpu:0", "gpu")])
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert [bucket["device"] for bucket in rig.status()["buckets"]] == ["cpu", "gpu"]
    tuner = rig.tuner

    class Told:
        statuses, counters, num_queued = tuner.statuses, tuner.counters, 0
        num_declined, num_spared, cache_limit_bytes = {}, 0, None
        cache_statistics = CacheStatistics()

    assert tuner.stop()
    for metric in TuningCollector(Told()).collect():
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in metric.samples]
        assert len(series) == len(set(series)), metric.name
