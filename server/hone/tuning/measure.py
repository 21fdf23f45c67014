"""Baseline against candidate on a machine that does other things too.

What is compared is the ratio within a round: baseline and candidate run one after the other, on the same inputs, in
turns as to which goes first. A reference workload before and after tells rounds in which the machine itself changed
(clock, neighbours): those are dropped. Rounds in which serving did nothing are preferred; where hardly any of the first
few is, one waits for no more: the others count as well, by their ratios alone, and the comparison says that it is
provisional.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hone.tuning.activity import Activity
from hone.tuning.confidence import Median, median_of
from hone.types import Array

Inputs = Mapping[str, Array]
Call = Callable[[Inputs], object]
Clock = Callable[[], int]
"""Nanoseconds of a steady clock."""

NS = 1_000_000_000
_MAX_REPEATS = 10_000
#: A sample of many calls is that of its parts' median, so that what interrupts a few of them does not count.
_NUM_PARTS = 15
#: Calls that are enough for a sample, and the time that they must fill at least: the shorter a round is, the more of
#: them fit between requests.
_ENOUGH_CALLS, _MIN_SAMPLE_NS = 10 * _NUM_PARTS, 300_000


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of both subjects, in nanoseconds a call; the reference before and after in nanoseconds a run."""

    baseline_ns: float
    candidate_ns: float
    reference_ns: tuple[float, float]
    quiet: bool
    """Whether serving did nothing meanwhile."""


