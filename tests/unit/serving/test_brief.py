"""Brief executions run on the event loop: only those measured to be brief, of models that are steady, on the CPU."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hone.errors import EngineError
from hone.serving import brief
from hone.serving.brief import BriefExecutions
from hone.specialization import CPU, Observers
from tests.unit.serving.conftest import BATCHING, Served, rows
from tests.unit.serving.fakes import FakeEngine
from tests.unit.serving.test_slot import Scaled, special

SHAPE = (((4,),), 1)
#: On the loop, on a thread that waits for the interpreter's lock, and held up.
BRIEF_NS, WAITING_NS, LONG_NS = 10_000, 75_000, 4_000_000
BATCHED = BATCHING + "dynamic_batching {}"


def run(averages: BriefExecutions, here_ns: int, away_ns: int, num: int = 1) -> list[bool]:
    """So many executions, each on the loop where that is thought right; whether each was there."""
    told = []
    for _ in range(num):
        told.append(on_loop := SHAPE in averages)
        averages.learn(SHAPE, here_ns if on_loop else away_ns, on_loop=on_loop)
    return told


class Steady(FakeEngine):
    is_steady = True


@pytest.fixture
def always_brief(monkeypatch):
    """What was seen once counts as brief, however slow the machine that the test runs on."""
    for limit in ("_TRY_NS", "_STAY_NS"):
        monkeypatch.setattr(brief, limit, 1e15)
    monkeypatch.setattr(brief, "_NEWEST_SHARE", 1.0)


async def ran_here(served: Served, num_requests: int = 3, **fields: object) -> list[bool]:
    """Of each request, whether the loop's own thread ran it, and whether its answer was there at once."""
    told = []
    for _ in range(num_requests):
        served.engine.threads.clear()
        pending = served.ask(rows(1), **fields)
        await pending.future
        told.append(served.engine.threads == {threading.get_ident()})
    return told


def test_nothing_is_brief_before_some_were_seen():
    told = run(BriefExecutions(), BRIEF_NS, WAITING_NS, 1000)
    assert not any(told[:8])
    assert all(told[60:])


def test_what_takes_long_on_threads_is_not_even_tried():
    assert not any(run(BriefExecutions(), BRIEF_NS, 300_000, 1000))


def test_what_takes_long_on_the_loop_is_tried_ever_less_often():
    told = run(BriefExecutions(), 120_000, WAITING_NS, 100_000)
    assert any(told)
    assert sum(told) < 100
    assert sum(told[50_000:]) < 10


def test_one_that_was_held_up_changes_nothing_and_a_slow_engine_does():
    averages = BriefExecutions()
    run(averages, BRIEF_NS, WAITING_NS, 100)
    run(averages, LONG_NS, WAITING_NS)
    assert SHAPE in averages
    run(averages, BRIEF_NS, WAITING_NS, 100)
    assert sum(run(averages, LONG_NS, WAITING_NS, 60)) <= 10


def test_what_became_brief_again_comes_back():
    averages = BriefExecutions()
    run(averages, 120_000, WAITING_NS, 1000)
    assert all(run(averages, BRIEF_NS, WAITING_NS, 10_000)[-1000:])


def test_each_shape_and_number_of_rows_is_for_itself():
    averages = BriefExecutions()
    run(averages, BRIEF_NS, WAITING_NS, 100)
    assert SHAPE in averages
    assert (SHAPE[0], 2) not in averages
    assert (((5,),), 1) not in averages


def test_memory_is_fixed():
    averages = BriefExecutions()
    for num_rows in range(10_000):
        for _ in range(30):
            averages.learn((SHAPE[0], num_rows), BRIEF_NS, on_loop=False)
    assert sum((SHAPE[0], num_rows) in averages for num_rows in range(10_000)) == 256


@pytest.mark.parametrize("config", [BATCHING, BATCHED, BATCHING + "dynamic_batching { preserve_ordering: true }"])
async def test_brief_ones_run_on_the_loop(serve, always_brief, config):
    served = serve(config, Steady())
    assert await ran_here(served) == [False, True, True]
    assert served.statistics.num_pending == 0
    served.engine.threads.clear()
    answers = await asyncio.gather(*(served.ask(rows(1, n)).future for n in range(20)))
    assert [float(answer["OUT"][0, 0]) for answer in answers] == [2 * n for n in range(20)]


async def test_they_are_answered_within_the_call(serve, always_brief):
    served = serve(BATCHING, Steady())
    await served.ask(rows(1)).future
    assert served.ask(rows(1)).future.done()


