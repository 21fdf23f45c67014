"""SIGKILL of the server at each step of publishing: its child goes with it, and the next server finishes the work."""

from __future__ import annotations

import signal
from pathlib import Path

from hone.kernels.staging import STEPS
from hone.tuning import group
from tests.process.publishing import FLAGS, PROGRAM, child_of, load, prepare, wait_at
from tests.process.real_artifacts import Place, assert_answers, engine
from tests.process.tuning_children import wait_gone
from tests.running import run_server, wait_until


def test_at_each_step(place: Place, compiled_softmax: Path) -> None:
    digests = {step: place.add(step) for step in STEPS}
    before: list[str] = []
    for step in (*STEPS, ""):
        prepare(place, compiled_softmax, {step: {"step": step, "does": "hang"}})
        with run_server(place.repository, *FLAGS, *place.flags, program=PROGRAM) as server:
            for model in before[-1:]:  # the server before this one was killed over it
                load(server, model)
                wait_until(lambda model=model: engine(server, model) == "tvm", f"{model} is promoted after all")
                assert_answers(server, model)
            assert place.artifacts() == {digests[model] for model in before}
            if not step:
                assert server.stop() == 0
                break
            load(server, step)
            wait_at(place, step, step)
            assert_answers(server, step)
            pids = group.members(child_of(server))
            assert pids
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            wait_gone(pids)
        before.append(step)
