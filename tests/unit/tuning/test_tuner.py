"""The tuner with serving and cache in memory; its children are real processes that follow a script."""

from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest

from hone.errors import EngineBusy, EngineError, InvalidRequest, NotFound, Unavailable
from hone.specialization import Signature
from hone.tuning.budget import Budget
from hone.tuning.inputs import InputSet
from hone.tuning.metrics import JOB_ENDS
from hone.types import TensorSpec
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, SCRIPT, Engine, Rig

ONE, TWO, FOUR = "IN:FP32[1,4]", "IN:FP32[2,4]", "IN:FP32[4,4]"


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()


def test_a_new_model_is_made_checked_and_promoted_in_two_waves(rig):
    ref = rig.model({"*": PASS})
    rig.run()
    assert rig.serving.swaps == [[ONE], [TWO, FOUR]]
    assert rig.serving.running() == {ONE: 1, TWO: 2, FOUR: 3}
    status = rig.status()
    assert (status["model"], status["version"], status["state"], status["progress"]) == ("m", "1", "tuned", 1.0)
    assert status["job"] == {}, "nothing is searched any more"
    assert rig.buckets()[TWO] == {
        "signature": TWO,
        "device": "cpu",
        "artifact": rig.key(ref, TWO),
        "engine": "tvm",
        "generation": 2,
        "baseline_ms": 1.0,
        "tuned_ms": 0.5,
        "speedup": 2.0,
        "max_error": 1e-6,
        "tolerance": 1e-3,
        "plans": {},
        "provisional": False,
        "outcome": "passed",
        "reason": "",
    }
    assert sorted(rig.events()) == ["passed"] * 3 + ["promoted"] * 3
    assert rig.tuner.counters.num_promotions == 3
    assert rig.tuner.counters.report == {"candidates_built": 9, "compile_seconds": 1.5}
    assert rig.tuner.counters.jobs == {("done", ""): 1}


def test_every_engine_was_warmed_before_the_swap(rig):
    rig.model({"*": PASS})
    rig.run()
    assert all(engine.num_runs >= 2 for engine in rig.engines.values())


def test_buckets_that_fail_the_gate_stay_on_the_baseline(rig):
    rig.model({"*": PASS, TWO: {"outcome": "refused", "reason": "not faster by 3%: 1 ms, 1 ms"}})
    rig.run()
    assert set(rig.serving.running()) == {ONE, FOUR}
    assert rig.status()["state"] == "tuned"
    assert rig.buckets()[TWO]["engine"] == "onnxruntime"
    assert rig.buckets()[TWO]["reason"] == "not faster by 3%: 1 ms, 1 ms"
    assert rig.status()["reason"] == f"{TWO}: not faster by 3%: 1 ms, 1 ms"


@pytest.mark.parametrize(
    ("does", "state"),
    [
        ({"outcome": "refused", "reason": "slow"}, "baseline"),
        ({"outcome": "unsupported", "reason": "LSTM"}, "unsupported"),
        ({"outcome": "failed", "reason": "broken"}, "failed"),
    ],
)
def test_states_when_nothing_passes(rig, does, state):
    rig.model({"*": does})
    rig.run()
    assert rig.status()["state"] == state
    assert rig.serving.running() == {}
    assert does["reason"] in rig.status()["reason"]


@pytest.mark.parametrize(
    ("does", "reason"),
    [("crash", "the tuning process died by SIGSEGV"), ("garbage", "the tuning process wrote garbage")],
)
def test_a_task_that_takes_its_child_along_is_the_only_one_that_fails(rig, does, reason):
    rig.model({"*": PASS, TWO: does})
    rig.run()
    assert set(rig.serving.running()) == {ONE, FOUR}
    assert rig.buckets()[TWO]["outcome"] == "failed"
    assert reason in rig.buckets()[TWO]["reason"]
    assert [len(tasks) for tasks in rig.children()] == [3, 1], "the second child has what the first left"


def test_a_child_that_ends_while_it_tries_schedules_is_followed_by_a_careful_one(rig):
    rig.model({"*": "crash in schedules"})
    rig.run()
    assert set(rig.serving.running()) == {ONE, TWO, FOUR}
    assert [len(tasks) for tasks in rig.children()] == [3, 3]


class Starving:
    def step(self, ran: float, waited: float) -> bool:
        return True


