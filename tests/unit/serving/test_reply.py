"""The awaitable of the request path behaves as a future does for its one waiter."""

from __future__ import annotations

import asyncio

import pytest

from hone.errors import InternalError
from hone.serving.reply import Reply


async def waiting(reply: Reply) -> asyncio.Task:
    task = asyncio.create_task(wait(reply))
    await asyncio.sleep(0)
    return task


async def wait(reply: Reply):
    return await reply


def soon(call, *args):
    asyncio.get_running_loop().call_soon(call, *args)


async def test_the_waiter_is_resumed_within_the_call_that_sets_the_result():
    reply = Reply(asyncio.get_running_loop())
    seen = []

    async def waiter():
        seen.append(await reply)

    task = asyncio.create_task(waiter())
    await asyncio.sleep(0)

    def answer():
        reply.set_result({"a": 1})
        seen.append("after")

    soon(answer)
    await task
    assert seen == [{"a": 1}, "after"]


async def test_errors_are_raised_at_the_waiter():
    reply = Reply(asyncio.get_running_loop())
    task = await waiting(reply)
    soon(reply.set_exception, InternalError("no"))
    with pytest.raises(InternalError, match="no"):
        await task
    assert reply.done()


async def test_a_result_that_comes_first_needs_no_waiting():
    reply = Reply(asyncio.get_running_loop())
    reply.set_result({"a": 1})
    assert await reply == {"a": 1}
    failed = Reply(asyncio.get_running_loop())
    failed.set_exception(InternalError("early"))
    with pytest.raises(InternalError, match="early"):
        await failed


async def test_cancelling_the_task_cancels_the_reply_and_later_results_are_dropped():
    reply = Reply(asyncio.get_running_loop())
    task = await waiting(reply)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reply.done()
    assert reply.cancelled()
    assert not reply.cancel()


async def test_it_works_under_wait_for_and_gather():
    reply = Reply(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(reply), 0.01)
    assert reply.done()
    replies = [Reply(asyncio.get_running_loop()) for _ in range(3)]
    for number, one in enumerate(replies):
        soon(one.set_result, {"n": number})
    assert await asyncio.gather(*(wait(one) for one in replies)) == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_context_variables_of_the_waiter_hold_when_it_is_resumed():
    import contextvars

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    reply = Reply(asyncio.get_running_loop())

    async def waiter():
        variable.set("mine")
        await reply
        return variable.get()

    task = asyncio.create_task(waiter())
    await asyncio.sleep(0)
    soon(reply.set_result, {})
    assert await task == "mine"
