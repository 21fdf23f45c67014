"""An action on a model's tuning answers with its effect, or with what hinders it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from hone.errors import Unavailable
from hone.serving.service import InferenceService


def service_on(done: Future[None]) -> InferenceService:
    return InferenceService(
        server_name="hone",
        registry=SimpleNamespace(find=lambda model, version: SimpleNamespace(version_text="1")),
        lifecycle=None,
        regions=None,
        log_control=None,
        trace_control=None,
        tracer=None,
        control_mode="none",
        strict_readiness=True,
        ready_requires_model=False,
        known_names=list,
        tuning=SimpleNamespace(
            act=lambda *of: done, status=lambda model, version: {"model": model, "version": version}
        ),
    )


async def test_the_answer_is_the_state_after_it():
    done: Future[None] = Future()
    done.set_result(None)
    assert await service_on(done).tuning_action("m", "", "start") == {"model": "m", "version": "1"}


async def test_what_hinders_it_is_the_answer():
    done: Future[None] = Future()
    done.set_exception(Unavailable("cannot start the tuning of 'm': it is off"))
    with pytest.raises(Unavailable, match="cannot start the tuning of 'm': it is off"):
        await service_on(done).tuning_action("m", "", "start")
