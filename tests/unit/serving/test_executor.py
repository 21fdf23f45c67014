"""Executor threads: started at first use, never more than the instances, ended when idle or closed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hone.serving.executor import DeviceExecutor, aligned_empty


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


async def test_no_thread_before_the_first_use_and_none_beyond_the_instances():
    executor = DeviceExecutor("m", 2, asyncio.get_running_loop())
    assert len(executor._threads) == 0
    works = [Work() for _ in range(5)]
    for number, work in enumerate(works, start=1):
        executor.submit(work)
        assert len(executor._threads) == min(number, 2)
    for work in works:
        work.gate.set()
    here = threading.get_ident()
    assert [await work.delivered for work in works] == [here] * 5
    assert here not in {work.thread for work in works}
    await executor.close()


async def test_idle_threads_end_and_come_back():
    executor = DeviceExecutor("m", 1, asyncio.get_running_loop(), idle_seconds=0.01)
    for _ in range(3):
        work = Work()
        work.gate.set()
        executor.submit(work)
        await work.delivered
        while executor._threads:
            await asyncio.sleep(0.005)
    await executor.close()


async def test_closing_finishes_what_was_submitted_and_refuses_more():
    executor = DeviceExecutor("m", 1, asyncio.get_running_loop())
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


async def test_a_fault_in_an_execution_does_not_end_the_thread(caplog):
    executor = DeviceExecutor("m", 1, asyncio.get_running_loop())
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
