"""Executor threads: started at first use, never more than the instances, ended when idle or closed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from hone.serving.executor import Completions, DeviceExecutor, aligned_empty


@pytest.fixture
async def completions():
    completions = Completions(asyncio.get_running_loop())
    yield completions
    completions.close()


class Work:
    def __init__(self, fail: bool = False) -> None:
        self.gate = threading.Event()
        self.delivered = asyncio.get_running_loop().create_future()
        self.fail = fail
        self.thread = 0

    def run(self, thread):
        assert self.gate.wait(30)
        self.thread = threading.get_ident()
        if self.fail:
            raise ValueError("broken contract")

    def deliver(self):
        self.delivered.set_result(threading.get_ident())


async def test_no_thread_before_the_first_use_and_none_beyond_the_instances(completions):
    executor = DeviceExecutor("m", 2, completions)
    assert executor.num_threads == 0
    works = [Work() for _ in range(5)]
    for number, work in enumerate(works, start=1):
        executor.submit(work)
        assert executor.num_threads == min(number, 2)
    for work in works:
        work.gate.set()
    here = threading.get_ident()
    assert [await work.delivered for work in works] == [here] * 5
    assert here not in {work.thread for work in works}
    await executor.close()


async def test_idle_threads_end_and_come_back(completions):
    executor = DeviceExecutor("m", 1, completions, idle_seconds=0.01)
    for _ in range(3):
        work = Work()
        work.gate.set()
        executor.submit(work)
        await work.delivered
        while executor.num_threads:
            await asyncio.sleep(0.005)
    await executor.close()


async def test_work_that_comes_while_the_threads_end_is_not_lost(completions):
    executor = DeviceExecutor("m", 2, completions, idle_seconds=30)
    first = Work()
    first.gate.set()
    executor.submit(first)
    await first.delivered
    executor._end_threads()
    late = [Work() for _ in range(3)]
    for work in late:
        work.gate.set()
        executor.submit(work)
    await asyncio.gather(*(work.delivered for work in late))
    await executor.close()
    assert executor.num_threads == 0


async def test_descriptors_are_given_back(completions):
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        executor = DeviceExecutor("m", 1, completions)
        work = Work()
        work.gate.set()
        executor.submit(work)
        await work.delivered
        await executor.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


async def test_closing_finishes_what_was_submitted_and_refuses_more(completions):
    executor = DeviceExecutor("m", 1, completions)
    works = [Work(), Work()]
    for work in works:
        executor.submit(work)
    closing = asyncio.create_task(executor.close())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(Work())
    for work in works:
        work.gate.set()
    await closing
    assert all(work.delivered.done() for work in works)


async def test_a_fault_in_an_execution_does_not_end_the_thread(caplog, completions):
    executor = DeviceExecutor("m", 1, completions)
    bad, good = Work(fail=True), Work()
    for work in (bad, good):
        work.gate.set()
        executor.submit(work)
    await asyncio.gather(bad.delivered, good.delivered)
    assert bad.thread == good.thread
    assert "broke its contract" in caplog.text
    await executor.close()


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 1000])
def test_buffers_are_aligned(num_bytes):
    block = aligned_empty(num_bytes)
    assert block.nbytes == num_bytes
    assert block.ctypes.data % 64 == 0
