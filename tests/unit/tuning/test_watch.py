"""What happens to a generation after its promotion, with scripted engines and a scripted timer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hone.specialization import Signature, Specialization, VersionRef
from hone.tuning.activity import Activity
from hone.tuning.watch import MIN_PAIRS, Watch, Watched, WatchOptions, copied
from tests.unit.tuning.fakes import PASS, Engine, Rig, Serving

FOUR = Signature.of([("IN", "FP32", (4, 4))])


class Timed(Engine):
    """Moves the timer by what a run takes."""

    def __init__(self, watching: Watching, seconds: float, factor: float = 2.0) -> None:
        super().__init__(factor)
        self.watching, self.seconds = watching, seconds
        self.rows: list[int] = []

    def run(self, inputs, outputs):
        self.watching.ns += int(self.seconds * 1e9)
        self.rows.append(inputs["IN"].shape[0])
        return super().run(inputs, outputs)


class Watching:
    def __init__(self, baseline_seconds=0.002, tuned_seconds=0.001, factor=2.0, **options) -> None:
        self.ns = 0
        self.now = 0.0
        self.activity = Activity(5, 5)
        self.serving = Serving()
        self.ref = VersionRef("m", 1, "g")
        self.baseline, self.tuned = Timed(self, baseline_seconds), Timed(self, tuned_seconds, factor)
        self.serving.versions[self.ref] = None
        generations = self.serving.promote(self.ref, [Specialization(FOUR, self.tuned, "artifact", 4)])
        self.generation = generations[FOUR]
        self.watch = Watch(
            self.serving,
            options=WatchOptions(**options),
            activity=lambda: self.activity,
            clock=lambda: self.now,
            timer=lambda: self.ns,
        )
        self.watch.begin(
            Watched(self.ref, self.generation, FOUR, "cpu", "artifact", self.baseline, self.tuned, "f32", None, True)
        )

    def sample(self, rows=4, outputs=None, idle=True, broken=None):
        """One live execution, and a step of the watch."""
        self.now += 10.0
        assert self.watch.wants_sample(self.ref, self.generation)
        inputs = {"IN": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + 1}
        if broken is not None:
            inputs["IN"][0, 0] = broken
        if outputs is None:
            outputs = inputs["IN"] * np.float32(self.tuned.factor)
        self.watch.sampled(self.ref, self.generation, inputs, {"OUT": outputs})
        return self.watch.step(idle=idle)

    @property
    def serves(self) -> bool:
        return bool(self.serving.running())


def test_right_and_faster_goes_on_serving():
    watching = Watching()
    for _ in range(MIN_PAIRS - 1):
        assert watching.sample() == ([], [])
    incidents, passed = watching.sample()
    assert incidents == []
    assert [watched.artifact for watched in passed] == ["artifact"]
    assert watching.serves


def test_an_error_rolls_back_at_once_from_any_thread_and_is_told_once():
    watching = Watching()
    for _ in range(3):
        watching.watch.failed(watching.ref, watching.generation, "tvm: it broke")
    assert not watching.serves, "before the watch's own thread had a look"
    incidents, _ = watching.watch.step(idle=True)
    assert [(i.cause, i.reason) for i in incidents] == [("error", "it failed on a request: tvm: it broke")]
    assert not watching.watch.wants_sample(watching.ref, watching.generation)


def test_nan_where_the_baseline_has_none_rolls_back():
    watching = Watching()
    wrong = np.ones((4, 4), np.float32)
    wrong[2, 1] = np.nan
    incidents, _ = watching.sample(outputs=wrong)
    assert [i.cause for i in incidents] == ["outputs"]
    assert "NaN" in incidents[0].reason
    assert not watching.serves


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_request_takes_nothing_out_of_service(broken):
    """Whoever sends NaN may get another answer to it than the baseline's; nobody else is to pay for that."""
    watching = Watching()
    assert watching.sample(outputs=np.ones((4, 4), np.float32), broken=broken) == ([], [])
    assert watching.serves
    assert watching.sample(outputs=np.ones((4, 4), np.float32))[0], "with sound inputs it is wrong"


def test_wrong_numbers_roll_back_also_while_a_child_runs():
    watching = Watching(factor=2.1)
    incidents, _ = watching.sample(idle=False)
    assert [i.cause for i in incidents] == ["outputs"]
    assert not watching.serves


def test_slower_over_thirty_pairs_rolls_back():
    watching = Watching(baseline_seconds=0.001, tuned_seconds=0.0012)
    for _ in range(MIN_PAIRS - 1):
        assert watching.sample() == ([], [])
        assert watching.serves
    incidents, passed = watching.sample()
    assert [i.cause for i in incidents] == ["latency"]
    assert "1.2 times as long over 30 pairs" in incidents[0].reason
    assert passed == []
    assert not watching.serves


def test_noise_around_equal_does_not_roll_back():
    generator = np.random.default_rng(5)
    watching = Watching()
    for _ in range(400):
        watching.baseline.seconds, watching.tuned.seconds = generator.normal(0.001, 0.0001, 2).tolist()
        incidents, _ = watching.sample()
        assert incidents == []
    assert watching.serves


