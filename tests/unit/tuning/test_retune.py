"""Asking again: on request for everything, by itself for what noise decided; and what an action's answer waits for."""

from __future__ import annotations

import threading

import pytest

from hone.kernels import KernelsCache
from hone.tuning.maker import MAX_REMEASURED, one_line
from hone.tuning.verdicts import Verdicts
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

ONE, TWO, FOUR = "IN:FP32[1,4]", "IN:FP32[2,4]", "IN:FP32[4,4]"


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()


def script(rig, ref, does):
    rig.model(does, baseline=rig.serving.versions[ref].baseline)


def test_retuning_asks_again_for_refusals_failures_and_what_passed(rig):
    ref = rig.model({"*": PASS, TWO: {"outcome": "refused", "reason": "slow"}, FOUR: {"outcome": "failed"}})
    rig.run()
    assert set(rig.serving.running()) == {ONE}
    script(rig, ref, {"*": PASS})
    rig.tuner.act("m", "", "retune")
    rig.run()
    assert rig.children()[1] == [
        [rig.key(ref, ONE), "gate"],
        [rig.key(ref, TWO), "build"],
        [rig.key(ref, FOUR), "build"],
    ]
    assert set(rig.serving.running()) == {ONE, TWO, FOUR}
    assert len(rig.serving.swaps) == 2, "what serves goes on serving"
    assert set(rig.cache.withdrawn) == {rig.key(ref, signature) for signature in (ONE, TWO, FOUR)}
    assert "retuned" in rig.events()


def test_what_does_not_pass_again_is_rolled_back(rig):
    ref = rig.model({"*": PASS})
    rig.run()
    script(rig, ref, {"*": {"outcome": "refused", "reason": "slow"}})
    rig.tuner.act("m", "", "retune")
    rig.run()
    assert rig.serving.running() == {}
    assert rig.status()["state"] == "baseline"


def test_who_is_quarantined_stays_out(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.cache.out[rig.key(ref, ONE)] = "wrong on a live request"
    rig.run()
    rig.tuner.act("m", "", "retune")
    rig.run()
    assert rig.children() == []
    assert rig.buckets()[ONE]["outcome"] == "quarantined"


def test_retuning_begins_anew_with_a_job_at_work(rig):
    rig.model({"*": "slow"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works")
    rig.tuner.act("m", "", "retune").result(30)
    (rig.folder / "m.onnx.go").touch()
    thread.join(60)
    assert len(rig.children()) == 2
    assert rig.status()["state"] == "tuned"


def test_a_refusal_is_forgotten_and_may_be_kept_again(tmp_path):
    digest, scope = "a" * 64, "b" * 64
    cache = KernelsCache(tmp_path / "cache")
    verdicts = Verdicts(cache, scope)
    verdicts.withdraw(digest)
    assert verdicts.recall(digest).state == "absent"
    verdicts.keep_refusal(digest, "refused", "slow", {"speedup": 0.9})
    verdicts.withdraw(digest)
    assert Verdicts(KernelsCache(tmp_path / "cache"), scope).recall(digest).state == "absent"
    verdicts.keep_refusal(digest, "refused", "still slow", {"speedup": 0.8})
    found = verdicts.recall(digest)
    assert (found.state, found.reason, found.verdict) == ("refused", "still slow", {"speedup": 0.8})
    cache.close()


def test_the_last_measurement_is_the_one_that_counts(tmp_path):
    digest, scope = "a" * 64, "b" * 64
    cache = KernelsCache(tmp_path / "cache")
    assert cache.publish("artifacts", digest, scope, {"module.so": b"x"}, {"verdict": {"speedup": 2.0}})
    verdicts = Verdicts(cache, scope)
    for speedup in (1.8, 1.7):
        verdicts.keep_measured(digest, {"speedup": speedup})
        assert verdicts.recall(digest).verdict == {"speedup": speedup}
    cache.close()


# --- by itself


def test_open_questions_are_asked_again_with_growing_pauses_and_not_for_ever(rig):
    rig.model({"*": {"outcome": "refused", "verdict": {"inconclusive": True}}}, max_batch_size=1)
    rig.run()
    asked = []
    for minute in range(2000):
        rig.pass_time(60)
        before = len(rig.children())
        rig.run()
        if len(rig.children()) > before:
            asked.append(minute)
    pauses = [b - a for a, b in zip([0, *asked], asked, strict=False)]
    assert len(asked) == MAX_REMEASURED
    assert pauses == sorted(pauses)
    assert pauses[-1] > 60


def test_open_questions_are_left_when_the_time_for_tuning_is_used_up(rig):
    rig.model({"*": {"outcome": "refused", "verdict": {"inconclusive": True}, "reason": "noise"}}, max_batch_size=1)
    rig.run()
    [record] = rig.tuner._book.records.values()
    record.spent_seconds = {"cpu": 1e9}
    rig.pass_time(1000)
    rig.run()
    assert len(rig.children()) == 1
    assert (rig.buckets()[ONE]["outcome"], rig.buckets()[ONE]["reason"]) == ("refused", "noise")


# --- actions and words


def test_an_action_has_taken_effect_when_its_future_is_done_also_while_a_child_works(rig):
    rig.model({"*": PASS, FOUR: "slow"})
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.serving.running, "the first wave serves")
    rig.tuner.act("m", "", "pin_baseline").result(30)
    assert rig.status()["state"] == "baseline"
    assert rig.serving.running() == {}
    thread.join(60)
    assert not thread.is_alive()


def test_actions_that_come_too_late_leave_nobody_waiting(rig):
    rig.model({"*": PASS})
    rig.run()
    done = rig.tuner.act("m", "", "pause")
    assert not done.done()
    assert rig.tuner.stop()
    assert done.done()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one  line", "one line"),
        ("\n first: \n  0: more\n 1: stack", "first:"),
        ('Traceback (most recent call last):\n  File "x"\nTVMError: no such  thing\n\n', "TVMError: no such thing"),
        ("x" * 999, "x" * 397 + "..."),
    ],
)
def test_reasons_are_one_line(text, line):
    assert one_line(text) == line


def test_a_child_that_dies_is_one_line_in_the_log_and_whole_in_the_history(rig, caplog):
    rig.model({"*": "crash"}, max_batch_size=1)
    rig.run()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith("tuning of m: the tuning process died by SIGSEGV")
    assert "\n" not in told[0]
    [line] = [line for line in rig.status()["history"] if line["event"] == "child_failed"]
    assert "Fatal Python error: Segmentation fault" in line["detail"]
