"""Requests that name the engine they want: they get that one or an error, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

from hone.errors import EngineError, InvalidRequest, Unavailable
from hone.serving.choice import chosen_engine
from hone.types import ENGINE_PARAMETER
from tests.unit.serving.conftest import BATCHING, rows
from tests.unit.serving.test_slot import Scaled, special

BASELINE, TUNED = ({ENGINE_PARAMETER: name} for name in ("baseline", "tuned"))


async def answer(served, parameters: dict[str, object], num_rows: int = 1) -> tuple[float, str]:
    """The factor by which the engine scaled, and the engine's kind."""
    pending = served.ask(rows(num_rows), parameters=parameters)
    return float((await pending.future)["OUT"][0, 0]), pending.engine


@pytest.mark.parametrize("config", [BATCHING, BATCHING + "dynamic_batching {}"])
async def test_each_request_runs_on_the_engine_it_names(serve, config):
    served = serve(config)
    served.model.slot.promote([special(Scaled(5.0))])
    asked = [{}, BASELINE, TUNED, {"other": 1}]
    found = [await answer(served, parameters) for parameters in asked]
    assert found == [(5.0, "tuned"), (2.0, "fake"), (5.0, "tuned"), (5.0, "tuned")]


async def test_what_is_not_tuned_is_refused_to_who_asks_for_it_and_nobody_else(serve):
    served = serve()
    assert await answer(served, {}) == (2.0, "fake")
    with pytest.raises(Unavailable, match="no tuned engine runs a batch of 1 of these shapes for model 'm' now"):
        await answer(served, TUNED)
    served.model.slot.promote([special(Scaled(5.0), 2)])
    with pytest.raises(Unavailable, match="a batch of 4"):
        await answer(served, TUNED, 4)
    assert await answer(served, TUNED, 2) == (5.0, "tuned")


async def test_a_tuned_engine_that_fails_is_stood_in_for_by_the_baseline(serve):
    served = serve()
    tuned = Scaled(5.0)
    tuned.fail_if = lambda array: True
    served.model.slot.promote([special(tuned)])
    assert await answer(served, TUNED) == (2.0, "fake")


async def test_requests_that_differ_in_it_are_not_batched_together(serve):
    served = serve(BATCHING + "dynamic_batching {}")
    tuned = Scaled(5.0, 2)
    served.model.slot.promote([special(tuned, 2)])
    served.engine.gate.clear()
    held = served.ask(rows(1), parameters=BASELINE)
    await served.entered()
    asked = [BASELINE, BASELINE, {}, {}, TUNED, TUNED]
    waiting = [served.ask(rows(1), parameters=parameters) for parameters in asked]
    served.engine.gate.set()
    await asyncio.gather(held.future, *(pending.future for pending in waiting))
    assert served.engine.batches == [(1, 4), (2, 4)]
    assert tuned.batches == [(2, 4), (2, 4)]
    assert [pending.engine for pending in waiting] == ["fake", "fake", "tuned", "tuned", "tuned", "tuned"]


async def test_leases_on_the_baseline_end(serve):
    served = serve()
    served.engine.fail_if = lambda array: bool(array[0, 0] == 13)
    with pytest.raises(EngineError):
        await served.ask(rows(1, 13), parameters=BASELINE).future
    await answer(served, BASELINE)
    await served.model.retire()
    assert served.engine.closed


@pytest.mark.parametrize("value", ["", "tvm", "Baseline", 1, True, 2.5])
def test_other_values_are_refused(value):
    with pytest.raises(InvalidRequest, match="'hone_engine' parameter must be 'baseline' or 'tuned', got"):
        chosen_engine({ENGINE_PARAMETER: value})