class Runner(Protocol):
    """Where the two subjects run: in this process, or on a machine at the other end of a network."""

    def round(self, number: int, patience_seconds: float) -> Round:
        """Run both once more, first waiting for serving to rest, `patience_seconds` at most. Raises HoneError."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a comparison is made. `looks` are the numbers of rounds after which it may end; `error` is the probability
    of a wrong verdict over all looks together (divided among them, by Bonferroni's inequality)."""

    looks: tuple[int, ...] = (10, 20, 40, 80)
    error: float = 0.01
    seconds: float = 30.0
    margin: float = 0.03
    """How much faster is faster: the baseline must take `1 + margin` times as long."""
    drift: float = 0.10
    """A round is dropped when its reference is off the usual by more than this share."""
    wait_seconds: float = 0.1
    """How long a round waits for requests in flight to end, at most."""
    min_quiet_share: float = 0.2
    """Waiting goes on only where this share of the rounds up to the first look was quiet."""

    def __post_init__(self) -> None:
        if not self.looks or list(self.looks) != sorted(set(self.looks)) or self.looks[0] < 1:
            raise ValueError(f"looks: expected rising numbers of rounds, found {self.looks!r}")

    @property
    def error_per_look(self) -> float:
        return self.error / len(self.looks)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it. Ratios are candidate over baseline, so below 1 is faster; times are nanoseconds a call."""

    baseline_ns: Median
    candidate_ns: Median
    ratio: Median
    num_rounds: int
    num_quiet: int
    num_dropped: int
    provisional: bool
    """Too few quiet rounds: to be measured again when serving rests."""

    @property
    def speedup(self) -> float:
        return 1.0 / self.ratio.value

    def is_faster(self, margin: float) -> bool:
        """Whether the candidate is faster by the margin, with the confidence of the plan."""
        return self.ratio.high * (1.0 + margin) <= 1.0

    def is_not_faster(self, margin: float) -> bool:
        """Whether it is certain, likewise, that it is not."""
        return self.ratio.low * (1.0 + margin) > 1.0

    def is_slower(self) -> bool:
        return self.ratio.low > 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline_ms": _in_ms(self.baseline_ns),
            "tuned_ms": _in_ms(self.candidate_ns),
            "speedup": self.speedup,
            "ratio": [_finite(self.ratio.low), self.ratio.value, _finite(self.ratio.high)],
            "num_rounds": self.num_rounds,
            "num_quiet": self.num_quiet,
            "num_dropped": self.num_dropped,
            "provisional": self.provisional,
        }


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """No comparison, and why."""

    reason: str


@dataclass(slots=True)
class Patience:
    """Whether waiting for quiet rounds pays, as one comparison learns it for the next."""

    waits: bool = True


def compare(
    runner: Runner,
    plan: Plan,
    *,
    patience: Patience | None = None,
    clock: Clock = time.monotonic_ns,
    tell: Callable[[float], None] = lambda share: None,
) -> Comparison:
    """Rounds until one of the looks is certain, or until the plan's rounds or seconds are used up.

    Whether only quiet rounds count is decided once, at the first look, by how many were quiet: never by what they
    measured, so the probability of a wrong verdict stays the plan's. At least the rounds of the first look are run,
    whatever the clock says. `tell` hears the share that is done. Raises what the runner raises.
    """
    patience = patience or Patience()
    started = clock()
    rounds: list[Round] = []
    looks = list(plan.looks)
    while True:
        rounds.append(runner.round(len(rounds), plan.wait_seconds if patience.waits else 0.0))
        elapsed = (clock() - started) / NS
        tell(min(1.0, max(elapsed / plan.seconds, len(rounds) / plan.looks[-1])))
        if len(rounds) == plan.looks[0]:
            patience.waits = sum(r.quiet for r in rounds) >= plan.min_quiet_share * len(rounds)
        if len(rounds) >= plan.looks[0] and not patience.waits:
            if len(rounds) >= looks[0]:
                looks.pop(0)
                found = _overlapped(rounds, plan)
                if found.is_faster(plan.margin) or found.is_not_faster(plan.margin) or not looks:
                    return found
            if elapsed >= plan.seconds:
                return _overlapped(rounds, plan)
            continue
        quiet, num_dropped = _steady([r for r in rounds if r.quiet], plan.drift)
        if looks and len(quiet) >= looks[0]:
            looks.pop(0)
            found = _comparison(quiet, num_dropped, plan, provisional=False)
            if found.is_faster(plan.margin) or found.is_not_faster(plan.margin) or not looks:
                return found
        if len(rounds) >= plan.looks[0] and (elapsed >= plan.seconds or _is_hopeless(rounds, len(quiet), plan)):
            break
    if len(quiet) >= plan.looks[0]:
        return _comparison(quiet, num_dropped, plan, provisional=False)
    return _overlapped(rounds, plan)


def _overlapped(rounds: Sequence[Round], plan: Plan) -> Comparison:
    """By all rounds, quiet or not: first those in which the machine was as usual, else all. Both subjects met the same
    disturbances, in turns, and the bounds are as wide as the ratios scatter."""
    steady, num_dropped = _steady(rounds, plan.drift)
    if len(steady) < plan.looks[0]:
        steady, num_dropped = list(rounds), 0
    return _comparison(steady, num_dropped, plan, provisional=True)


def _is_hopeless(rounds: Sequence[Round], num_kept: int, plan: Plan) -> bool:
    """Whether more rounds would be as disturbed as those so far, and not by serving."""
    most = plan.looks[-1]
    num_quiet = sum(r.quiet for r in rounds)
    return len(rounds) >= 2 * most or (num_quiet >= most and num_kept < plan.looks[0])


def _steady(rounds: Sequence[Round], drift: float) -> tuple[list[Round], int]:
    """The rounds in which the reference took its usual time, and how many others there were. The usual is the lower
    quartile: disturbances only ever make it longer."""
    if not rounds:
        return [], 0
    usual = float(np.quantile([ns for r in rounds for ns in r.reference_ns], 0.25))
    kept = [r for r in rounds if all(abs(ns - usual) <= drift * usual for ns in r.reference_ns)]
    return kept, len(rounds) - len(kept)


def _comparison(kept: Sequence[Round], num_dropped: int, plan: Plan, *, provisional: bool) -> Comparison:
    error = plan.error_per_look
    return Comparison(
        median_of([r.baseline_ns for r in kept], error),
        median_of([r.candidate_ns for r in kept], error),
        median_of([r.candidate_ns / r.baseline_ns for r in kept], error),
        num_rounds=len(kept),
        num_quiet=sum(r.quiet for r in kept),
        num_dropped=num_dropped,
        provisional=provisional,
    )


# --- on this machine


class Reference:
    """A fixed amount of work on as many threads as the subjects use: square roots of numbers that pass through the
    caches. Nothing but numpy's loops, which have no threads of their own, so that what it takes depends on the machine
    alone: one core taken by somebody else shows, as it does in what is measured."""

    def __init__(self, num_threads: int = 1) -> None:
        self._work = [_Work() for _ in range(num_threads)]
        self._others = ThreadPoolExecutor(num_threads - 1, "reference") if num_threads > 1 else None

    def __call__(self) -> None:
        # numpy gives the interpreter up inside its loops, so the threads do run side by side.
        others = [self._others.submit(work) for work in self._work[1:]] if self._others is not None else []
        self._work[0]()
        for other in others:
            other.result()


class _Work:
    def __init__(self) -> None:
        # Large enough that a loop runs for long between two turns with the interpreter lock.
        self._numbers = np.linspace(0.5, 1.0, 1 << 17, dtype=np.float64)
        self._result = np.empty_like(self._numbers)

    def __call__(self) -> None:
        for _ in range(4):
            np.sqrt(self._numbers, out=self._result)


@dataclass(slots=True)
class LocalRunner:
    """Both subjects as callables in this process, on input sets that rotate from call to call."""

    baseline: Call
    candidate: Call
    inputs: Sequence[Inputs]
    activity: Callable[[], Activity] = lambda: Activity(0, 0)
    reference: Callable[[], None] = field(default_factory=Reference)
    settle: Callable[[], None] = lambda: None
    """Called between subjects: waits until threads of the one before have stopped spinning."""
    clock: Clock = time.perf_counter_ns
    sleep: Callable[[float], None] = time.sleep
    sample_ns: int = 2_000_000
    """One sample is as many calls as fill this time, and at least one; of short calls, `_ENOUGH_CALLS` do."""
    _repeats: list[int] = field(default_factory=lambda: [0, 0])

    def round(self, number: int, patience_seconds: float) -> Round:
        self._wait_for_quiet(patience_seconds)
        before = self.activity()
        first = self._time_reference()
        times = [0.0, 0.0]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            self.settle()
            times[side] = self._sample(side, number)
        self.settle()
        last = self._time_reference()
        after = self.activity()
        quiet = before == after and before.num_in_flight == 0
        return Round(times[0], times[1], (first, last), quiet)

    def _sample(self, side: int, number: int) -> float:
        call = self.candidate if side else self.baseline
        started = self.clock()
        call(self.inputs[number % len(self.inputs)])  # brings its own code and weights back into the caches
        once = max(1, self.clock() - started)
        if not self._repeats[side]:
            sample_ns = min(self.sample_ns, max(_MIN_SAMPLE_NS, _ENOUGH_CALLS * once))
            self._repeats[side] = max(1, min(_MAX_REPEATS, sample_ns // once))
        if once > 10 * self.sample_ns:
            return float(once)  # long enough: caches are a small part of it
        repeats = self._repeats[side]
        turn = [self.inputs[(number + 1 + i) % len(self.inputs)] for i in range(repeats)]
        size = -(-repeats // _NUM_PARTS)
        parts = []
        for at in range(0, repeats, size):
            part = turn[at : at + size]
            started = self.clock()
            for inputs in part:
                call(inputs)
            parts.append(max(1, self.clock() - started) / len(part))
        return statistics.median(parts)

    def _time_reference(self) -> float:
        self.reference()
        started = self.clock()
        self.reference()
        return float(max(1, self.clock() - started))

    def _wait_for_quiet(self, patience_seconds: float) -> None:
        deadline = self.clock() + int(patience_seconds * NS)
        while self.activity().num_in_flight and self.clock() < deadline:
            self.sleep(0.0005)


def wait_for_idle_threads(limit_seconds: float = 0.1) -> None:
    """Wait until no thread of this process uses the processor: a pool's workers may spin for a while after a run (ONNX
    Runtime's do), and would be held against whoever runs next."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        used, began = time.process_time(), time.monotonic()
        time.sleep(0.001)
        if time.process_time() - used < 0.2 * (time.monotonic() - began):
            return


def _in_ms(median: Median) -> float:
    return median.value / 1e6


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None
