"""Dynamic batching: which requests run together, when, and what happens to those that cannot wait."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from hone.errors import EngineError, InvalidRequest, QueueFull, QueueTimeout
from tests.unit.serving.conftest import BATCHING, rows


async def test_without_dynamic_batching_every_request_runs_alone(serve):
    served = serve()
    answers = await asyncio.gather(*(served.ask(rows(1, i)).future for i in range(4)))
    assert [float(a["OUT"][0, 0]) for a in answers] == [0, 2, 4, 6]
    assert served.engine.batches == [(1, 4)] * 4


async def test_a_single_request_reaches_the_engine_uncopied(serve):
    for config in (BATCHING, BATCHING + "dynamic_batching {}"):
        served = serve(config)
        array = rows(2)
        await served.ask(array).future
        assert served.engine.addresses == [array.ctypes.data]


async def test_requests_that_wait_for_the_instance_run_as_one_batch(serve):
    served = serve(BATCHING + "dynamic_batching {}")
    served.engine.gate.clear()
    first = served.ask(rows(1, 100))
    await served.entered()
    waiting = [served.ask(rows(n, n)) for n in (1, 2, 3)]
    served.engine.gate.set()
    await first.future
    answers = await asyncio.gather(*(pending.future for pending in waiting))
    assert served.engine.batches == [(1, 4), (6, 4)]
    for n, answer in zip((1, 2, 3), answers, strict=True):
        assert answer["OUT"].shape == (n, 4)
        assert (answer["OUT"] == 2 * n).all()


async def test_a_batch_never_exceeds_max_batch_size(serve):
    served = serve(BATCHING + "dynamic_batching {}")
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(3, n)) for n in range(5)]
    served.engine.gate.set()
    await asyncio.gather(held.future, *(pending.future for pending in waiting))
    assert served.engine.batches == [(1, 4), (6, 4), (6, 4), (3, 4)]


async def test_requests_of_different_shapes_are_not_batched_together(serve):
    served = serve(BATCHING.replace("dims: 4", "dims: -1") + "dynamic_batching {}")
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1, 1, width=w)) for w in (4, 4, 5, 5)]
    served.engine.gate.set()
    await asyncio.gather(held.future, *(pending.future for pending in waiting))
    assert served.engine.batches == [(1, 4), (2, 4), (2, 5)]


async def test_queue_delay_waits_for_the_preferred_size_and_no_longer_than_it_says(serve):
    served = serve(BATCHING + "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 30000000 }")
    waiting = [served.ask(rows(1, n)) for n in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served.engine.batches == []
    waiting.append(served.ask(rows(1, 3)))
    await asyncio.gather(*(pending.future for pending in waiting))
    assert served.engine.batches == [(4, 4)]

    soon = serve(BATCHING + "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 20000 }")
    started = time.monotonic()
    await asyncio.gather(*(soon.ask(rows(1, n)).future for n in range(3)))
    assert time.monotonic() - started >= 0.02
    assert soon.engine.batches == [(3, 4)]


async def test_the_largest_preferred_size_wins(serve):
    served = serve(BATCHING + "dynamic_batching { preferred_batch_size: [2, 4] }")
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1, n)) for n in range(7)]
    served.engine.gate.set()
    await asyncio.gather(held.future, *(pending.future for pending in waiting))
    assert served.engine.batches == [(1, 4), (4, 4), (2, 4), (1, 4)]


async def test_higher_priority_goes_first_and_unknown_levels_are_refused(serve):
    served = serve(
        BATCHING.replace("max_batch_size: 8", "max_batch_size: 1")
        + "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    )
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    order: list[int] = []
    waiting = []
    for priority in (3, 0, 1):
        pending = served.ask(rows(1, priority), priority=priority)
        pending.future.add_done_callback(lambda _, p=priority: order.append(p))
        waiting.append(pending.future)
    with pytest.raises(InvalidRequest, match="priority 4"):
        served.ask(rows(1), priority=4)
    served.engine.gate.set()
    await asyncio.gather(held.future, *waiting)
    await asyncio.sleep(0)
    assert order == [1, 0, 3]


async def test_queue_size_is_exact(serve):
    served = serve(BATCHING + "dynamic_batching { default_queue_policy { max_queue_size: 2 } }")
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1)) for _ in range(2)]
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        served.ask(rows(1))
    assert served.statistics.num_pending == 2
    served.model.scheduler.cancel(waiting[0])
    waiting[0].future.cancel()
    waiting.append(served.ask(rows(1)))  # the cancelled one made room
    served.engine.gate.set()
    await asyncio.gather(held.future, *(pending.future for pending in waiting[1:]))
    assert served.statistics.num_pending == 0


async def test_timeouts_fire_while_the_instance_is_busy(serve):
    served = serve(
        BATCHING
        + """dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000000
             allow_timeout_override: true } }"""
    )
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    late = served.ask(rows(1, 7), timeout_us=1000)
    with pytest.raises(QueueTimeout, match="Request timeout expired"):
        await late.future
    assert not held.future.done()
    served.engine.gate.set()
    await held.future
    assert served.engine.batches == [(1, 4)]


async def test_a_timeout_cannot_be_lengthened_nor_set_without_leave(serve):
    from hone.serving.batcher import QueuePolicy

    fixed = QueuePolicy(default_timeout_ns=5_000)
    assert fixed.timeout_ns(1) == 5_000
    assert QueuePolicy().timeout_ns(7) == 0
    open_ = QueuePolicy(default_timeout_ns=5_000, allow_timeout_override=True)
    assert open_.timeout_ns(1) == 1_000
    assert open_.timeout_ns(100) == 5_000
    assert open_.timeout_ns(0) == 5_000
    assert QueuePolicy(allow_timeout_override=True).timeout_ns(3) == 3_000


async def test_delayed_requests_run_after_those_in_time(serve):
    served = serve(
        BATCHING.replace("max_batch_size: 8", "max_batch_size: 1")
        + """dynamic_batching { default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 60000000
             allow_timeout_override: true max_queue_size: 2 } }"""
    )
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    late = served.ask(rows(1, 1), timeout_us=1000)
    level = served.model.scheduler._levels[0]
    while not level.delayed:
        await asyncio.sleep(0.001)
    order: list[str] = []
    prompt = served.ask(rows(1, 2))
    with pytest.raises(QueueFull):
        served.ask(rows(1))
    late.future.add_done_callback(lambda _: order.append("late"))
    prompt.future.add_done_callback(lambda _: order.append("prompt"))
    served.engine.gate.set()
    await asyncio.gather(held.future, late.future, prompt.future)
    assert order == ["prompt", "late"]


async def test_a_cancelled_request_never_spoils_its_batch(serve):
    served = serve(BATCHING + "dynamic_batching {}")
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1, n)) for n in range(3)]
    served.model.scheduler.cancel(waiting[1])
    waiting[1].future.cancel()
    served.engine.gate.set()
    answers = await asyncio.gather(held.future, waiting[0].future, waiting[2].future)
    assert served.engine.batches == [(1, 4), (2, 4)]
    assert float(answers[2]["OUT"][0, 0]) == 4


async def test_a_request_cancelled_while_it_runs_is_dropped_alone(serve):
    served = serve(BATCHING + "dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: [2] }")
    served.engine.gate.clear()
    first, second = served.ask(rows(1, 1)), served.ask(rows(1, 2))
    await served.entered()
    served.model.scheduler.cancel(first)
    first.future.cancel()
    served.engine.gate.set()
    answer = await second.future
    assert float(answer["OUT"][0, 0]) == 4
    assert served.engine.batches == [(2, 4)]


async def test_one_bad_request_does_not_spoil_the_others(serve):
    served = serve(BATCHING + "dynamic_batching {}")
    served.engine.fail_if = lambda array: bool((array == 13).any())
    served.engine.gate.clear()
    held = served.ask(rows(1))
    await served.entered()
    waiting = [served.ask(rows(1, value)) for value in (1, 13, 3)]
    served.engine.gate.set()
    await held.future
    good, bad, also_good = await asyncio.gather(*(p.future for p in waiting), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert float(good["OUT"][0, 0]) == 2
    assert float(also_good["OUT"][0, 0]) == 6


async def test_responses_are_not_overwritten_by_the_next_batch(serve):
    served = serve(BATCHING + "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 1000000 }")
    kept = []
    for value in range(6):
        pair = [served.ask(rows(1, value)), served.ask(rows(1, value + 100))]
        kept += [(p, await p.future) for p in pair]
    assert len(set(served.engine.addresses)) == 1  # the batch buffer is reused ...
    for value in range(6):  # ... and no answer is a view of it
        assert (kept[2 * value][1]["OUT"] == 2 * value).all()
        assert (kept[2 * value + 1][1]["OUT"] == 2 * (value + 100)).all()


async def test_batch_buffers_are_aligned_for_vector_engines(serve):
    served = serve(BATCHING + "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 1000000 }")
    await asyncio.gather(served.ask(rows(1)).future, served.ask(rows(1)).future)
    assert served.engine.batches == [(2, 4)]
    assert served.engine.addresses[0] % 64 == 0


async def test_preserve_ordering_delivers_in_order_with_several_instances(serve):
    from tests.unit.serving.fakes import FakeEngine

    class FirstIsSlow(FakeEngine):
        def run(self, inputs, outputs):
            if inputs["IN"][0, 0] == 0:
                assert second_ran.wait(30)
            result = super().run(inputs, outputs)
            if inputs["IN"][0, 0] == 1:
                second_ran.set()
            return result

    import threading

    second_ran = threading.Event()
    served = serve(
        BATCHING.replace("max_batch_size: 8", "max_batch_size: 1")
        + "dynamic_batching { preserve_ordering: true } instance_group { count: 2 kind: KIND_CPU }",
        FirstIsSlow(),
    )
    order: list[int] = []
    futures = []
    for value in range(2):
        pending = served.ask(rows(1, value))
        pending.future.add_done_callback(lambda _, v=value: order.append(v))
        futures.append(pending.future)
    await asyncio.gather(*futures)
    await asyncio.sleep(0)
    assert order == [0, 1]
    assert len(served.engine.threads) == 2


async def test_bytes_tensors_are_batched_too(serve):
    from tests.unit.serving.fakes import FakeEngine

    text = BATCHING.replace("TYPE_FP32", "TYPE_STRING").replace("dims: 4", "dims: 1")
    served = serve(
        text + "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 1000000 }",
        FakeEngine("BYTES", (-1, 1)),
    )
    words = [np.array([[b"a"]], dtype=object), np.array([[b"long word"]], dtype=object)]
    answers = await asyncio.gather(*(served.ask(word, datatype="BYTES").future for word in words))
    assert served.engine.batches == [(2, 1)]
    assert [answer["OUT"][0, 0] for answer in answers] == [b"a", b"long word"]


async def test_statistics_count_requests_and_executions(serve):
    served = serve(BATCHING + "dynamic_batching { preferred_batch_size: [3] max_queue_delay_microseconds: 1000000 }")
    await asyncio.gather(*(served.ask(rows(1)).future for _ in range(3)))
    told = served.statistics.to_dict()
    assert told["execution_count"] == 1
    assert told["batch_stats"][0]["batch_size"] == 3
