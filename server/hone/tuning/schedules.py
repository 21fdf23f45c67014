"""Schedules for the heaviest functions that no template takes, searched with MetaSchedule. In the child only.

What was found, and that nothing was, is kept as a decision under the function's own digest; MetaSchedule's database
is not used. A search that time, memory or room ended is kept as far as it came, and the next job goes on from there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.compiler.metaschedule import (
    Progress,
    RemainingFunction,
    SearchResult,
    remaining_functions,
    search_schedule,
)
from hone.compiler.phases.schedule import SEARCHED, ScheduledFunction
from hone.compiler.target import CpuTarget
from hone.kernels import DecisionKey, DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources, toolchain_of
from hone.tuning.decisions import SCHEDULE_FILE, nanoseconds_of, read_decision
from hone.tuning.jobs import SCHEDULING_STAGE
from hone.tuning.search import SearchCounts

_MIN_SHARE = 0.05


Tell = Callable[[int, float, float], None]
"""Hears of trials done, best and plain microseconds."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a function: a trace that is faster than the plain schedule, and whether that is the last word."""

    trace: str | None = None
    is_complete: bool = False
    progress: Progress = field(default_factory=Progress)
    is_kept: bool = True


class FunctionSearch:
    """Decides functions for one device; which those are and how one is searched is the device's own (see below)."""

    max_function_seconds = 30.0
    min_function_seconds = 5.0
    #: Functions below this, of one inference together, are not worth a search: their plain schedule is close to
    #: memory's speed, or they are too short to matter.
    min_microseconds = 300.0

    def __init__(self, cache: KernelsCache, device: DeviceKey, sources: Sources, told: Mapping[str, Any]) -> None:
        """`told`: what the decision depends on besides the function and the device."""
        self._cache = cache
        self._device = device
        self._sources = sources
        self._told = dict(told)

    def find(self, model: Any) -> list[RemainingFunction]:
        """What templates leave of a model, the heaviest first."""
        raise NotImplementedError

    def search(self, function: RemainingFunction, seconds: float, tell: Tell, known: Progress) -> SearchResult | None:
        """On from what is known. None where it cannot be tried now, which says nothing of the function."""
        raise NotImplementedError

    def decide(
        self, model: Any, seconds: float, counts: SearchCounts, tell: Callable[[float, str], None]
    ) -> dict[str, str]:
        """Traces by the function's digest, of those where one is better than the plain schedule. Functions left when
        the time is up keep what they have, and are searched on another time."""
        deadline = time.monotonic() + seconds
        heavy = self._heavy(self.find(model))
        found: dict[str, str] = {}
        for i, function in enumerate(heavy):
            known = self._recall(function)
            trace = known.trace
            left = min(self.max_function_seconds, (deadline - time.monotonic()) / (len(heavy) - i))
            if known.is_complete:
                counts.num_remembered += 1
            elif left >= self.min_function_seconds:
                trace = self._search(function, known, left, counts, lambda text, i=i: tell(i / len(heavy), text))  # type: ignore[misc]
            if trace is not None:
                found[function.digest] = trace
        return found

    def recall(self, model: Any) -> dict[str, str]:
        """What is decided, by the function's digest; nothing is searched."""
        known = {function.digest: self._recall(function).trace for function in self._heavy(self.find(model))}
        return {digest: trace for digest, trace in known.items() if trace is not None}

    def nanoseconds(self, function: ScheduledFunction) -> float | None:
        """What a call takes as it is scheduled, where a search has measured it."""
        told = read_decision(self._cache, self._key(function.digest), SCHEDULE_FILE)
        return None if told is None else nanoseconds_of(told, searched=function.rule == SEARCHED)

    def _search(
        self,
        function: RemainingFunction,
        known: _Known,
        seconds: float,
        counts: SearchCounts,
        tell: Callable[[str], None],
    ) -> str | None:
        began = time.monotonic()
        tell(f"{SCHEDULING_STAGE} of {function.name}")

        def told(num_trials: int, best_us: float, plain_us: float) -> None:
            tell(f"{SCHEDULING_STAGE} of {function.name}: {num_trials} tried, best {best_us:.1f} of {plain_us:.1f} us")

        result = self.search(function, seconds, told, known.progress)
        if result is None:
            return known.trace
        if result.num_trials == 0 and not result.is_complete and (known.is_kept or not math.isfinite(result.plain_us)):
            return known.trace  # nothing new, not even what the plain schedule takes
        counts.num_built += result.num_trials
        counts.num_measured += result.num_trials - result.num_failed
        counts.num_failed += result.num_failed
        counts.measure_seconds += time.monotonic() - began
        self._keep(function, result)
        return result.trace

    def _recall(self, function: RemainingFunction) -> _Known:
        told = read_decision(self._cache, self._key(function.digest), SCHEDULE_FILE)
        if told is None:
            return _Known(is_kept=False)
        try:
            trace, is_complete = told["trace"], bool(told["complete"])
            records = tuple((str(one["trace"]), float(one["us"])) for one in told["records"])
            progress = Progress(int(told["num_trials"]), int(told["num_no_better"]), records)
        except (ValueError, KeyError, TypeError):
            return _Known(is_kept=False)  # not understood: searched again
        return _Known(trace if isinstance(trace, str) else None, is_complete, progress)

    def _keep(self, function: RemainingFunction, result: SearchResult) -> None:
        key, progress = self._key(function.digest), result.progress
        # Nobody goes on from what is complete.
        records = () if result.is_complete else progress.records
        told = {
            "function": function.name,
            "trace": result.trace,
            "plain_us": result.plain_us if math.isfinite(result.plain_us) else None,
            "best_us": result.best_us if math.isfinite(result.best_us) else None,
            "complete": result.is_complete,
            "num_trials": progress.num_trials,
            "num_no_better": progress.num_no_better,
            "records": [{"trace": trace, "us": us} for trace, us in records],
            "reason": result.reason,
        }
        data = json.dumps(told, indent=2).encode()
        # An unfinished one gives way to what came after.
        self._cache.publish(
            "decisions", key.digest, self._device.digest, {SCHEDULE_FILE: data}, {"key": key.fields}, replace=True
        )

    def _key(self, digest: str) -> DecisionKey:
        return DecisionKey(
            workload={"function": digest, **self._told},
            templates_sha256=self._sources.pipeline_sha256,
            precision="f32",
            device=self._device.digest,
            toolchain=toolchain_of(self._device),
        )

    def _heavy(self, functions: Sequence[RemainingFunction]) -> list[RemainingFunction]:
        """Those that one inference spends a fair share of its time on, the heaviest first; each digest once."""
        total = sum(function.microseconds * function.num_calls for function in functions)
        unique = {function.digest: function for function in functions}.values()
        least = max(self.min_microseconds, _MIN_SHARE * total)
        return [function for function in unique if function.microseconds * function.num_calls >= least]


class ScheduleSearch(FunctionSearch):
    """On the CPU."""

    def __init__(self, cache: KernelsCache, device: DeviceKey, target: CpuTarget, sources: Sources) -> None:
        super().__init__(cache, device, sources, {"threads": target.num_threads})
        self._target = target

    def find(self, model: Any) -> list[RemainingFunction]:
        return remaining_functions(model, self._target)

    def search(self, function: RemainingFunction, seconds: float, tell: Tell, known: Progress) -> SearchResult:
        return search_schedule(function, self._target, seconds, tell=tell, known=known)
