"""The awaitable on which a request waits for its outputs.

An asyncio.Future wakes its waiter in the next iteration of the loop, which costs a poll of all sockets: as much as a
small inference. A `Reply` resumes its one waiter at once, from within the callback that sets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

from hone.types import Array


class Reply:
    """Future for one waiter. `set_result` and `set_exception` are called from callbacks of the loop, not from tasks.

    It speaks asyncio's protocol for awaitables that are not futures (`_asyncio_future_blocking`, as asyncio's own
    documentation of Task and Future has it), so `await` and cancelling the waiting task work as with a Future.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_done", "_exception", "_loop", "_result")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self._done = False
        self._result: dict[str, Array] | None = None
        self._exception: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: dict[str, Array]) -> None:
        self._result = result
        self._finish()

    def set_exception(self, exception: BaseException) -> None:
        self._exception = exception
        self._finish()

    def cancel(self, msg: Any = None) -> bool:
        """Called by the waiting task's `cancel`: the waiter is resumed in the loop's next iteration."""
        if self._done:
            return False
        self._done = True
        self._exception = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        if self._callback is not None:
            self._loop.call_soon(self._callback, self, context=self._context)
        return True

    def cancelled(self) -> bool:
        return isinstance(self._exception, asyncio.CancelledError)

    def result(self) -> dict[str, Array]:
        if self._exception is not None:
            raise self._exception
        assert self._result is not None
        return self._result

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        if self._done:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callback, self._context = callback, context

    def __await__(self) -> Generator[Any, None, dict[str, Array]]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def _finish(self) -> None:
        self._done = True
        if self._callback is None:
            return
        if self._context is None:
            self._callback(self)
        else:
            self._context.run(self._callback, self)
