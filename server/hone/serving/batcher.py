"""Schedulers: what stands between a validated request and the executor.

`DirectScheduler` runs every request by itself, in order. `DynamicBatcher` does what Triton's `dynamic_batching` says:
preferred sizes, queue delay, priority levels, queue policies. Sequence batching and ensembles will be further
implementations of `Scheduler`. Everything here runs on the event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from hone.errors import InvalidRequest, QueueFull, QueueTimeout
from hone.metrics import ModelStatistics
from hone.protos import config_pb
from hone.serving.brief import BriefExecutions
from hone.serving.execution import BatchExecution, Pending
from hone.serving.executor import DeviceExecutor, ThreadState
from hone.serving.observation import Observation
from hone.serving.slot import Slot


class Scheduler(Protocol):
    def submit(self, pending: Pending) -> None:
        """Queue the request; its future gets the outputs. Raises QueueFull, InvalidRequest."""

    def cancel(self, pending: Pending) -> None:
        """Forget a request whose client has gone: at once if it waits, else its results are dropped."""


class DirectScheduler:
    """Each request is an execution; the executor's own queue is the only one."""

    def __init__(
        self,
        slot: Slot,
        observation: Observation,
        executor: DeviceExecutor,
        statistics: ModelStatistics,
        brief: BriefExecutions | None = None,
    ) -> None:
        """Without `brief` every execution is handed to a thread."""
        self._slot = slot
        self._observation = observation
        self._executor = executor
        self._statistics = statistics
        self._brief = brief
        self._num_outstanding = 0

    def submit(self, pending: Pending) -> None:
        self._num_outstanding += 1
        if self._num_outstanding > self._executor.num_instances:
            self._statistics.num_pending += 1
        execution = BatchExecution(self._slot, self._observation, (pending,), self._delivered)
        self._executor.submit(execution, is_brief=_is_brief(execution, self._brief))

    def cancel(self, pending: Pending) -> None:
        pending.cancelled = True

    def _delivered(self, execution: BatchExecution) -> None:
        if self._num_outstanding > self._executor.num_instances:
            self._statistics.num_pending -= 1
        self._num_outstanding -= 1
        _note(execution, self._statistics, self._brief)


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Triton's ModelQueuePolicy: times in nanoseconds, 0 for none."""

    delay_on_timeout: bool = False
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    @classmethod
    def from_proto(cls, policy: config_pb.ModelQueuePolicy) -> QueuePolicy:
        return cls(
            delay_on_timeout=policy.timeout_action == config_pb.ModelQueuePolicy.DELAY,
            default_timeout_ns=policy.default_timeout_microseconds * 1000,
            allow_timeout_override=policy.allow_timeout_override,
            max_queue_size=policy.max_queue_size,
        )

    def timeout_ns(self, asked_us: int) -> int:
        """A request may shorten the default timeout, and set one where there is no default."""
        if self.allow_timeout_override and asked_us > 0:
            asked = asked_us * 1000
            return min(asked, self.default_timeout_ns) if self.default_timeout_ns else asked
        return self.default_timeout_ns


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The `dynamic_batching` of a configuration. `preferred` is sorted; level 0 is where priorities are not used."""

    max_batch_size: int
    preferred: tuple[int, ...]
    max_delay_ns: int
    preserve_ordering: bool
    default_level: int
    queues: dict[int, QueuePolicy]

    @classmethod
    def from_config(cls, config: config_pb.ModelConfig) -> BatchPolicy:
        batching = config.dynamic_batching
        levels = range(1, batching.priority_levels + 1) if batching.priority_levels else range(1)
        default = QueuePolicy.from_proto(batching.default_queue_policy)
        return cls(
            max_batch_size=max(1, config.max_batch_size),
            preferred=tuple(sorted(batching.preferred_batch_size)),
            max_delay_ns=batching.max_queue_delay_microseconds * 1000,
            preserve_ordering=batching.preserve_ordering,
            default_level=batching.default_priority_level if batching.priority_levels else 0,
            queues={
                level: QueuePolicy.from_proto(batching.priority_queue_policy[level])
                if level in batching.priority_queue_policy
                else default
                for level in levels
            },
        )


class _Level:
    """The queue of one priority level: requests in time, then those past it under the DELAY action."""

    __slots__ = ("delayed", "policy", "waiting")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: OrderedDict[Pending, None] = OrderedDict()
        self.delayed: OrderedDict[Pending, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class DynamicBatcher:
    """Forms batches when an instance is free, from the most urgent level down, oldest first."""

    def __init__(
        self,
        model: str,
        policy: BatchPolicy,
        slot: Slot,
        observation: Observation,
        executor: DeviceExecutor,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        brief: BriefExecutions | None = None,
    ) -> None:
        """Without `brief` every execution is handed to a thread."""
        self._model = model
        self._policy = policy
        self._slot = slot
        self._observation = observation
        self._executor = executor
        self._statistics = statistics
        self._loop = loop
        self._brief = brief
        self._levels = {level: _Level(queue) for level, queue in sorted(policy.queues.items())}
        self._num_free = executor.num_instances
        self._delay_timer: asyncio.TimerHandle | None = None
        self._dispatch_pending = False
        self._in_order: deque[BatchExecution] = deque()
        self._ended: set[BatchExecution] = set()

    def submit(self, pending: Pending) -> None:
        level = self._level(pending.request.priority)
        queue = level.policy
        if queue.max_queue_size and len(level) >= queue.max_queue_size:
            raise QueueFull(self._model)
        timeout_ns = queue.timeout_ns(pending.request.timeout_us)
        if timeout_ns:
            pending.timer = self._loop.call_later(timeout_ns / 1e9, self._expire, level, pending)
        level.waiting[pending] = None
        self._statistics.num_pending += 1
        self._dispatch_soon()

    def cancel(self, pending: Pending) -> None:
        pending.cancelled = True
        for level in self._levels.values():
            if self._take(level, pending):
                return

    def _level(self, priority: int) -> _Level:
        number = priority or self._policy.default_level
        level = self._levels.get(number)
        if level is None:
            if len(self._levels) == 1 and 0 in self._levels:
                return self._levels[0]  # the model has no priorities: as in Triton, they are ignored
            raise InvalidRequest(
                f"request priority {priority} for model '{self._model}' is not one of its levels"
                f" 1 to {len(self._levels)}"
            )
        return level

    def _take(self, level: _Level, pending: Pending) -> bool:
        for queue in (level.waiting, level.delayed):
            if pending in queue:
                del queue[pending]
                if pending.timer is not None:
                    pending.timer.cancel()
                self._statistics.num_pending -= 1
                return True
        return False

    def _expire(self, level: _Level, pending: Pending) -> None:
        if pending not in level.waiting:
            return
        if level.policy.delay_on_timeout:
            del level.waiting[pending]
            level.delayed[pending] = None
        elif self._take(level, pending) and not pending.future.done():
            pending.future.set_exception(QueueTimeout(self._model))

    def _dispatch_soon(self) -> None:
        """Form batches once the loop has handled what it has already received: requests that came together stay so."""
        if self._num_free and not self._dispatch_pending:
            self._dispatch_pending = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_pending = False
        while self._num_free:
            batch = self._next_batch()
            if not batch:
                return
            execution = BatchExecution(self._slot, self._observation, batch, self._delivered)
            if self._policy.preserve_ordering:
                self._in_order.append(execution)
            self._num_free -= 1
            self._executor.submit(
                _Ordered(execution, self) if self._policy.preserve_ordering else execution,
                is_brief=_is_brief(execution, self._brief),
            )

    def _next_batch(self) -> list[Pending]:
        """The requests of the next batch, taken off their queues; empty when there is none yet."""
        candidates, ends = self._candidates()
        if not candidates:
            return []
        totals = []
        rows = 0
        for pending in candidates:
            rows += pending.batch_size
            totals.append(rows)
        preferred = [size for size in self._policy.preferred if size in totals]
        largest = self._policy.preferred[-1] if self._policy.preferred else self._policy.max_batch_size
        if preferred and (ends or preferred[-1] == largest or self._policy.max_delay_ns == 0):
            candidates = candidates[: totals.index(preferred[-1]) + 1]
        elif not ends and rows < largest and not self._delay_is_over(candidates):
            return []
        elif preferred:
            candidates = candidates[: totals.index(preferred[-1]) + 1]
        for pending in candidates:
            for level in self._levels.values():
                if self._take(level, pending):
                    break
        return candidates

    def _candidates(self) -> tuple[list[Pending], bool]:
        """The longest run of queued requests that fit one batch, and whether waiting cannot make it longer."""
        chosen: list[Pending] = []
        rows = 0
        queues = [level.waiting for level in self._levels.values()] + [level.delayed for level in self._levels.values()]
        for queue in queues:
            for pending in queue:
                if chosen and (
                    pending.key != chosen[0].key
                    or pending.choice != chosen[0].choice
                    or rows + pending.batch_size > self._policy.max_batch_size
                ):
                    return chosen, True
                chosen.append(pending)
                rows += pending.batch_size
                if rows >= self._policy.max_batch_size:
                    return chosen, True
        return chosen, False

    def _delay_is_over(self, candidates: list[Pending]) -> bool:
        """Whether the batch must go now; if not, a timer is set for when it must."""
        if self._policy.max_delay_ns == 0:
            return True
        oldest_ns = min(pending.queued_at_ns for pending in candidates)
        left_ns = oldest_ns + self._policy.max_delay_ns - time.monotonic_ns()
        if left_ns <= 0:
            return True
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        self._delay_timer = self._loop.call_later(left_ns / 1e9, self._dispatch_soon)
        return False

    def _delivered(self, execution: BatchExecution) -> None:
        _note(execution, self._statistics, self._brief)
        if not self._policy.preserve_ordering:
            self.instance_freed()

    def instance_freed(self) -> None:
        self._num_free += 1
        self._dispatch_soon()

    def ended(self, execution: BatchExecution) -> None:
        """Deliver in the order of dispatch: what ended early waits for what went before it."""
        self._ended.add(execution)
        while self._in_order and self._in_order[0] in self._ended:
            first = self._in_order.popleft()
            self._ended.discard(first)
            first.deliver()


class _Ordered:
    """An execution whose delivery waits its turn."""

    __slots__ = ("_batcher", "_execution")

    def __init__(self, execution: BatchExecution, batcher: DynamicBatcher) -> None:
        self._execution = execution
        self._batcher = batcher

    def run(self, thread: ThreadState) -> None:
        self._execution.run(thread)

    def deliver(self) -> None:
        self._batcher.instance_freed()
        self._batcher.ended(self._execution)


def _is_brief(execution: BatchExecution, brief: BriefExecutions | None) -> bool:
    """Clients that choose the engine are not the ones that the averages are of."""
    return brief is not None and not execution.pendings[0].choice and execution.shape in brief


def _note(execution: BatchExecution, statistics: ModelStatistics, brief: BriefExecutions | None) -> None:
    if not execution.num_rows:
        return
    statistics.record_execution(
        execution.num_rows, execution.input_ns, execution.infer_ns, execution.output_ns, execution.engine
    )
    if brief is not None and execution.num_rows == execution.shape[1] and not execution.pendings[0].choice:
        brief.learn(execution.shape, execution.infer_ns, on_loop=execution.on_loop)