async def test_one_that_is_slow_goes_to_a_thread(serve):
    class Slow(Steady):
        def run(self, inputs, outputs):
            threading.Event().wait(0.002)
            return super().run(inputs, outputs)

    assert not any(await ran_here(serve(BATCHING, Slow()), 40))


async def test_a_model_that_is_not_steady_never_runs_on_the_loop(serve, always_brief):
    assert not any(await ran_here(serve(BATCHING, FakeEngine())))


async def test_a_client_that_chooses_the_engine_does_not_run_on_the_loop(serve, always_brief):
    served = serve(BATCHING, Steady())
    await ran_here(served)
    assert not any(await ran_here(served, parameters={"hone_engine": "baseline"}))
    assert all(await ran_here(served))


async def test_they_do_not_wait_for_what_threads_are_at(serve, always_brief):
    served = serve(BATCHING, Steady())
    await served.ask(rows(1)).future
    served.engine.gate.clear()
    held = served.ask(rows(2))  # of rows that nothing is known of, so on a thread
    await served.entered()
    served.engine.gate.set()
    assert served.ask(rows(1)).future.done()
    await held.future
    assert served.statistics.num_pending == 0


async def test_order_is_kept_where_it_is_asked_for(serve, always_brief):
    served = serve(BATCHING + "dynamic_batching { preserve_ordering: true }", Steady())
    await served.ask(rows(1)).future
    served.engine.gate.clear()
    held = served.ask(rows(2))
    await served.entered()
    behind = served.ask(rows(1))
    await asyncio.sleep(0)
    assert not behind.future.done()
    served.engine.gate.set()
    await behind.future
    assert held.future.done()
    assert served.engine.batches[-2:] == [(2, 4), (1, 4)]


async def test_failures_are_answered_and_what_follows_goes_on(serve, always_brief):
    served = serve(BATCHING, Steady())
    await ran_here(served)
    served.engine.fail_if = lambda array: bool(array[0, 0] == 13)
    with pytest.raises(EngineError, match="told to fail"):
        await served.ask(rows(1, 13)).future
    assert await ran_here(served, 1) == [True]


async def test_promotions_and_roll_backs_reach_the_loop(serve, always_brief):
    served = serve(BATCHING, Steady())
    await ran_here(served)
    engine = Scaled(5.0)
    (number,) = served.model.slot.promote([special(engine)])
    assert float((await served.ask(rows(1, 3)).future)["OUT"][0, 0]) == 15
    assert engine.threads == {threading.get_ident()}
    served.model.slot.roll_back(number)
    assert engine.num_closed == 1
    assert float((await served.ask(rows(1, 3)).future)["OUT"][0, 0]) == 6


async def test_activity_and_marks_are_kept_as_on_threads(serve, always_brief):
    class Meter:
        num_started = num_finished = 0

        def started(self):
            self.num_started += 1

        def finished(self):
            self.num_finished += 1

    class Marks:
        def __init__(self):
            self.cells, self.claimed, self.seen = {}, [], []

        def claim(self):
            self.claimed.append(threading.get_ident())
            return len(self.claimed)

        def release(self, cell):
            self.claimed[cell - 1] = None

    meter, marks = Meter(), Marks()
    served = serve(BATCHING, Steady(), Observers(activity=meter, running=marks))

    class Marked(Scaled):
        def run(self, inputs, outputs):
            marks.seen.append(dict(marks.cells))
            return super().run(inputs, outputs)

    await ran_here(served)
    served.model.slot.promote([special(Marked(5.0), mark=7)])
    await served.ask(rows(1)).future
    here = marks.claimed.index(threading.get_ident()) + 1
    assert marks.seen == [{here: 7}]
    assert marks.cells[here] == 0
    assert meter.num_started == meter.num_finished == 4
    await served.model.retire()
    assert marks.claimed == [None, None]


async def test_instances_on_a_gpu_keep_the_loop_out(serve, always_brief):
    config = BATCHING + "instance_group { kind: KIND_GPU count: 1 gpus: 0 }"
    served = serve(config, Steady(), gpu_kinds=("cuda",))
    assert served.model.places != ((CPU, 0),)
    assert not any(await ran_here(served))


async def test_outputs_survive_the_next_run(serve, always_brief):
    """Batches are put together in buffers that the loop has of its own, and uses again."""
    served = serve(BATCHED, Steady())
    for _ in range(3):
        await asyncio.gather(*(served.ask(rows(1, n)).future for n in range(4)))
    first = await asyncio.gather(*(served.ask(rows(1, n)).future for n in range(4)))
    await asyncio.gather(*(served.ask(rows(1, 9 * n)).future for n in range(4)))
    assert [float(np.max(answer["OUT"])) for answer in first] == [0, 2, 4, 6]
