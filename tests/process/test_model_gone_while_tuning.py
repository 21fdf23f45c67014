"""A model that is deleted or replaced in mid-tuning: its child ends, and what it made never answers for another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hone.tuning import group
from tests import models
from tests.process.publishing import FLAGS, PROGRAM, child_of, load, prepare, wait_at
from tests.process.real_artifacts import CONFIG, ROW, Place, assert_answers, engine, mapped, tuning
from tests.process.support import POLL, answers, is_serving
from tests.process.tuning_children import wait_gone
from tests.running import run_server, wait_until


def test_deleted(place: Place, compiled_softmax: Path) -> None:
    place.add("m")
    prepare(place, compiled_softmax, {"m": {"step": "synced", "does": "hang"}})
    flags = (*POLL, "--tuning=on", *place.flags)
    with run_server(place.repository, *flags, program=PROGRAM) as server:
        wait_at(place, "m", "synced")
        pids = group.members(child_of(server))
        shutil.rmtree(place.repository / "m")
        wait_until(lambda: not is_serving(server, "m"), "unloaded")
        wait_gone(pids)
        assert place.artifacts() == set()
        assert server.get("/v2/models/m/tuning")[0] in (400, 404)
        prepare(place, compiled_softmax, {})
        place.add("other")
        wait_until(lambda: is_serving(server, "other") and engine(server, "other") == "tvm", "tuning goes on")
        assert_answers(server, "other")
        assert server.stop() == 0


@pytest.mark.parametrize("step", ["synced", "published"])
def test_replaced(step: str, place: Place, compiled_softmax: Path) -> None:
    """Also when the old one's artifact is complete, and its child only has to say so."""
    place.add("m")
    prepare(place, compiled_softmax, {"m": {"step": step, "does": "hang"}})
    with run_server(place.repository, *FLAGS, *place.flags, program=PROGRAM) as server:
        load(server, "m")
        wait_at(place, "m", step)
        assert_answers(server, "m")
        pids = group.members(child_of(server))
        prepare(place, compiled_softmax, {"m": {"step": "staged", "does": "die"}})
        models.write_model(place.repository, "m", models.scale(2.0), config=CONFIG)
        load(server, "m")
        wait_gone(pids)
        assert answers(server, "m", 2.0 * ROW[0][0])
        told = wait_until(lambda: (told := tuning(server, "m"))["state"] == "failed" and told, "the new one was tried")
        assert [bucket["engine"] for bucket in told["buckets"]] == ["onnxruntime"]
        assert mapped(server) == []
        assert answers(server, "m", 2.0 * ROW[0][0])
        assert server.stop() == 0