def test_a_slowdown_that_comes_later_is_found():
    watching = Watching()
    for _ in range(40):
        watching.sample()
    watching.tuned.seconds = 0.004
    incidents = []
    for _ in range(3000):
        if not watching.serves:
            break
        incidents += watching.sample()[0]
    assert [i.cause for i in incidents] == ["latency"]


def test_no_pairs_while_a_child_or_a_request_runs():
    watching = Watching(baseline_seconds=0.001, tuned_seconds=0.01)
    for _ in range(MIN_PAIRS + 1):
        watching.sample(idle=False)
    watching.activity = Activity(6, 5)
    for _ in range(MIN_PAIRS + 1):
        watching.sample()
    assert watching.serves
    assert watching.watch.watched()[0].ratios == []


def test_a_pair_with_a_request_in_between_does_not_count():
    watching = Watching()
    run = watching.tuned.run

    def run_beside_a_request(inputs, outputs):
        watching.activity = Activity(watching.activity.num_started + 1, watching.activity.num_finished + 1)
        return run(inputs, outputs)

    watching.tuned.run = run_beside_a_request
    watching.sample()
    assert watching.watch.watched()[0].ratios == []


def test_smaller_batches_are_timed_with_their_padding():
    watching = Watching()
    watching.sample(rows=3)
    assert set(watching.tuned.rows) == {4}
    assert set(watching.baseline.rows) == {3}


def test_samples_cost_no_more_than_their_share():
    watching = Watching(sample_interval_seconds=1.0, max_share=0.01)
    run = watching.baseline.run

    def takes_a_second(inputs, outputs):
        watching.now += 1.0
        return run(inputs, outputs)

    watching.baseline.run = takes_a_second
    watching.sample(idle=False)
    watching.now += 99.0
    assert not watching.watch.wants_sample(watching.ref, watching.generation)
    watching.now += 2.0
    assert watching.watch.wants_sample(watching.ref, watching.generation)


def test_one_sample_waits_at_a_time():
    watching = Watching()
    watching.watch.sampled(watching.ref, watching.generation, {"IN": np.ones((4, 4), np.float32)}, {})
    watching.now += 100
    assert not watching.watch.wants_sample(watching.ref, watching.generation)


def test_probation_ends_with_time_where_there_is_no_traffic():
    watching = Watching(probation_seconds=600.0)
    watching.now += 599
    assert watching.watch.step(idle=True) == ([], [])
    watching.now += 2
    assert len(watching.watch.step(idle=True)[1]) == 1
    assert watching.watch.step(idle=True) == ([], []), "told once"


def test_samples_of_what_no_longer_serves_are_dropped():
    watching = Watching(factor=9.0)
    watching.watch.sampled(watching.ref, watching.generation, {"IN": np.ones((4, 4), np.float32)}, {})
    assert len(watching.watch.end(watching.ref)) == 1
    assert watching.watch.step(idle=True) == ([], [])


def test_samples_of_a_version_that_is_gone_are_not_run():
    watching = Watching()
    watching.now += 10
    watching.watch.sampled(watching.ref, watching.generation, {"IN": np.ones((4, 4), np.float32)}, {})
    del watching.serving.versions[watching.ref]
    watching.watch.step(idle=True)
    assert watching.baseline.num_runs == 0


def test_what_fails_while_the_watch_looks_is_told_at_once_and_not_lost():
    watching = Watching()
    watch, ref = watching.watch, watching.ref

    class Meanwhile(SimpleNamespace):
        @property
        def on_probation(self):
            watch.failed(ref, watching.generation, "tvm: it broke")
            return False

    watch.begin(Meanwhile(ref=ref, generation=99, ratios=[]))
    incidents, passed = watch.step(idle=True)
    assert [incident.watched.generation for incident in incidents] == [watching.generation]
    assert passed == []


def test_copies_are_ones_own():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    taken = copied({"A": array.T})["A"]
    assert taken.flags.c_contiguous
    assert not np.shares_memory(taken, array)


# --- with the tuner


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()


ONE = "IN:FP32[1,4]"


def test_a_failure_is_quarantined_and_not_promoted_again(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    rig.watch.failed(ref, 1, "tvm: it broke")
    rig.run()
    assert rig.serving.running() == {}
    assert rig.cache.out == {rig.key(ref, ONE): "it failed on a request: tvm: it broke"}
    assert rig.status()["state"] == "baseline"
    assert rig.events()[-2:] == ["rolled_back", "quarantined"]
    assert rig.tuner.counters.num_rollbacks == {"error": 1}
    rig.tuner.act("m", "", "start")
    rig.run()
    assert rig.serving.running() == {}


def test_slowness_is_quarantined_the_second_time(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    for time in (1, 2):
        rig.run()
        assert rig.serving.running() == {ONE: time}
        rig.watch._give_up(ref, time, "latency", "slower")
        rig.tuner._promoter.follow_watch(idle=False)
        assert bool(rig.cache.out) == (time == 2)
        assert rig.serving.running() == {}
        rig.serving.unload(ref)
        rig.tuner.wake()
        rig.run()
        rig.model({"*": "crash"}, max_batch_size=1)
    rig.run()
    assert rig.serving.running() == {}
    assert rig.buckets()[ONE]["outcome"] == "quarantined"
