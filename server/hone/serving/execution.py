"""One run of a model version: requests in, batch assembled, engine called, outputs handed back.

A single request reaches the engine as the views it came in as. A batch is written once into the thread's reused
buffers, and its outputs are handed back as views of the engine's own output arrays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hone.engines.cuda_runtime import CudaError
from hone.errors import DeviceLost, EngineError, HoneError, InputsDeclined, InternalError
from hone.serving.choice import chosen
from hone.serving.executor import ThreadState
from hone.serving.observation import Observation
from hone.serving.slot import Generation, RouteKey, Slot
from hone.types import BYTES, NUMPY_DTYPES, Array, InferRequest

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
        "choice",
        "engine",
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
        key: RouteKey,
        output_names: tuple[str, ...],
        future: ReplyFuture,
        choice: str = "",
    ) -> None:
        self.request = request
        self.arrays = arrays
        self.batch_size = batch_size
        """Rows of the batch this request fills; 1 where the model does not batch."""
        self.key = key
        """Requests with equal keys and choices may share a batch."""
        self.choice = choice
        """Of the engine, by the client; see `choice`."""
        self.output_names = output_names
        self.future = future
        self.cancelled = False
        self.timer: asyncio.TimerHandle | None = None
        self.queued_at_ns = time.monotonic_ns()
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        self.engine = ""
        """Kind of the engine that ran it."""


class BatchExecution:
    """One engine call for one or more pending requests. See `executor.Execution`.

    A batch that the engine refuses is run again request by request, so that one bad request does not spoil the others.
    `on_delivered` is called on the event loop after the results were handed out.
    """

    __slots__ = (
        "_executed",
        "_observation",
        "_on_delivered",
        "_outcomes",
        "_slot",
        "engine",
        "infer_ns",
        "input_ns",
        "num_rows",
        "on_loop",
        "output_ns",
        "pendings",
        "shape",
    )

    def __init__(
        self,
        slot: Slot,
        observation: Observation,
        pendings: Sequence[Pending],
        on_delivered: Callable[[BatchExecution], None],
    ) -> None:
        self._slot = slot
        self._observation = observation
        self.pendings = pendings
        self.shape = (pendings[0].key, sum([pending.batch_size for pending in pendings]))
        """Key and rows of the requests that it was made of."""
        self._on_delivered = on_delivered
        self._executed: Sequence[Pending] = ()
        self._outcomes: Sequence[dict[str, Array] | HoneError] = ()
        self.num_rows = 0
        """Rows that the engine ran; 0 when every request was cancelled before, or when it failed."""
        self.input_ns = self.infer_ns = self.output_ns = 0
        self.engine = ""
        """Kind of the engine that ran it; of several runs, the last."""
        self.on_loop = False
        """Whether the event loop's thread ran it."""

    def run(self, thread: ThreadState) -> None:
        started = time.monotonic_ns()
        self.on_loop = thread.is_loop
        live = self.pendings
        if any(pending.cancelled for pending in live):
            live = [pending for pending in live if not pending.cancelled]
            if not live:
                return
        for pending in live:
            pending.queue_ns = started - pending.queued_at_ns
        self._outcomes = self._outcomes_of(thread, live)
        self._executed = live

    def _outcomes_of(self, thread: ThreadState, live: Sequence[Pending]) -> Sequence[dict[str, Array] | HoneError]:
        try:
            return self._run(thread, live)
        except HoneError as problem:
            if len(live) == 1:
                return [problem]
        except Exception:
            _log.exception("execution failed outside the engine")
            return [InternalError("internal error")] * len(live)
        return [self._outcomes_of(thread, [pending])[0] for pending in live]

    def _run(self, thread: ThreadState, live: Sequence[Pending]) -> Sequence[dict[str, Array]]:
        first = live[0]
        if len(live) == 1:
            rows, names = first.batch_size, first.output_names
        else:
            rows = sum(pending.batch_size for pending in live)
            names = tuple(dict.fromkeys(name for pending in live for name in pending.output_names))
        generation = (
            chosen(self._slot, first.choice, first.request.model_name, first.key, rows, thread.device)
            if first.choice
            else self._slot.acquire(first.key, rows, thread.device)
        )
        failure: Exception | None = None
        try:
            if generation.number:
                try:
                    return self._run_on(generation, thread, live, rows, names)
                except InputsDeclined:
                    self._observation.declined(generation.number)
                except DeviceLost:
                    # Nothing is held against the generation; whoever looks after devices takes it out of service.
                    self.input_ns = self.infer_ns = self.output_ns = self.num_rows = 0
                except Exception as problem:  # whatever it is: the baseline answers, and the generation is told of
                    if isinstance(problem, CudaError) and problem.is_poisoning:
                        # At once: where the baseline was on that GPU too, its answer may take a while.
                        self._observation.failed(generation.number, problem)
                    else:
                        failure = problem
                    self.input_ns = self.infer_ns = self.output_ns = self.num_rows = 0
            baseline = self._slot.baseline
            results = self._run_on(baseline, thread, live, rows, names)
        finally:
            generation.release()
        if failure is not None:
            self._observation.failed(generation.number, failure)
        return results

    def _run_on(
        self, generation: Generation, thread: ThreadState, live: Sequence[Pending], rows: int, names: tuple[str, ...]
    ) -> Sequence[dict[str, Array]]:
        """Run on a generation, whose batch may be larger. The caller holds a lease, on it or on the model."""
        started = time.monotonic_ns()
        taken = generation.rows or rows
        alone = len(live) == 1 and taken == rows
        inputs = live[0].arrays if alone else _assemble(live, thread, rows, taken)
        assembled = time.monotonic_ns() if not alone else started
        if generation.mark:
            thread.note(generation.mark)
            try:
                found = generation.instance().run(inputs, names)
            finally:
                thread.note(0)
        else:
            found = generation.instance().run(inputs, names)
        outputs = dict(zip(names, found, strict=True))
        ran = time.monotonic_ns()
        results = [outputs] if alone else _split(outputs, live, taken)
        ended = time.monotonic_ns() if not alone else ran
        input_ns, infer_ns, output_ns = assembled - started, ran - assembled, ended - ran
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns
        self.num_rows += rows
        kind = self.engine = generation.engine.kind
        for pending in live:
            pending.input_ns, pending.infer_ns, pending.output_ns = input_ns, infer_ns, output_ns
            pending.engine = kind
        self._observation.ran(live[0].key, rows, infer_ns)
        self._observation.sample(generation.number, None if alone else rows, inputs, outputs)
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


def _assemble(pendings: Sequence[Pending], thread: ThreadState, rows: int, taken: int) -> dict[str, Array]:
    """Concatenate along the batch axis, each item written once; up to `taken` rows the last one is repeated."""
    assembled = {}
    for name, first in pendings[0].arrays.items():
        shape = (taken, *first.shape[1:])
        if first.dtype == NUMPY_DTYPES[BYTES]:
            batch: Array = np.empty(shape, dtype=np.object_)
        else:
            num_bytes = math.prod(shape) * first.dtype.itemsize
            batch = thread.buffers.get(name, num_bytes).view(first.dtype).reshape(shape)
        start = 0
        for pending in pendings:
            stop = start + pending.batch_size
            batch[start:stop] = pending.arrays[name]
            start = stop
        if rows < taken:
            batch[rows:] = batch[rows - 1]
        assembled[name] = batch
    return assembled


def _split(outputs: dict[str, Array], pendings: Sequence[Pending], rows: int) -> list[dict[str, Array]]:
    """Give each request its rows of each output it asked for, of a batch of `rows`."""
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
