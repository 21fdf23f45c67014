"""Generations: promoted and rolled back between requests, closed when nobody uses them, never wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import numpy as np
import pytest

from hone.errors import EngineError
from hone.serving.batcher import DirectScheduler
from hone.serving.executor import DeviceExecutor
from hone.serving.observation import Observation
from hone.serving.slot import Slot
from hone.specialization import DEVICE_ORDINAL, Observers, Signature, Specialization, VersionRef
from tests.unit.serving.conftest import BATCHING, rows
from tests.unit.serving.fakes import FakeEngine


class Scaled(FakeEngine):
    """A specialization whose answers tell it from the baseline (which doubles)."""

    kind = "tuned"

    def __init__(self, factor: float, num_rows: int = 1) -> None:
        super().__init__(shape=(num_rows, 4))
        self.factor = factor
        self.num_closed = 0

    def run(self, inputs, outputs):
        assert not self.closed, "run after close"
        super().run(inputs, outputs)
        return [inputs["IN"] * self.factor for _ in outputs]

    def close(self):
        super().close()
        self.num_closed += 1


def special(engine: FakeEngine, num_rows: int = 1, min_rows: int | None = None, **fields) -> Specialization:
    signature = Signature.of([("IN", "FP32", (num_rows, 4))])
    return Specialization(signature, engine, "digest", num_rows if min_rows is None else min_rows, **fields)


def slot_of(engine: FakeEngine) -> Slot:
    return Slot(engine, ("IN",), batching=True)


KEY = ((4,),)


def runs(slot: Slot, num_rows: int, device: str = "cpu") -> object:
    generation = slot.acquire(KEY, num_rows, device)
    generation.release()
    return generation.engine


def test_a_specialization_runs_its_signature_and_the_baseline_the_rest():
    baseline, tuned = FakeEngine(), FakeEngine()
    slot = slot_of(baseline)
    assert runs(slot, 1) is baseline
    assert slot.promote([special(tuned, 2)]) == [1]
    assert runs(slot, 2) is tuned
    assert runs(slot, 1) is baseline
    assert runs(slot, 3) is baseline
    generation = slot.acquire(((5,),), 2)
    assert generation.engine is baseline
    generation.release()


def test_padding_goes_to_the_smallest_bucket_that_may_pad():
    baseline, two, eight = FakeEngine(), FakeEngine(), FakeEngine()
    slot = slot_of(baseline)
    slot.promote([special(eight, 8, min_rows=3), special(two, 2, min_rows=1)])
    assert [runs(slot, n) for n in range(1, 10)] == [two, two, *[eight] * 6, baseline]


def test_rolling_back_returns_to_the_generation_before_then_to_the_baseline():
    baseline, first, second = FakeEngine(), FakeEngine(), FakeEngine()
    slot = slot_of(baseline)
    slot.promote([special(first)])
    slot.promote([special(second)])
    assert not first.closed
    assert slot.roll_back(2)
    assert second.closed
    assert runs(slot, 1) is first
    assert not slot.roll_back(2)
    assert slot.roll_back(1)
    assert first.closed
    assert runs(slot, 1) is baseline
    assert not slot.roll_back(0)


def test_what_is_kept_for_returning_may_be_given_up_too():
    baseline, first, second = FakeEngine(), FakeEngine(), FakeEngine()
    slot = slot_of(baseline)
    slot.promote([special(first, 2, min_rows=1)])
    slot.promote([special(second, 2, min_rows=1)])
    running = slot.acquire(KEY, 1)
    assert slot.roll_back(1)
    assert first.closed
    assert not slot.roll_back(1)
    running.release()
    assert [runs(slot, rows) for rows in (1, 2, 3)] == [second, second, baseline]
    assert slot.roll_back(2)
    assert second.closed
    assert runs(slot, 1) is baseline


def test_no_more_than_one_generation_is_kept_for_returning():
    slot = slot_of(FakeEngine())
    engines = [Scaled(n) for n in range(5)]
    for engine in engines:
        slot.promote([special(engine)])
    assert [engine.closed for engine in engines] == [True, True, True, False, False]
    slot.close()
    assert [engine.num_closed for engine in engines] == [1] * 5


def test_a_specialization_runs_on_its_own_kind_of_device_only():
    baseline, left, right, other = FakeEngine(), FakeEngine(), FakeEngine(), FakeEngine()
    slot = slot_of(baseline)
    slot.promote([special(left, device="left")])
    assert [runs(slot, 1, device) for device in ("left", "right", "cpu")] == [left, baseline, baseline]
    slot.promote([special(right, device="right"), special(other, 2, device="right")])
    assert [runs(slot, 1, device) for device in ("left", "right", "cpu")] == [left, right, baseline]
    assert [runs(slot, 2, device) for device in ("left", "right")] == [baseline, other]
    assert slot.roll_back(2)
    assert [runs(slot, 1, device) for device in ("left", "right")] == [left, baseline]
    assert right.closed
    assert not left.closed
    slot.close()
    assert left.closed
    assert other.closed


def test_a_generation_closes_when_its_last_lease_ends():
    tuned = FakeEngine()
    slot = slot_of(FakeEngine())
    slot.promote([special(tuned)])
    first, second = slot.acquire(KEY, 1), slot.acquire(KEY, 1)
    assert slot.roll_back(1)
    first.release()
    assert not tuned.closed
    second.release()
    assert tuned.closed


def test_a_closed_slot_takes_no_engine_over():
    tuned = FakeEngine()
    slot = slot_of(FakeEngine())
    slot.close()
    with pytest.raises(RuntimeError):
        slot.promote([special(tuned)])
    assert not tuned.closed


def test_specializations_survive_a_reload_that_changes_the_configuration_only():
    old, new = slot_of(FakeEngine()), slot_of(FakeEngine())
    tuned = FakeEngine()
    old.promote([special(tuned)])
    new.take_over(old)
    old.close()
    assert not tuned.closed
    assert runs(new, 1) is tuned
    new.promote([special(FakeEngine())])
    new.close()
    assert tuned.closed


def test_a_thread_that_gets_the_number_of_another_has_the_instance_of_its_own_device():
    made = []

    class Placed(FakeEngine):
        def instantiate(self):
            made.append(DEVICE_ORDINAL.get())
            return object()

    def on(ordinal):
        DEVICE_ORDINAL.set(ordinal)
        return slot.baseline.instance()

    slot = slot_of(Placed())
    first = contextvars.copy_context().run(on, 0)
    assert contextvars.copy_context().run(on, 1) is not first
    assert contextvars.copy_context().run(on, 0) is first
    assert made == [0, 1]


def test_each_thread_has_an_instance_of_its_own():
    class Counted(FakeEngine):
        made = 0

        def instantiate(self):
            self.made += 1
            return FakeEngine()

    slot = slot_of(Counted())
    generation = slot.acquire(KEY, 1)
    seen = []
    barrier = threading.Barrier(3)

    def use():
        seen.append(generation.instance())
        barrier.wait()
        assert generation.instance() is seen[-1] or generation.instance() in seen

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generation.engine.made == 3
    generation.release()


class Heard:
    """A watcher and traffic meter that remembers."""

    def __init__(self) -> None:
        self.failures: list[tuple[VersionRef, int, str]] = []
        self.samples: list[tuple[int, dict, dict]] = []
        self.traffic: list[tuple[str, int, str]] = []
        self.wants = False

    def failed(self, ref, generation, reason):
        self.failures.append((ref, generation, reason))

    def wants_sample(self, ref, generation):
        return self.wants

    def sampled(self, ref, generation, inputs, outputs):
        self.samples.append((generation, dict(inputs), dict(outputs)))

    def ran(self, model, version, signature, seconds):
        self.traffic.append((model, version, signature.text))


async def test_padded_batches_answer_with_their_own_rows_only(serve):
    served = serve()
    tuned = Scaled(10, 8)
    served.model.slot.promote([special(tuned, 8, min_rows=1)])
    answer = await served.ask(rows(3, 7)).future
    assert tuned.batches == [(8, 4)]
    assert answer["OUT"].tolist() == rows(3, 70).tolist()
    assert served.engine.batches == []
    assert served.statistics.to_dict()["batch_stats"][0]["batch_size"] == 3


async def test_a_failing_generation_fails_no_request_and_is_told_of(serve):
    heard = Heard()
    served = serve(observers=Observers(watcher=heard))
    tuned = Scaled(10)
    tuned.fail_if = lambda array: True
    served.model.slot.promote([special(tuned)])
    answer = await served.ask(rows(1, 3)).future
    assert (answer["OUT"] == 6).all()
    assert heard.failures == [(served.model.ref, 1, "fake engine was told to fail")]


async def test_a_request_that_fails_on_the_baseline_too_says_nothing_of_the_generation(serve):
    heard = Heard()
    served = serve(observers=Observers(watcher=heard))
    tuned = Scaled(10)
    tuned.fail_if = served.engine.fail_if = lambda array: True
    served.model.slot.promote([special(tuned)])
    with pytest.raises(EngineError):
        await served.ask(rows(1)).future
    assert heard.failures == []


async def test_samples_are_copies_without_the_rows_that_padding_added(serve):
    heard = Heard()
    heard.wants = True
    served = serve(observers=Observers(watcher=heard, traffic=heard))
    served.model.slot.promote([special(Scaled(10, 4), 4, min_rows=1)])
    array = rows(3, 1)
    answer = await served.ask(array).future
    ((generation, inputs, outputs),) = heard.samples
    assert generation == 1
    assert inputs["IN"].tolist() == array.tolist()
    assert outputs["OUT"].tolist() == rows(3, 10).tolist()
    assert not np.shares_memory(inputs["IN"], array)
    assert not np.shares_memory(outputs["OUT"], answer["OUT"])
    assert heard.traffic == [("m", 1, "IN:FP32[3,4]")]


async def test_each_executor_thread_runs_what_is_for_its_device(serve):
    served = serve()
    slot, engine = served.model.slot, served.engine
    tuned = Scaled(10)
    slot.promote([special(tuned, device="right")])
    executor = DeviceExecutor("m", 2, served.completions, devices=(("left", 0), ("right", 0)))
    scheduler = DirectScheduler(slot, Observation(served.model.ref), executor, served.statistics)
    engine.gate.clear()
    held, free = served.admit(rows(1)), served.admit(rows(1))
    scheduler.submit(held)  # on the first thread, which is the left device's, until the gate opens
    await served.entered()
    scheduler.submit(free)
    assert (await free.future)["OUT"].tolist() == rows(1, 10).tolist()
    assert not held.future.done()
    engine.gate.set()
    assert (await held.future)["OUT"].tolist() == rows(1, 2).tolist()
    assert (free.engine, held.engine) == ("tuned", "fake")
    await executor.close()


async def test_threads_note_what_they_run_while_they_run_it(serve):
    class Marks:
        def __init__(self) -> None:
            self.cells = {3: 0}
            self.released: list[int] = []

        def claim(self) -> int:
            return 3

        def release(self, cell: int) -> None:
            self.released.append(cell)

    marks = Marks()
    seen = []
    served = serve(observers=Observers(running=marks))
    served.engine.fail_if = lambda array: seen.append(marks.cells[3]) is not None
    tuned = Scaled(10)
    tuned.fail_if = lambda array: seen.append(marks.cells[3]) is None
    served.model.slot.promote([special(tuned, mark=77)])
    answer = await served.ask(rows(1)).future
    assert answer["OUT"].tolist() == rows(1, 2).tolist(), "the tuned one failed, and the baseline answered"
    assert seen == [77, 0]
    assert marks.cells == {3: 0}
    await served.model.retire()
    assert marks.released == [3]


async def test_a_hundred_swaps_under_32_clients_lose_and_mix_nothing(serve):
    served = serve(BATCHING + "instance_group { count: 2 kind: KIND_CPU }")
    slot = served.model.slot
    stop = False
    num_answers = 0
    seen: set[float] = set()

    async def client(number: int) -> None:
        nonlocal num_answers
        while not stop:
            answer = await served.ask(rows(1, number + 1)).future
            factors = set((answer["OUT"] / (number + 1)).reshape(-1).tolist())
            assert len(factors) == 1
            seen.update(factors)
            num_answers += 1

    clients = [asyncio.create_task(client(number)) for number in range(32)]
    engines: list[Scaled] = []

    def swap() -> None:
        for number in range(100):
            engine = Scaled(3 if number % 2 else 5)
            engines.append(engine)
            (generation,) = slot.promote([special(engine)])
            if number % 3 == 0:
                assert slot.roll_back(generation)
            answered = num_answers
            while num_answers < answered + 8:  # some requests run between any two swaps
                time.sleep(0.0005)

    await asyncio.to_thread(swap)
    before = num_answers
    while num_answers < before + 100:
        await asyncio.sleep(0.001)
    stop = True
    await asyncio.gather(*clients)
    assert seen <= {2.0, 3.0, 5.0}
    assert len(seen) > 1
    slot.close()
    assert all(engine.num_closed == 1 for engine in engines)


async def test_swaps_of_whole_batches_keep_every_request_apart(serve):
    served = serve(BATCHING + "dynamic_batching { }")
    served.model.slot.promote([special(Scaled(10, 4), 4, min_rows=2)])
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1, value)) for value in (1, 2, 3)]
    served.engine.gate.set()
    await held.future
    answers = await asyncio.gather(*(pending.future for pending in waiting))
    assert [answer["OUT"][0, 0] for answer in answers] == [10, 20, 30]
    assert all(answer["OUT"].shape == (1, 4) for answer in answers)
