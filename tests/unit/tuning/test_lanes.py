"""Jobs of different kinds of device go on side by side; the children are real processes that follow a script."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hone.engines.cuda_runtime import CudaError
from hone.specialization import VersionRef
from hone.tuning import group
from hone.tuning.budget import Budget
from hone.tuning.child_process import Limits
from hone.tuning.jobs import Job
from hone.tuning.lanes import Lanes
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

ONE = "IN:FP32[1,4]"
BOTH = (("cpu:0", "cpu"), ("gpu:0", "gpu"))
GIB = 1 << 30


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path, kinds=BOTH, budget=Budget(pause=False, memory_bytes=4 * GIB, memory_is_set=True))
    rig.specs = []
    for maker in rig.tuner._lanes._makers.values():
        spec = maker._spec
        maker._spec = lambda *args, spec=spec: rig.specs.append(spec(*args)) or rig.specs[-1]
    yield rig
    assert rig.tuner.stop()
    rig.tuner._lanes.close()


def step_until(rig, condition):
    """Children take as long as they take."""
    done = threading.Event()

    def work():
        while not done.is_set():
            rig.tuner.step()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(condition, "the tuner comes so far")
    finally:
        done.set()
        thread.join(60)
    assert not thread.is_alive()


def devices(rig, name="m"):
    """Of the children that were started for a model, in the order of their start."""
    return [tasks[0][0].split("/")[2] for tasks in rig.children(name)]


def test_each_kind_of_device_has_its_own_child_at_the_same_time(rig):
    rig.model({"*": "slow"}, max_batch_size=1)
    step_until(rig, lambda: sorted(devices(rig)) == ["cpu", "gpu"])  # neither can end before it is told to go
    status = rig.status()
    assert status["state"] == "tuning"
    assert status["job"].get("num_built") in (None, 3, 6)
    (rig.folder / "m.onnx.go").touch()
    rig.run()
    assert set(rig.serving.running("cpu")) == set(rig.serving.running("gpu")) == {ONE}
    assert rig.status()["state"] == "tuned"
    assert rig.tuner.counters.jobs == {("done", ""): 2}


def test_one_kind_has_one_child(rig):
    for name in ("a", "b"):
        rig.model({"*": "slow"}, name=name, graph=name, max_batch_size=1, own_parameters={"gpu": {"tuning": "off"}})
    step_until(rig, lambda: len(rig.children("a")) + len(rig.children("b")) == 1)
    for _ in range(5):
        rig.tuner.step()
    assert len(rig.children("a")) + len(rig.children("b")) == 1
    waiting = "b" if rig.children("a") else "a"
    assert rig.status(waiting)["state"] == "queued"
    assert "one at a time is tuned on each kind of device" in rig.status(waiting)["reason"]
    for name in ("a", "b"):
        (rig.folder / f"{name}.onnx.go").touch()
    rig.run()
    assert rig.tuner.counters.num_promotions == 2


def test_settings_are_those_of_each_kind(rig):
    ref = rig.model(
        {"*": PASS},
        max_batch_size=1,
        own_parameters={
            "cpu": {"tolerance": "0.25"},
            "gpu": {"tolerance": "0.5", "precision": "tf32", "budget_seconds": "7"},
        },
    )
    rig.run()
    told = {spec["device"]: (spec["tolerance"], spec["precision"], spec["seconds"]) for spec in rig.specs}
    assert told == {"cpu": (0.25, "f32", 1200.0), "gpu": (0.5, "tf32", 7.0)}
    assert {bucket["artifact"] for bucket in rig.status()["buckets"]} == {
        rig.key(ref, ONE, "cpu"),
        rig.key(ref, ONE, "gpu", "tf32"),
    }
    watched = {one.device: (one.tolerance, one.precision) for one in rig.watch.watched()}
    assert watched == {"cpu": (0.25, "f32"), "gpu": (0.5, "tf32")}


def test_a_setting_that_cannot_be_read_turns_off_its_own_kind(rig):
    rig.model({"*": PASS}, max_batch_size=1, own_parameters={"gpu": {"signatures": "OTHER:1x4"}})
    rig.run()
    assert devices(rig) == ["cpu"]
    assert rig.status()["state"] == "tuned"
    assert "unknown input 'OTHER'" in rig.status()["history"][0]["reason"]


def test_children_share_memory_and_cores(rig):
    rig.model({"*": "slow"}, max_batch_size=1)
    step_until(rig, lambda: len(rig.children()) == 2)
    (rig.folder / "m.onnx.go").touch()
    rig.run()
    assert [spec["memory_bytes"] for spec in rig.specs] == [2 * GIB, 2 * GIB]
    rig.model({"*": PASS}, name="alone", graph="g2", max_batch_size=1, own_parameters={"gpu": {"tuning": "off"}})
    rig.run()
    assert rig.specs[-1]["memory_bytes"] == 4 * GIB


@pytest.fixture
def taken(rig, monkeypatch):
    """What the child for each kind of device takes, as far as its parent can see."""
    taken = {"cpu": 0, "gpu": 0}

    def resident_bytes(pids):
        children = {kind: maker.child for kind, maker in rig.tuner._lanes._makers.items()}
        return sum(taken[kind] for kind, child in children.items() if child is not None and child.pid in pids)

    monkeypatch.setattr(group, "resident_bytes", resident_bytes)
    return taken


def only_on(kind, rig, name, script="slow"):
    off = {"cpu": "gpu", "gpu": "cpu"}[kind]
    return rig.model({"*": script}, name=name, graph=name, max_batch_size=1, own_parameters={off: {"tuning": "off"}})


def seen(rig, kind):
    child = rig.tuner._lanes._makers[kind].child
    return child.resident_bytes if child is not None else 0


def go(rig, name):
    (rig.folder / f"{name}.onnx.go").touch()


def test_a_child_that_began_alone_is_not_ended_because_another_begins(rig, taken):
    taken.update(cpu=3 * GIB, gpu=GIB * 3 // 2)
    only_on("cpu", rig, "large")
    step_until(rig, lambda: seen(rig, "cpu") == 3 * GIB)
    only_on("gpu", rig, "later")
    rig.tuner.wake()
    for _ in range(20):
        rig.tuner.step()
    assert rig.children("later") == []
    assert rig.status("later")["state"] == "queued"
    assert "waits for memory" in rig.status("later")["reason"]
    go(rig, "large")
    go(rig, "later")
    rig.run()
    assert rig.tuner.counters.jobs == {("done", ""): 2}
    assert set(rig.serving.running("cpu")) == set(rig.serving.running("gpu")) == {ONE}


def test_what_it_takes_later_is_its_own_too(rig, taken):
    """It counts on what it was told when it began."""
    only_on("cpu", rig, "large")
    step_until(rig, lambda: rig.children("large"))
    only_on("gpu", rig, "later")
    rig.tuner.wake()
    rig.tuner.step()
    taken.update(cpu=3 * GIB, gpu=GIB * 3 // 2)
    rig.pass_time(1.0)  # it is looked at again
    step_until(rig, lambda: seen(rig, "cpu") == 3 * GIB)
    go(rig, "large")
    go(rig, "later")
    rig.run()
    assert rig.tuner.counters.jobs == {("done", ""): 2}


def test_who_waits_for_memory_has_its_turn_when_the_other_ends(rig, taken):
    """Also where the other kind of device always has another job."""
    taken.update(cpu=GIB, gpu=GIB)
    only_on("cpu", rig, "first")
    step_until(rig, lambda: rig.children("first"))
    for name in ("second", "third"):
        only_on("cpu", rig, name)
    only_on("gpu", rig, "later")
    rig.tuner.wake()
    rig.tuner.step()
    assert rig.tuner._lanes.busy == ["cpu"]
    go(rig, "first")
    step_until(rig, lambda: rig.children("later") and seen(rig, "cpu") and seen(rig, "gpu"))
    assert [spec["memory_bytes"] for spec in rig.specs] == [4 * GIB, 2 * GIB, 2 * GIB]
    for name in ("second", "third", "later"):
        go(rig, name)
    rig.run()
    assert rig.tuner.counters.jobs == {("done", ""): 4}


def test_nobody_waits_for_memory_that_each_has_for_itself(tmp_path):
    rig = Rig(tmp_path, kinds=BOTH, budget=Budget(pause=False, memory_bytes=4 * GIB))
    only_on("cpu", rig, "first")
    step_until(rig, lambda: rig.children("first"))
    only_on("gpu", rig, "later")
    rig.tuner.wake()
    step_until(rig, lambda: rig.children("later"))
    assert rig.serving.running() == {}
    go(rig, "first")
    go(rig, "later")
    rig.run()
    assert rig.tuner.counters.jobs == {("done", ""): 2}
    assert rig.tuner.stop()


def test_what_a_child_was_promised_is_free_again_whatever_ends_it(rig, monkeypatch):
    maker = rig.tuner._lanes._makers["cpu"]

    def mistake(*args):
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(maker, "_spec", mistake)
        only_on("cpu", rig, "first")
        with pytest.raises(RuntimeError, match="a mistake"):
            rig.run()
    only_on("gpu", rig, "later", PASS)
    rig.run()
    assert rig.specs[-1]["memory_bytes"] == 4 * GIB


def test_a_child_may_have_what_others_leave_and_its_part_in_any_case():
    others = SimpleNamespace(num_bytes=0)
    limits = Limits(1.0, 400, 1.0, 200, lambda: others.num_bytes)
    assert limits.bytes_now() == 400
    others.num_bytes = 150
    assert limits.bytes_now() == 250
    others.num_bytes = 350
    assert limits.bytes_now() == 200
    assert Limits(1.0, 400, 1.0).bytes_now() == 400


def test_a_stop_ends_all_children(rig):
    rig.model({"*": "hang"}, max_batch_size=1)
    rig.tuner.start()
    wait_until(lambda: len(rig.children()) == 2, "both children work")
    assert rig.tuner.stop()
    assert rig.tuner._lanes.is_idle
    assert all(maker.child is None for maker in rig.tuner._lanes._makers.values())


def test_unloading_cancels_all(rig):
    ref = rig.model({"*": "hang"}, max_batch_size=1)
    step_until(rig, lambda: len(rig.children()) == 2)
    rig.serving.unload(ref)
    rig.run()
    assert rig.tuner.counters.jobs == {("cancelled", "unloaded"): 2}


# --- while one measures, others stand still


class Maker:
    """Of one job that never ends."""

    def __init__(self):
        self.child = SimpleNamespace(num_turns=1, held=False, is_timing=False, resident_bytes=100)
        self.num_steps = 0

    def make(self, job):
        while True:
            self.num_steps += 1
            yield


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def lanes(clock):
    makers = {"cpu": Maker(), "gpu": Maker()}
    lanes = Lanes(makers, on_cpu=["cpu"], clock=lambda: clock.now)
    for kind in makers:
        lanes.begin(kind, f"{kind}:0", Job(VersionRef("m", 1, "g"), kind, ()))
    lanes.cpu, lanes.gpu = makers["cpu"], makers["gpu"]
    return lanes


def held(lanes):
    assert list(lanes.step()) == []
    return lanes.cpu.child.held, lanes.gpu.child.held


def test_what_is_measured_on_the_cpu_has_the_cores_for_itself(lanes):
    assert held(lanes) == (False, False)
    lanes.cpu.child.is_timing = True
    assert held(lanes) == (False, True)
    lanes.cpu.child.is_timing = False
    assert held(lanes) == (False, False)
    lanes.gpu.child.is_timing = True
    assert held(lanes) == (False, False), "what is measured on the GPU needs no core"


def test_nobody_stands_still_for_long(lanes, clock):
    lanes.cpu.child.is_timing = True
    found = []
    for clock.now in range(0, 200, 5):
        found.append(held(lanes)[1])
    assert found[:9] == [True] * 9
    assert found[9:18] == [False] * 9
    assert found[18:27] == [True] * 9


def test_a_mistake_frees_the_device_and_is_told(lanes):
    def fail(job):
        yield
        raise KeyError("a mistake")

    lanes.close()
    lanes.gpu.make = fail
    job = Job(VersionRef("m", 1, "g"), "gpu", ())
    lanes.begin("gpu", "gpu:0", job)
    assert list(lanes.step()) == []
    ended = []
    with pytest.raises(KeyError, match="a mistake"):
        for one in lanes.step():
            ended.append(one)
    assert ended == [("gpu:0", job)]
    assert lanes.is_idle


def test_lanes_take_turns(lanes):
    for _ in range(3):
        held(lanes)
    assert lanes.cpu.num_steps == lanes.gpu.num_steps == 3
    assert lanes.cpu.child.num_turns == 2
    assert lanes.resident_bytes("cpu") == 100
    assert sorted(lanes.busy) == ["cpu", "gpu"]
    with pytest.raises(ValueError, match="has a job already"):
        lanes.begin("cpu", "cpu:0", Job(VersionRef("m", 1, "g"), "cpu", ()))
    lanes.close()
    assert lanes.is_idle


# --- a lost GPU

LOST = "an illegal memory access was encountered (error 700)"


@pytest.fixture
def lost(rig):
    told = SimpleNamespace(reason="")
    rig.tuner._lost = lambda: told.reason
    return told


def test_a_lost_gpu_serves_no_longer_and_nothing_is_held_against_anybody(rig, lost):
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert set(rig.serving.running("gpu")) == {ONE}
    lost.reason = LOST
    rig.tuner.attend()
    assert set(rig.serving.running("gpu")) == {ONE}, "who broke it may still be told of"
    rig.pass_time(1.5)
    rig.tuner.attend()
    assert rig.serving.running("gpu") == {}
    assert set(rig.serving.running("cpu")) == {ONE}
    assert rig.cache.out == {}
    (on_gpu,) = (bucket for bucket in rig.status()["buckets"] if "/gpu/" in bucket["artifact"])
    assert (on_gpu["outcome"], on_gpu["reason"]) == ("failed", f"the GPU is lost: {LOST}")
    assert rig.tuner.counters.num_rollbacks == {"device lost": 1}
    assert rig.status()["state"] == "tuned"


def test_who_broke_it_is_quarantined(rig, lost):
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    (guilty,) = (one for one in rig.watch.watched() if one.device == "gpu")
    lost.reason = LOST
    rig.watch.failed(ref, guilty.generation, str(CudaError("cudaStreamSynchronize", 700, "illegal memory access")))
    rig.tuner.attend()
    rig.pass_time(1.5)
    rig.tuner.attend()
    assert list(rig.cache.out) == [rig.key(ref, ONE, "gpu")]
    (on_gpu,) = (bucket for bucket in rig.status()["buckets"] if "/gpu/" in bucket["artifact"])
    assert on_gpu["outcome"] == "quarantined"


def test_nothing_more_is_made_for_a_lost_gpu(rig, lost):
    rig.model({"*": "slow"}, max_batch_size=1)
    step_until(rig, lambda: len(rig.children()) == 2)
    lost.reason = LOST
    rig.tuner.attend()
    rig.pass_time(1.5)
    (rig.folder / "m.onnx.go").touch()
    rig.run()
    assert rig.serving.running("gpu") == {}
    assert set(rig.serving.running("cpu")) == {ONE}
    rig.model({"*": PASS}, name="later", graph="g2", max_batch_size=1)
    rig.model({"*": PASS}, name="there", graph="g3", max_batch_size=1, kinds=frozenset(["gpu"]))
    rig.run()
    assert devices(rig, "later") == ["cpu"]
    assert (rig.status("there")["state"], rig.status("there")["reason"]) == ("off", f"the GPU is lost: {LOST}")


def test_open_questions_of_a_lost_gpu_are_not_asked_again(rig, lost):
    rig.model({"*": {"outcome": "refused", "verdict": {"inconclusive": True}}}, max_batch_size=1)
    rig.run()
    lost.reason = LOST
    rig.tuner.attend()
    rig.pass_time(1.5)
    rig.tuner.attend()
    num_children = len(rig.children())
    rig.pass_time(1000)
    rig.run()
    assert devices(rig)[num_children:] == ["cpu"]
    assert rig.tuner.num_queued == 0


def test_starting_what_is_on_a_lost_gpu_alone_says_why_nothing_is_made(rig, lost):
    rig.model({"*": PASS}, max_batch_size=1, kinds=frozenset(["gpu"]))
    rig.run()
    lost.reason = LOST
    rig.tuner.attend()
    rig.pass_time(1.5)
    rig.tuner.attend()
    rig.tuner.act("m", "", "start")
    rig.run()
    assert rig.status()["reason"] == f"the GPU is lost: {LOST}"
