"""Instances against threads: one execution on all threads, or as many side by side as there are threads.

The first answers a request soonest; the second often answers more of them in a second, since nothing is shared out
within an operator. Which is better, and by how much, is measured for every specialization that passed; the model's
`objective` says which counts, and `instance_group { count: N }` is how its owner asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.errors import HoneError
from hone.types import Array, EngineInstance

#: Seconds that each plan runs, and how often they take turns.
_SECONDS = 0.25
_NUM_TURNS = 3

InstancesOf = Callable[[int], EngineInstance]
"""A new instance that so many threads run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is run, and what that gave: the median seconds of an execution, and rows (executions, where a model
    does not batch) a second of all instances together."""

    num_instances: int
    num_threads: int
    seconds: float
    rows_per_second: float

    def to_json(self) -> dict[str, Any]:
        return {
            "instances": self.num_instances,
            "threads": self.num_threads,
            "ms": self.seconds * 1e3,
            "rows_per_second": self.rows_per_second,
        }


def measure_plans(
    instances_of: InstancesOf, inputs: Sequence[Mapping[str, Array]], outputs: Sequence[str], rows: int, threads: int
) -> tuple[Plan, ...]:
    """Both ends of what `threads` threads can do, in turns; nothing where there is only one. Raises HoneError."""
    if threads < 2:
        return ()
    ends = [(1, threads), (threads, 1)]
    took: dict[tuple[int, int], list[list[float]]] = {end: [] for end in ends}
    rates: dict[tuple[int, int], list[float]] = {end: [] for end in ends}
    for _ in range(_NUM_TURNS):
        for end in ends:
            seconds, elapsed = _run(instances_of, inputs, outputs, *end)
            took[end].append(seconds)
            rates[end].append(len(seconds) * max(rows, 1) / elapsed)
    return tuple(Plan(*end, _median([one for turn in took[end] for one in turn]), _median(rates[end])) for end in ends)


def better(plans: Sequence[Plan], objective: str) -> Plan | None:
    """The plan that serves the objective, "latency" or "throughput"; None where nothing was measured."""
    if not plans:
        return None
    if objective == "throughput":
        return max(plans, key=lambda plan: plan.rows_per_second)
    return min(plans, key=lambda plan: plan.seconds)


def _run(
    instances_of: InstancesOf,
    inputs: Sequence[Mapping[str, Array]],
    outputs: Sequence[str],
    num_instances: int,
    num_threads: int,
) -> tuple[list[float], float]:
    """The seconds of every execution, and of all together."""
    took: list[list[float]] = [[] for _ in range(num_instances)]
    problems: list[HoneError] = []
    ready = threading.Barrier(num_instances + 1)

    def work(at: int) -> None:
        try:
            instance = instances_of(num_threads)
            instance.run(inputs[0], outputs)
        except HoneError as problem:
            problems.append(problem)
            ready.abort()
            return
        try:
            ready.wait()
        except threading.BrokenBarrierError:
            return
        end = time.perf_counter() + _SECONDS
        number = at
        try:
            while (began := time.perf_counter()) < end or not took[at]:
                instance.run(inputs[number % len(inputs)], outputs)
                took[at].append(time.perf_counter() - began)
                number += 1
        except HoneError as problem:
            problems.append(problem)

    # Threads of their own, also for one: a thread's pool of workers goes with it.
    workers = [threading.Thread(target=work, args=(at,), name=f"plan-{at}") for at in range(num_instances)]
    for worker in workers:
        worker.start()
    try:
        ready.wait()
        began = time.perf_counter()
    except threading.BrokenBarrierError:
        began = time.perf_counter()
    for worker in workers:
        worker.join()
    elapsed = time.perf_counter() - began
    if problems:
        raise problems[0]
    return [one for turn in took for one in turn], elapsed


def _median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
