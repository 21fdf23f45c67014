"""One run of a model version: requests in, batch assembled, engine called, outputs handed back.

A single request reaches the engine as the views it came in as. A batch is written once into the thread's reused
buffers, and its outputs are handed back as views of the engine's own output arrays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hone.errors import EngineError, HoneError, InternalError
from hone.serving.executor import ThreadState
from hone.serving.slot import Slot
from hone.types import BYTES, NUMPY_DTYPES, Array, EngineInstance, InferRequest

_log = logging.getLogger(__name__)


class ReplyFuture(Protocol):
    """Where the outputs of a request, or its error, are put; on the event loop."""

    def done(self) -> bool: ...

    def set_result(self, result: dict[str, Array], /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


class Pending:
    """A validated request on its way through queue and engine. Times are `time.monotonic_ns()`."""

    __slots__ = (
        "arrays",
        "batch_size",
        "cancelled",
        "future",
        "infer_ns",
        "input_ns",
        "key",
        "output_names",
        "output_ns",
        "queue_ns",
        "queued_at_ns",
        "request",
        "timer",
    )

    def __init__(
        self,
        request: InferRequest,
        arrays: dict[str, Array],
        batch_size: int,
        key: object,
        output_names: tuple[str, ...],
        future: ReplyFuture,
    ) -> None:
        self.request = request
        self.arrays = arrays
        self.batch_size = batch_size
        """Rows of the batch this request fills; 1 where the model does not batch."""
        self.key = key
        """Requests with equal keys may share a batch."""
        self.output_names = output_names
        self.future = future
        self.cancelled = False
        self.timer: asyncio.TimerHandle | None = None
        self.queued_at_ns = time.monotonic_ns()
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0


class BatchExecution:
    """One engine call for one or more pending requests. See `executor.Execution`.

    A batch that the engine refuses is run again request by request, so that one bad request does not spoil the others.
    `on_delivered` is called on the event loop after the results were handed out.
    """

    __slots__ = (
        "_executed",
        "_on_delivered",
        "_outcomes",
        "_slot",
        "infer_ns",
        "input_ns",
        "num_rows",
        "output_ns",
        "pendings",
    )

    def __init__(self, slot: Slot, pendings: Sequence[Pending], on_delivered: Callable[[BatchExecution], None]) -> None:
        self._slot = slot
        self.pendings = pendings
        self._on_delivered = on_delivered
        self._executed: Sequence[Pending] = ()
        self._outcomes: Sequence[dict[str, Array] | HoneError] = ()
        self.num_rows = 0
        """Rows that the engine ran; 0 when every request was cancelled before, or when it failed."""
        self.input_ns = self.infer_ns = self.output_ns = 0

    def run(self, thread: ThreadState) -> None:
        started = time.monotonic_ns()
        live = self.pendings
        if any(pending.cancelled for pending in live):
            live = [pending for pending in live if not pending.cancelled]
            if not live:
                return
        for pending in live:
            pending.queue_ns = started - pending.queued_at_ns
        generation = self._slot.acquire()
        try:
            instance = thread.instance(generation.engine)
            run = self._run_one if len(live) == 1 else self._run_batch
            self._outcomes = run(thread, instance, live, started)
        finally:
            generation.release()
        self._executed = live

    def _run_one(
        self, thread: ThreadState, instance: EngineInstance, live: Sequence[Pending], started: int
    ) -> Sequence[dict[str, Array] | HoneError]:
        (pending,) = live
        try:
            outputs = instance.run(pending.arrays, pending.output_names)
        except HoneError as problem:
            return [problem]
        except Exception:
            return [_internal_error()]
        pending.infer_ns = time.monotonic_ns() - started
        self.infer_ns += pending.infer_ns
        self.num_rows += pending.batch_size
        return [dict(zip(pending.output_names, outputs, strict=True))]

    def _run_batch(
        self, thread: ThreadState, instance: EngineInstance, live: Sequence[Pending], started: int
    ) -> Sequence[dict[str, Array] | HoneError]:
        names = tuple(dict.fromkeys(name for pending in live for name in pending.output_names))
        try:
            inputs = _assemble(live, thread)
            assembled = time.monotonic_ns()
            outputs = dict(zip(names, instance.run(inputs, names), strict=True))
            ran = time.monotonic_ns()
            results = _split(outputs, live)
        except HoneError:
            return [self._run_one(thread, instance, [pending], time.monotonic_ns())[0] for pending in live]
        except Exception:
            return [_internal_error()] * len(live)
        self.input_ns, self.infer_ns, self.output_ns = assembled - started, ran - assembled, time.monotonic_ns() - ran
        for pending in live:
            pending.input_ns, pending.infer_ns, pending.output_ns = self.input_ns, self.infer_ns, self.output_ns
            self.num_rows += pending.batch_size
        return results

    def deliver(self) -> None:
        for pending, outcome in zip(self._executed, self._outcomes, strict=True):
            if pending.future.done():  # cancelled meanwhile
                continue
            if isinstance(outcome, HoneError):
                pending.future.set_exception(outcome)
            else:
                pending.future.set_result(outcome)
        if not self._executed:
            for pending in self.pendings:  # all cancelled, or `run` broke its contract
                if not pending.future.done():
                    pending.future.set_exception(InternalError("internal error"))
        self._on_delivered(self)


def _internal_error() -> InternalError:
    """For faults of hone itself, from within the handler that caught one: the client learns nothing of the inside."""
    _log.exception("execution failed outside the engine")
    return InternalError("internal error")


def _assemble(pendings: Sequence[Pending], thread: ThreadState) -> dict[str, Array]:
    """Concatenate along the batch axis, each item written once."""
    assembled = {}
    for name, first in pendings[0].arrays.items():
        rows = sum(pending.batch_size for pending in pendings)
        shape = (rows, *first.shape[1:])
        if first.dtype == NUMPY_DTYPES[BYTES]:
            batch: Array = np.empty(shape, dtype=np.object_)
        else:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * first.dtype.itemsize
            batch = thread.buffers.get(name, num_bytes).view(first.dtype).reshape(shape)
        start = 0
        for pending in pendings:
            stop = start + pending.batch_size
            batch[start:stop] = pending.arrays[name]
            start = stop
        assembled[name] = batch
    return assembled


def _split(outputs: dict[str, Array], pendings: Sequence[Pending]) -> list[dict[str, Array]]:
    """Give each request its rows of each output it asked for."""
    rows = sum(pending.batch_size for pending in pendings)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise EngineError(
                f"output '{name}' has shape {list(array.shape)} for a batch of {rows}: its first dimension is not the"
                f" batch; set max_batch_size to 0 for this model"
            )
    results = []
    start = 0
    for pending in pendings:
        stop = start + pending.batch_size
        results.append({name: outputs[name][start:stop] for name in pending.output_names})
        start = stop
    return results