def test_a_child_that_starves_is_followed_by_one_that_takes_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr("hone.tuning.maker.Starvation", Starving)
    rig = Rig(tmp_path, budget=Budget(pause=True))
    rig.model({"*": PASS})
    rig.run()
    assert set(rig.serving.running()) == {ONE, TWO, FOUR}
    assert rig.tuner.counters.jobs == {("starved", "starved"): 1, ("done", ""): 1}
    assert rig.tuner.stop()


def test_a_child_that_never_begins_is_not_tried_for_ever(tmp_path):
    rig = Rig(tmp_path, command=("/nonexistent/python",))
    rig.model({"*": PASS})
    rig.run()
    assert rig.status()["state"] == "failed"
    assert "cannot start a tuning process" in rig.status()["reason"]
    assert rig.tuner.counters.jobs == {("failed", "start"): 1}


def test_what_the_cache_knows_is_promoted_without_a_child(rig):
    ref = rig.model({"*": "crash"})
    for signature in (ONE, TWO, FOUR):
        rig.cache.put(rig.key(ref, signature))
    rig.run()
    assert set(rig.serving.running()) == {ONE, TWO, FOUR}
    assert rig.children() == []
    assert rig.buckets()[ONE]["speedup"] == 2.0


def test_only_what_is_new_is_made(rig):
    ref = rig.model({"*": PASS})
    rig.cache.put(rig.key(ref, ONE))
    rig.cache.put(rig.key(ref, TWO), "refused")
    rig.run()
    assert rig.children() == [[[rig.key(ref, FOUR), "build"]]]
    assert set(rig.serving.running()) == {ONE, FOUR}


def test_imported_entries_go_through_the_gate_first(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.cache.put(rig.key(ref, ONE), "unproven")
    rig.tuner.attend()
    assert rig.serving.running() == {}
    rig.run()
    assert rig.children() == [[[rig.key(ref, ONE), "gate"]]]
    assert set(rig.serving.running()) == {ONE}


def test_only_from_the_cache(tmp_path):
    rig = Rig(tmp_path, mode="cache")
    ref = rig.model({"*": "crash"})
    rig.cache.put(rig.key(ref, ONE))
    rig.run()
    assert rig.children() == []
    assert set(rig.serving.running()) == {ONE}
    assert rig.buckets()[TWO]["reason"] == "it is not in the cache, and tuning is 'cache'"


def test_off_does_nothing_and_says_so(tmp_path):
    rig = Rig(tmp_path, mode="off")
    ref = rig.model({"*": "crash"}, parameters={"tuning": "on"})
    rig.cache.put(rig.key(ref, ONE))
    rig.run()
    assert (rig.status()["state"], rig.serving.running(), rig.children()) == ("off", {}, [])


def test_a_model_can_turn_itself_off(rig):
    rig.model({"*": "crash"}, parameters={"tuning": "off"})
    rig.run()
    assert rig.status()["state"] == "off"


def test_settings_that_cannot_be_read_turn_the_model_off_with_the_reason(rig):
    rig.model({"*": PASS}, parameters={"signatures": "OTHER:1x4"})
    rig.run()
    assert rig.status()["state"] == "off"
    assert rig.status()["history"][0]["reason"] == "signatures: unknown input 'OTHER', expected one of ['IN']"


def test_without_a_compiler_the_cache_is_used_and_the_rest_says_why(tmp_path):
    rig = Rig(tmp_path, cannot_build="no C++ compiler was found")
    ref = rig.model({"*": "crash"})
    rig.cache.put(rig.key(ref, ONE))
    rig.run()
    assert rig.children() == []
    assert set(rig.serving.running()) == {ONE}
    assert rig.buckets()[TWO]["reason"] == "no C++ compiler was found"


def test_an_engine_that_is_busy_is_waited_for(rig):
    class Busy(Engine):
        def run(self, inputs, outputs):
            self.num_refused = getattr(self, "num_refused", 0) + 1
            if self.num_refused <= 2:
                raise EngineBusy("a model is being loaded onto a GPU")
            return super().run(inputs, outputs)

    rig.make_engine = lambda digest: Busy(kind="tvm")
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert set(rig.serving.running()) == {ONE}
    (engine,) = rig.engines.values()
    assert engine.num_refused > 2


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"unsupported_on": {"gpu": "no code for compute capability 7.0"}}, "unsupported"),
        ({"cannot_build_on": {"gpu": "no code for compute capability 7.0"}}, "failed"),
    ],
)
def test_what_one_kind_of_device_lacks_hinders_no_other(tmp_path, options, outcome):
    rig = Rig(tmp_path, kinds=(("cpu:0", "cpu"), ("gpu:0", "gpu")), plain=True, **options)
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert set(rig.serving.running("cpu")) == {ONE}
    assert not rig.serving.running("gpu")
    assert {tasks[0][0].split("/")[2] for tasks in rig.children()} == {"cpu"}
    told = {bucket["device"]: (bucket["outcome"], bucket["reason"]) for bucket in rig.status()["buckets"]}
    assert told["gpu"] == (outcome, "no code for compute capability 7.0")
    assert rig.tuner.stop()


