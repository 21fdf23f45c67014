"""SIGKILL of the tuning child at each step of publishing: the server serves on, and the next child finishes."""

from __future__ import annotations

from pathlib import Path

from hone.kernels.staging import STEPS
from tests.process.publishing import FLAGS, PROGRAM, load, prepare
from tests.process.real_artifacts import Place, assert_answers, engine, tuning
from tests.running import run_server, wait_until

#: From here on the entry has its name.
VISIBLE = {"renamed", "published"}


def test_at_each_step(place: Place, compiled_softmax: Path) -> None:
    digests = {step: place.add(step) for step in STEPS}
    prepare(place, compiled_softmax, {step: {"step": step, "does": "die"} for step in STEPS})
    with run_server(place.repository, *FLAGS, *place.flags, program=PROGRAM) as server:
        for step in STEPS:
            load(server, step)
            told = wait_until(
                lambda step=step: (told := tuning(server, step))["state"] == "failed" and told, f"killed at '{step}'"
            )
            assert "was killed by SIGKILL" in told["buckets"][0]["reason"]
            assert_answers(server, step)
        assert place.artifacts() == {digests[step] for step in VISIBLE}, "whole, or absent"

        prepare(place, compiled_softmax, {})
        for step in STEPS:
            assert server.post(f"/v2/models/{step}/tuning", {"action": "start"})[0] == 200
            wait_until(lambda step=step: engine(server, step) == "tvm", f"{step} is promoted after all")
            assert_answers(server, step)
        assert place.artifacts() == set(digests.values())
        assert server.stop() == 0
