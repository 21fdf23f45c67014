"""What operators hold back stays so over a restart, until it is started or its graph is replaced."""

from __future__ import annotations

import logging

import pytest

from hone.specialization import VersionRef
from hone.tuning.holding import HOLDS, PAUSED, PINNED, OperatorHolds
from tests.unit.tuning.fakes import PASS, Rig

ONE, TWO = "IN:FP32[1,4]", "IN:FP32[2,4]"
REF = VersionRef("m", 1, "g")


@pytest.fixture
def rigs(tmp_path):
    """Servers that follow one another on the same folder; `PASS`ed artifacts are in the cache of all."""
    made = []

    def make() -> Rig:
        if made:
            assert made[-1].tuner.stop()
        made.append(Rig(tmp_path))
        return made[-1]

    yield make
    assert made[-1].tuner.stop()


def act(rig, action):
    done = rig.tuner.act("m", "", action)
    rig.run()
    assert done.done()


@pytest.mark.parametrize("action", ["pin_baseline", "roll_back"])
def test_what_was_returned_to_the_baseline_stays_there_until_started(rigs, action):
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    act(rig, action)
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    assert rig.serving.running() == {}
    assert (rig.status()["state"], rig.status()["reason"]) == ("baseline", HOLDS[action])
    assert rig.events() == ["held"]
    act(rig, "start")
    assert set(rig.serving.running()) == {ONE, TWO}
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    assert set(rig.serving.running()) == {ONE, TWO}
    assert len(rig.children()) == 1, "all from the cache"


@pytest.mark.parametrize("first", ["pin_baseline", "roll_back"])
@pytest.mark.parametrize("second", ["pause", "cancel"])
def test_what_was_returned_to_the_baseline_stays_there_when_it_is_paused_or_cancelled_then(rigs, first, second):
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    act(rig, first)
    act(rig, second)
    assert (rig.status()["state"], rig.status()["reason"]) == ("baseline", HOLDS[first])
    assert rig.status()["history"][-1]["event"] == second
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    assert rig.serving.running() == {}
    assert (rig.status()["state"], rig.status()["reason"]) == ("baseline", HOLDS[first])


@pytest.mark.parametrize("action", ["pin_baseline", "roll_back"])
def test_what_was_paused_may_be_returned_to_the_baseline(rigs, action):
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    act(rig, "pause")
    act(rig, action)
    assert rig.serving.running() == {}
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    assert rig.serving.running() == {}


@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_what_served_when_it_was_paused_serves_again_and_nothing_is_made(rigs, action):
    rig = rigs()
    rig.model({"*": PASS, TWO: {"outcome": "failed", "reason": "broken"}}, max_batch_size=2)
    rig.run()
    assert set(rig.serving.running()) == {ONE}
    act(rig, action)
    rig = rigs()
    rig.model({"*": PASS}, max_batch_size=2)
    rig.run()
    rig.pass_time(1000)
    rig.run()
    assert set(rig.serving.running()) == {ONE}
    assert len(rig.children()) == 1
    assert rig.status()["state"] == ("paused" if action == "pause" else "tuned")
    act(rig, "start")
    assert set(rig.serving.running()) == {ONE, TWO}


def test_unloading_and_loading_again_is_no_start(rigs):
    rig = rigs()
    ref = rig.model({"*": PASS})
    rig.run()
    act(rig, "pin_baseline")
    rig.serving.unload(ref)
    rig.run()
    rig.model({"*": PASS})
    rig.run()
    assert rig.serving.running() == {}


def test_another_graph_is_not_held(rigs, tmp_path):
    rig = rigs()
    old = rig.model({"*": PASS})
    rig.run()
    act(rig, "pin_baseline")
    assert len(list((tmp_path / "holds").iterdir())) == 1
    rig.serving.unload(old)
    rig.model({"*": PASS}, graph="g2")
    rig.run()
    assert len(rig.serving.running()) == 3
    assert list((tmp_path / "holds").iterdir()) == []


def test_a_hold_is_of_one_version_and_graph(tmp_path):
    holds = OperatorHolds(tmp_path / "holds")
    holds.put(REF, PINNED)
    assert OperatorHolds(tmp_path / "holds").get(REF) == PINNED
    for other in (REF._replace(model="n"), REF._replace(version=2), REF._replace(graph="h")):
        assert holds.get(other) == ""
    holds.put(REF, PAUSED)
    assert holds.get(REF) == PAUSED
    holds.drop(REF)
    holds.drop(REF)
    assert holds.get(REF) == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"held": 1}', b'{"held": "tired"}', b"\xff"])
def test_a_file_that_cannot_be_read_holds_nothing_and_is_told_of(tmp_path, caplog, content):
    holds = OperatorHolds(tmp_path / "holds")
    holds.put(REF, PINNED)
    [path] = (tmp_path / "holds").iterdir()
    path.write_bytes(content)
    assert holds.get(REF) == ""
    assert f"m 1: what it was held for cannot be read from {path}" in caplog.text


def test_where_nothing_can_be_written_a_warning_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    (tmp_path / "file").touch()
    holds = OperatorHolds(tmp_path / "file" / "holds")
    holds.put(REF, PINNED)
    assert "m 1 is pinned to the baseline, which will not be remembered over a restart: Not a directory" in caplog.text
    assert OperatorHolds(None).get(REF) == ""