def test_quarantined_artifacts_are_neither_loaded_nor_made(rig):
    ref = rig.model({"*": "crash"}, max_batch_size=1)
    rig.cache.out[rig.key(ref, ONE)] = "wrong on a live request"
    rig.run()
    assert rig.children() == []
    assert rig.buckets()[ONE]["outcome"] == "quarantined"
    assert rig.status()["state"] == "baseline"


def test_time_for_tuning_is_limited_for_each_model(rig):
    rig.model({"*": PASS}, parameters={"budget_seconds": "0"})
    rig.run()
    assert rig.children() == []
    assert rig.buckets()[ONE]["reason"] == "its time of 0 s for tuning is used up"


# --- what is loaded is checked


def test_wrong_outputs_as_loaded_here_are_quarantined(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.make_engine = lambda digest: Engine(factor=2.5)
    rig.run()
    assert rig.serving.running() == {}
    assert "its outputs are wrong as loaded here" in rig.cache.out[rig.key(ref, ONE)]
    assert rig.engines[rig.key(ref, ONE)].closed
    assert rig.buckets()[ONE]["outcome"] == "quarantined"


def test_an_artifact_that_does_not_load_leaves_the_baseline(rig):
    def refuse(digest):
        raise EngineError("module.so does not load")

    rig.model({"*": PASS}, max_batch_size=1)
    rig.make_engine = refuse
    rig.run()
    assert rig.serving.running() == {}
    assert rig.buckets()[ONE]["reason"] == "it could not be loaded: module.so does not load"
    assert rig.cache.out == {}


def test_an_engine_that_fails_when_warmed_is_closed(rig):
    def broken(digest):
        engine = Engine()
        engine.broken = True
        return engine

    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.make_engine = broken
    rig.run()
    assert rig.engines[rig.key(ref, ONE)].closed
    assert "it failed when it was warmed" in rig.buckets()[ONE]["reason"]


def test_a_version_unloaded_just_before_the_swap_takes_no_engine(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    promote = rig.serving.promote

    def unloaded_meanwhile(ref, specializations):
        rig.serving.unload(ref)
        return promote(ref, specializations)

    rig.serving.promote = unloaded_meanwhile
    rig.tuner._promoter._promotion = rig.serving
    rig.run()
    assert rig.engines[rig.key(ref, ONE)].closed
    assert rig.serving.running() == {}


# --- signatures


def test_variable_shapes_wait_for_traffic(rig):
    ref = rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=2)
    rig.run()
    assert rig.status()["state"] == "baseline"
    assert "its input shapes are not known" in rig.status()["reason"]
    for _ in range(30):
        rig.traffic.ran("m", 1, Signature.of([("IN", "FP32", (1, 7))]), 0.001)
    rig.pass_time(60)
    rig.run()
    assert set(rig.serving.running()) == {"IN:FP32[1,7]", "IN:FP32[2,7]"}
    assert rig.children()[0][0][0] == rig.key(ref, "IN:FP32[1,7]")


def test_requests_without_items_are_the_baselines_and_say_nothing_of_the_model(rig):
    rig.model({"*": {"outcome": "unsupported", "reason": "Divide by zero"}}, baseline=Engine(shape=(-1, -1)))
    for _ in range(100):
        rig.traffic.ran("m", 1, Signature.of([("IN", "FP32", (1, 0))]), 0.001)
    rig.run()
    assert rig.children() == []
    assert (rig.status()["state"], rig.buckets()) == ("baseline", {})


def test_named_signatures_and_warmup_samples_count(rig):
    sample = InputSet("warm", {"IN": np.zeros((1, 9), np.float32)})
    rig.model(
        {"*": PASS},
        baseline=Engine(shape=(-1, -1)),
        max_batch_size=0,
        parameters={"signatures": "IN:3x5"},
        samples=lambda: [sample],
    )
    rig.run()
    assert set(rig.serving.running()) == {"IN:FP32[3,5]", "IN:FP32[1,9]"}


def test_samples_reach_the_check_where_nothing_can_be_made_up(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1, samples=lambda: [InputSet("s", {"IN": np.ones((1, 4), np.float32)})])
    rig.cache.put(rig.key(ref, ONE))
    rig.cache.known[rig.key(ref, ONE)].entry.manifest["domains"] = None
    rig.run()
    assert set(rig.serving.running()) == {ONE}


# --- models come, go and change


def test_unloading_cancels_the_child_and_forgets_the_model(rig):
    ref = rig.model({"*": "hang"})
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works")
    rig.serving.unload(ref)
    rig.tuner.wake()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(NotFound):
        rig.status()
    assert rig.tuner.counters.jobs == {("cancelled", "unloaded"): 1}


def test_a_reload_with_another_graph_never_gets_the_old_ones_module(rig):
    old = rig.model({"*": "slow"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works on the old graph")
    rig.serving.unload(old)
    new = rig.model({"*": PASS}, graph="g2", max_batch_size=1)
    (rig.folder / "m.onnx.go").touch()
    rig.tuner.wake()
    thread.join(60)
    assert not thread.is_alive()
    rig.run()
    assert {key[0] for key, stack in rig.serving.routes.items() if stack} == {new}
    assert all(one.artifact == rig.key(new, ONE) for stack in rig.serving.routes.values() for _, one in stack)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda rig: rig.model({"*": PASS}, graph="g2"), "replaced"),
        (lambda rig: rig.model({"*": PASS}, parameters={"precision": "bf16"}), "settings"),
        (lambda rig: rig.tuner.act("m", "", "pause"), "held"),
        (lambda rig: rig.tuner.act("m", "", "roll_back"), "held"),
        (lambda rig: rig.model({"*": PASS}) and rig.tuner.act("m", "", "retune"), "retuned"),
    ],
    ids=["another graph", "another precision", "paused", "rolled back", "retuned"],
)
def test_a_child_that_is_ended_for_something_is_counted_with_it(rig, change, cause):
    rig.model({"*": "hang"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works")
    if cause == "replaced":
        rig.serving.unload(next(iter(rig.serving.versions)))
    change(rig)
    rig.tuner.wake()
    thread.join(60)
    assert not thread.is_alive()
    assert rig.tuner.counters.jobs["cancelled", cause] == 1
    assert set(rig.tuner.counters.jobs) <= set(JOB_ENDS)


def test_a_waiting_job_of_an_older_graph_is_replaced(rig):
    rig.model({"*": PASS}, name="first")
    old = rig.model({"*": PASS}, name="m")
    rig.tuner.attend()
    assert rig.tuner.num_queued == 2
    rig.serving.unload(old)
    new = rig.model({"*": PASS}, name="m", graph="g2")
    rig.tuner.wake()
    rig.tuner.attend()
    assert rig.tuner.num_queued == 2
    rig.run()
    assert {digest for tasks in rig.children() for digest, _ in tasks} == {
        rig.key(new, signature) for signature in (ONE, TWO, FOUR)
    }


def test_a_new_configuration_keeps_the_specializations(rig):
    ref = rig.model({"*": PASS})
    rig.run()
    before = rig.serving.running()
    rig.model({"*": "crash"}, baseline=rig.serving.versions[ref].baseline, parameters={"budget_seconds": "9"})
    rig.run()
    assert rig.serving.running() == before
    assert len(rig.children()) == 1


def test_what_was_unloaded_and_loaded_again_between_two_looks_is_promoted_again(rig):
    ref = rig.model({"*": PASS})
    rig.run()
    before = rig.serving.running()
    assert before
    rig.serving.routes.clear()  # the slot of the second load starts with its baseline alone
    rig.model({"*": PASS}, parameters={"budget_seconds": "9"})
    rig.run()
    assert set(rig.serving.running()) == set(before)
    assert len(rig.children()) == 1
    assert all(bucket["engine"] == "tvm" for bucket in rig.tuner.status(ref.model)["buckets"])


def test_another_precision_makes_other_specializations(rig):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    rig.model({"*": PASS}, max_batch_size=1, parameters={"precision": "bf16"})
    rig.run()
    stack = rig.serving.routes[ref, "cpu", next(iter(rig.serving.routes))[2]]
    assert [one.artifact for _, one in stack] == [rig.key(ref, ONE, precision="bf16")]


def test_the_busiest_model_comes_first(rig):
    for name in ("idle", "busy", "less"):
        rig.model({"*": PASS}, name=name, max_batch_size=1)
    some = Signature.of([("IN", "FP32", (1, 4))])
    rig.traffic.ran("busy", 1, some, 10.0)
    rig.traffic.ran("less", 1, some, 1.0)
    order = []
    rig.tuner.attend()
    while rig.tuner.step():
        order += [name for name in ("idle", "busy", "less") if rig.children(name) and name not in order]
    assert order == ["busy", "less", "idle"]


def test_a_cached_model_does_not_wait_for_the_child_of_another(rig):
    rig.model({"*": "slow"}, name="slow", max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(lambda: rig.children("slow"), "the child works")
    ref = rig.model({"*": "crash"}, name="known", max_batch_size=1)
    rig.cache.put(rig.key(ref, ONE))
    rig.tuner.wake()
    wait_until(rig.serving.running, "the cached one serves")
    assert thread.is_alive()
    (rig.folder / "slow.onnx.go").touch()
    thread.join(60)
    assert len(rig.serving.swaps) == 2


def test_a_search_is_told_while_it_lasts(rig):
    rig.model({"*": "slow"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    job = wait_until(lambda: rig.tuner.statuses() and rig.status()["job"], "the child tells what it tries")
    assert {name: job[name] for name in ("num_built", "num_measured", "num_failed")} == {
        "num_built": 3,
        "num_measured": 2,
        "num_failed": 1,
    }
    assert 0 < job["seconds_left"] <= 1200
    (rig.folder / "m.onnx.go").touch()
    thread.join(60)
    assert rig.status()["job"] == {}


# --- devices


def test_two_cards_of_one_kind_share_a_job(tmp_path):
    rig = Rig(tmp_path, kinds=[("gpu:0", "h200"), ("gpu:1", "h200")])
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert rig.children() == [[[rig.key(ref, ONE, "h200"), "build"]]]
    assert set(rig.serving.running("h200")) == {ONE}


def test_different_cards_have_their_own(tmp_path):
    rig = Rig(tmp_path, kinds=[("gpu:0", "h200"), ("gpu:1", "a10")])
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    # Side by side: who writes its line first is open.
    assert sorted(rig.children()) == [[[rig.key(ref, ONE, "a10"), "build"]], [[rig.key(ref, ONE, "h200"), "build"]]]
    assert set(rig.serving.running("h200")) == set(rig.serving.running("a10")) == {ONE}
    routes = {device: stack[-1][1].device for (_, device, _), stack in rig.serving.routes.items()}
    assert routes == {"h200": "h200", "a10": "a10"}, "each runs on executors of its own kind only"


# --- actions


def test_pausing_ends_the_child_and_starting_goes_on(rig):
    rig.model({"*": "slow"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works")
    rig.tuner.act("m", "", "pause")
    thread.join(60)
    assert not thread.is_alive()
    assert (rig.status()["state"], rig.status()["reason"]) == ("paused", "paused")
    rig.pass_time(100)
    rig.run()
    assert len(rig.children()) == 1
    (rig.folder / "m.onnx.go").touch()
    rig.tuner.act("m", "1", "start")
    rig.run()
    assert rig.status()["state"] == "tuned"


@pytest.mark.parametrize("action", ["start", "retune"])
@pytest.mark.parametrize(
    ("mode", "parameters", "why"),
    [
        ("off", {}, "by the server's --tuning off"),
        ("on", {"tuning": "off"}, "by its configuration"),
        ("on", {"signatures": "OTHER:1x4"}, "signatures: unknown input 'OTHER'"),
    ],
)
def test_what_is_off_cannot_be_started_and_says_why(tmp_path, action, mode, parameters, why):
    rig = Rig(tmp_path, mode=mode)
    rig.model({"*": PASS}, parameters=parameters)
    rig.run()
    told = rig.status()
    assert (told["state"], why in told["reason"]) == ("off", True), told["reason"]
    done = rig.tuner.act("m", "", action)
    rig.run()
    with pytest.raises(Unavailable, match=rf"cannot {action} tuning of 'm': .*{re.escape(why)}"):
        done.result(0)
    assert rig.status() == told, "nothing was begun"
    assert rig.tuner.stop()


def test_only_what_may_compile_is_tuned_anew(tmp_path):
    rig = Rig(tmp_path, mode="cache")
    ref = rig.model({"*": PASS})
    rig.cache.put(rig.key(ref, ONE))
    rig.run()
    done = rig.tuner.act("m", "", "retune")
    rig.run()
    with pytest.raises(Unavailable, match=r"cannot retune 'm': .*'cache'"):
        done.result(0)
    assert set(rig.serving.running()) == {ONE}
    assert "retuned" not in rig.events()
    assert rig.tuner.stop()


@pytest.mark.parametrize("action", ["pause", "cancel", "roll_back", "pin_baseline"])
def test_progress_after_a_hold_is_what_was_done(rig, action):
    rig.model({"*": PASS, TWO: "hang"}, max_batch_size=2)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(lambda: rig.children() and rig.status()["progress"] > 0.6, "the child works on the second")
    rig.tuner.act("m", "", action)
    thread.join(60)
    assert not thread.is_alive()
    assert rig.status()["progress"] == 0.5
    rig.tuner.act("m", "", "start")
    rig.tuner.attend()
    assert rig.status()["progress"] == 0.0


def test_reasons_are_one_line_wherever_they_come_from(rig):
    def refuse(digest):
        raise EngineError("module.so does not load:\n  no symbol f\n\n  no symbol g")

    ref = rig.model({"*": PASS})
    rig.cache.put(rig.key(ref, TWO), "refused")
    rig.cache.known[rig.key(ref, TWO)] = dataclasses.replace(rig.cache.known[rig.key(ref, TWO)], reason="slow\nvery")
    rig.make_engine = refuse
    rig.run()
    told = rig.status()
    reasons = [told["reason"], *(one.get("reason", "") for one in (*told["buckets"], *told["history"]))]
    assert any("module.so does not load: no symbol f no symbol g" in reason for reason in reasons)
    assert "slow very" in reasons
    assert [reason for reason in reasons if "\n" in reason] == []


def test_cancelling_keeps_what_serves(rig):
    rig.model({"*": PASS})
    rig.run()
    rig.tuner.act("m", "", "cancel")
    rig.run()
    assert len(rig.serving.running()) == 3
    assert (rig.status()["state"], rig.status()["reason"]) == ("tuned", "cancelled")


@pytest.mark.parametrize(
    ("action", "reason"), [("roll_back", "rolled back on request"), ("pin_baseline", "pinned to the baseline")]
)
def test_rolling_back_and_pinning_return_to_the_baseline_until_started(rig, action, reason):
    rig.model({"*": PASS})
    rig.run()
    rig.tuner.act("m", "", action)
    rig.pass_time(100)
    rig.run()
    assert rig.serving.running() == {}
    assert (rig.status()["state"], rig.status()["reason"]) == ("baseline", reason)
    assert rig.cache.out == {}
    assert rig.events().count("rolled_back") == 3
    rig.tuner.act("m", "", "start")
    rig.run()
    assert len(rig.serving.running()) == 3
    assert len(rig.children()) == 1, "nothing is made again"


def test_starting_tries_failures_again_and_leaves_refusals(rig):
    rig.model({"*": {"outcome": "failed", "reason": "broken"}, ONE: {"outcome": "refused", "reason": "slow"}})
    rig.run()
    rig.model({"*": PASS}, baseline=next(iter(rig.serving.versions.values())).baseline)
    rig.tuner.act("m", "", "start")
    rig.run()
    assert set(rig.serving.running()) == {TWO, FOUR}


def test_unknown_models_versions_and_actions_are_told(rig):
    rig.model({"*": PASS})
    rig.run()
    with pytest.raises(InvalidRequest, match="unknown tuning action 'fly', expected one of start, retune, pause"):
        rig.tuner.act("m", "", "fly")
    for model, version in (("x", ""), ("m", "2"), ("m", "one")):
        with pytest.raises(NotFound):
            rig.tuner.status(model, version)
        with pytest.raises(NotFound):
            rig.tuner.act(model, version, "start")


def test_the_newest_version_is_meant_where_none_is_named(rig):
    rig.model({"*": PASS}, version=9, max_batch_size=1)
    rig.model({"*": PASS}, version=10, graph="g2", max_batch_size=1)
    rig.run()
    assert rig.status()["version"] == "10"
    assert rig.status("m", "9")["version"] == "9"


# --- provisional verdicts


def test_provisional_verdicts_are_measured_again_when_serving_rests(rig):
    ref = rig.model({"*": {"outcome": "passed", "provisional": True}}, max_batch_size=1)
    rig.run()
    assert rig.buckets()[ONE]["provisional"] is True
    rig.pass_time(5)
    rig.run()
    assert len(rig.children()) == 1
    rig.model({"*": PASS}, max_batch_size=1, baseline=rig.serving.versions[ref].baseline)
    rig.pass_time(100)
    rig.run()
    assert rig.children()[1] == [[rig.key(ref, ONE), "gate"]]
    assert rig.buckets()[ONE]["provisional"] is False
    assert set(rig.serving.running()) == {ONE}


def test_what_noise_refused_is_made_again_when_serving_rests(rig):
    ref = rig.model({"*": {"outcome": "refused", "verdict": {"inconclusive": True}, "reason": "not surely faster"}})
    rig.run()
    assert rig.status()["state"] == "baseline"
    rig.model({"*": PASS}, baseline=rig.serving.versions[ref].baseline)
    rig.pass_time(5)
    rig.run()
    assert len(rig.children()) == 1
    rig.pass_time(100)
    rig.run()
    assert [mode for _, mode in rig.children()[1]] == ["build"] * 3
    assert set(rig.serving.running()) == {ONE, TWO, FOUR}


def test_certain_refusals_are_not_made_again(rig):
    rig.model({"*": {"outcome": "refused", "reason": "not faster"}})
    rig.run()
    for _ in range(5):
        rig.pass_time(10_000)
        rig.run()
    assert len(rig.children()) == 1


def test_what_is_not_faster_when_measured_again_is_rolled_back(rig):
    ref = rig.model({"*": {"outcome": "passed", "provisional": True}}, max_batch_size=1)
    rig.run()
    rig.model(
        {"*": {"outcome": "refused", "reason": "not faster"}},
        max_batch_size=1,
        baseline=rig.serving.versions[ref].baseline,
    )
    rig.pass_time(100)
    rig.run()
    assert rig.serving.running() == {}
    assert rig.buckets()[ONE]["engine"] == "onnxruntime"
    assert rig.tuner.counters.num_rollbacks == {"measured again": 1}


# --- the thread


def test_the_thread_works_until_stopped_and_ends_its_child(rig):
    rig.model({"*": "hang"})
    rig.tuner.start()
    wait_until(rig.children, "the child works")
    assert rig.tuner.stop(30)
    assert rig.tuner.counters.jobs == {("cancelled", "stopped"): 1}


def test_an_unexpected_error_does_not_end_tuning(rig, caplog):
    rig.model({"*": PASS}, max_batch_size=1)
    tunable = rig.serving.tunable
    calls = []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a mistake")
        return tunable()

    rig.serving.tunable = fails_once
    rig.tuner.start()
    rig.tuner.wake()
    wait_until(lambda: len(calls) == 1, "it failed once")

    def serves():
        rig.pass_time(2.0)
        return rig.serving.running()

    wait_until(serves, "the model is tuned all the same")
    assert "a mistake" in caplog.text


def test_the_command_of_children_is_the_worker_module():
    from hone.tuning.options import TunerOptions

    assert TunerOptions().command[1:] == ("-m", "hone.tuning.worker")
    assert SCRIPT[0] == TunerOptions().command[0]


def test_engines_tell_their_interface():
    assert Engine().inputs == (TensorSpec("IN", "FP32", (-1, 4)),)
