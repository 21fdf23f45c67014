"""Search for schedules of what has no template: MetaSchedule's evolution with its XGBoost cost model, in this process.

The loop is ours: candidates are proposed, built, timed against the plain schedule in turns, and told to the model,
until so many were tried, or so many in a row were no better. At a deadline it stops before, and what it has found until
then lets another search go on. The best record is returned as a JSON trace, for a decision cache to keep under our own
digest.
Everything that can hang or crash here does so in the tuning child, which is killed at its deadline.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm
from tvm import relax, tirx

from hone.compiler.build import BuildFailed, build_functions, first_line, graph_problem, is_of_the_machine
from hone.compiler.choices import Choices
from hone.compiler.phases.concats import keeps_runs
from hone.compiler.phases.schedule import apply_trace, calls_of_main, function_digest, trace_text
from hone.compiler.pipeline import GRAPH_PHASES, Compilation, Model, lowering_phases, run_phases
from hone.compiler.proposals import Proposals
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from hone.types import Array

logger = logging.getLogger(__name__)

#: A search is over when it has tried so many, in all its parts, or so many in a row that were no better. The model's
#: first two rounds are chance (see `Proposals`), so it has four to show something.
_NUM_TRIALS, _PATIENCE = 192, 64
#: What counts as better, so that noise does not keep a search going.
_BETTER = 0.98
#: The fastest so many are bred from when a search goes on.
_NUM_RECORDS = 16
#: A searched schedule must be this much faster than the plain one to be kept.
_MIN_GAIN = 1.05
_RUNS = 5
#: Runs are repeated until they take this long, so that the clock's grain does not matter.
_MIN_RUN_SECONDS = 200e-6


@dataclass(frozen=True, slots=True)
class RemainingFunction:
    """A function of a model that no template takes, and how often one inference calls it."""

    digest: str
    name: str
    func: Any
    num_calls: int
    microseconds: float
    """A rough estimate of one call, under the plain schedule."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What lets a search go on where another one, in another process, had to stop."""

    num_trials: int = 0
    num_no_better: int = 0
    """Trials since the last that was better."""
    records: tuple[tuple[str, float], ...] = ()
    """Trace and microseconds of the fastest, the fastest first."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`trace` is None where nothing better than the plain schedule was found. Trials are those of this search alone,
    those of `progress` include the ones before it."""

    trace: str | None
    plain_us: float
    best_us: float
    num_trials: int
    num_failed: int
    reason: str = ""
    is_complete: bool = False
    """There is nothing to go on with: by the function or by what was tried, not because time, memory or room was up."""
    progress: Progress = Progress()


def remaining_functions(model: Model, target: CpuTarget) -> list[RemainingFunction]:
    """What templates leave of a model, the heaviest first; preparation of weights is not in it. Raises GraphRefused for
    a function that cannot be scheduled at all."""

    def microseconds(func: Any) -> float:
        try:
            return plain_schedule(func, target).microseconds
        except Exception as problem:  # TVM raises whatever its primitives raise
            raise graph_problem("phase 5 schedule", problem) from problem

    compilation = Compilation(target, Choices(), parameters=tuple(model.params))
    mod = run_phases(model.mod, (*GRAPH_PHASES, *lowering_phases()), compilation, None)
    # A concatenation of runs is written in place, or a plain copy.
    return called_functions(mod, keeps_runs, microseconds)


def called_functions(
    mod: Any, leave_out: Callable[[Any], bool], microseconds: Callable[[Any], float]
) -> list[RemainingFunction]:
    """The functions that `main` calls, the heaviest first; microseconds are of one call."""
    calls = calls_of_main(mod)
    found = [
        RemainingFunction(
            digest=function_digest(func),
            name=str(name.name_hint),
            func=func,
            num_calls=calls[str(name.name_hint)],
            microseconds=microseconds(func),
        )
        for name, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
        and str(name.name_hint) in calls
        # A reshape is a view in the end.
        and not relax.analysis.has_reshape_pattern(func)
        and not leave_out(func)
    ]
    return sorted(found, key=lambda function: -function.microseconds * function.num_calls)


def search_schedule(
    function: RemainingFunction,
    target: CpuTarget,
    seconds: float,
    *,
    seed: int = 0,
    tell: Callable[[int, float, float], None] | None = None,
    known: Progress | None = None,
) -> SearchResult:
    """Search for at most so many seconds, on from what is known. `tell` hears of trials done, best and plain
    microseconds after each round.

    Nothing is raised for what TVM cannot search: the result then has no trace, and a reason.
    """
    deadline = time.monotonic() + seconds
    bench = _Bench(function.func, target)
    plain = plain_schedule(function.func, target).func
    known = known or Progress()
    # With the seed of before, the same would be proposed again.
    seed += known.num_trials
    return search_on(bench, function.func, plain, lambda: Proposals(function.func, target, seed), deadline, tell, known)


class Bench(Protocol):
    """Builds and times schedules of one function; on whatever device."""

    def times(self, funcs: Sequence[Any], until: float) -> list[float]:
        """Microseconds of each; infinite where it does not build or run, not a number where it was not tried: the time
        `until` (of the monotonic clock) was not enough, or the machine could not build it."""

    def agrees(self, func: Any, reference: Any) -> bool:
        """Whether two schedules give the same results. Raises BuildFailed where the machine could not find out."""


def search_on(
    bench: Bench,
    func: Any,
    plain: Any,
    propose: Callable[[], Proposals],
    deadline: float,
    tell: Callable[[int, float, float], None] | None = None,
    known: Progress | None = None,
    *,
    good_enough_us: float = 0.0,
) -> SearchResult:
    """See `search_schedule`; `plain` is the function as it is scheduled without a search. Where that takes no more than
    `good_enough_us` nothing is tried."""
    known = known or Progress()
    (plain_us,) = bench.times([plain], math.inf)

    def nothing(reason: str, *, is_complete: bool) -> SearchResult:
        return SearchResult(None, plain_us, plain_us, 0, 0, reason, is_complete, known)

    if math.isnan(plain_us):
        return nothing("the machine could not build the plain schedule", is_complete=False)
    if math.isinf(plain_us):
        return nothing("the plain schedule does not build", is_complete=True)
    if plain_us <= good_enough_us:
        return nothing("the plain schedule is as fast as memory", is_complete=True)
    try:
        strategy = propose()
    except Exception as problem:  # TVM raises many kinds where it has no rule for a function
        if is_of_the_machine(problem):
            return nothing(f"no proposals: {first_line(problem)}", is_complete=False)
        return nothing(f"no design space: {first_line(problem)}", is_complete=True)
    trials = _Trials(plain_us, known)
    strategy.remember(trials.records)
    trials.measure_again(bench, func)
    is_over = trials.is_over
    while not is_over and time.monotonic() < deadline:
        candidates = strategy.propose()
        times = bench.times([candidate.sch.mod["main"] for candidate in candidates], deadline)
        trials.note([trace_text(candidate.sch) for candidate in candidates], times)
        strategy.learn(candidates, times)
        if tell is not None:
            tell(trials.num_here, trials.best_us, plain_us)
        is_over = trials.is_over or not candidates
    return _confirm(func, plain, bench, trials, is_over=is_over)


class _Trials:
    """What was tried of one function, before and now."""

    def __init__(self, plain_us: float, known: Progress) -> None:
        self.plain_us = plain_us
        self.records = list(known.records)
        self._num, self._num_no_better = known.num_trials, known.num_no_better
        self.num_here = self.num_failed = 0

    @property
    def best(self) -> str | None:
        """The fastest, where it is faster than the plain schedule."""
        return self.records[0][0] if self.records and self.records[0][1] < self.plain_us else None

    @property
    def best_us(self) -> float:
        return min(self.plain_us, self.records[0][1] if self.records else math.inf)

    @property
    def is_over(self) -> bool:
        return self._num >= _NUM_TRIALS or self._num_no_better >= _PATIENCE

    @property
    def progress(self) -> Progress:
        return Progress(self._num, self._num_no_better, tuple(self.records))

    def measure_again(self, bench: Bench, func: Any) -> None:
        """The fastest of before, beside the plain schedule of today."""
        if not self.records:
            return
        trace, _ = self.records[0]
        scheduled = apply_trace(func, trace)
        took = math.inf if scheduled is None else bench.times([scheduled], math.inf)[0]
        if math.isinf(took):
            self.forget(trace)
        elif not math.isnan(took):
            self.records[0] = (trace, took)
            self.records.sort(key=lambda record: record[1])

    def note(self, traces: Sequence[str], times: Sequence[float]) -> None:
        for trace, took in zip(traces, times, strict=True):
            if math.isnan(took):
                continue
            self.num_here += 1
            self._num += 1
            self.num_failed += math.isinf(took)
            self._num_no_better = 0 if took < _BETTER * self.best_us else self._num_no_better + 1
            if math.isfinite(took):
                self.records.append((trace, took))
                self.records.sort(key=lambda record: record[1])
                del self.records[_NUM_RECORDS:]

    def forget(self, trace: str) -> None:
        self.records = [record for record in self.records if record[0] != trace]


def _confirm(func: Any, plain: Any, bench: Bench, trials: _Trials, *, is_over: bool) -> SearchResult:
    """Build the winner from its record, as a later compilation will, check its numbers, and time it in turns."""
    plain_us, best_us, best = trials.plain_us, trials.best_us, trials.best

    def result(trace: str | None, reason: str = "", *, is_complete: bool = is_over) -> SearchResult:
        return SearchResult(
            trace, plain_us, best_us, trials.num_here, trials.num_failed, reason, is_complete, trials.progress
        )

    if best is None:
        return result(None, "nothing was faster")
    searched = apply_trace(func, best)
    try:
        is_right = searched is not None and bench.agrees(searched, plain)
    except BuildFailed as problem:
        return result(None, f"the best record could not be checked: {problem.reason}", is_complete=False)
    if not is_right:
        trials.forget(best)
        plain_us = best_us = math.inf
        return result(None, "the best record computes something else")
    turns = [bench.times([plain, searched], math.inf) for _ in range(3)]
    if any(math.isnan(took) for turn in turns for took in turn):
        return result(None, "the machine could not build the best record again", is_complete=False)
    plain_us, best_us = (float(np.median([turn[i] for turn in turns])) for i in (0, 1))
    if plain_us < best_us * _MIN_GAIN:
        return result(None, "not measurably faster")
    return result(best)


class _Bench:
    """Builds and times schedules of one function on the same random inputs."""

    def __init__(self, func: Any, target: CpuTarget) -> None:
        self._target = target
        rng = np.random.default_rng(0)
        self._tensors = []
        for param in func.params:
            shape, dtype = [int(dim) for dim in param.shape], str(param.dtype)
            array = rng.standard_normal(shape) if dtype.startswith(("float", "bfloat")) else rng.integers(0, 2, shape)
            self._tensors.append(tvm.runtime.tensor(array.astype(dtype)))

    def times(self, funcs: Sequence[Any], until: float) -> list[float]:
        return [self._time(func) if time.monotonic() < until else math.nan for func in funcs]

    def _time(self, func: Any) -> float:
        """The best of a few runs in microseconds; infinite where it does not build or run, not a number where the
        machine is to blame."""
        try:
            run = self._build(func)
            repeats = 1
            while (took := _seconds(run, self._tensors, repeats)) < _MIN_RUN_SECONDS:
                repeats *= 4
            return min(took, *(_seconds(run, self._tensors, repeats) for _ in range(_RUNS))) / repeats * 1e6
        except Exception as problem:  # a candidate that does not build or run is a result
            logger.debug("a candidate does not build or run: %s", first_line(problem))
            return math.nan if is_of_the_machine(problem) else math.inf

    def agrees(self, func: Any, reference: Any) -> bool:
        results: list[Array] = []
        for each in (func, reference):
            try:
                run = self._build(each)
            except BuildFailed as problem:
                if problem.is_of_the_machine:
                    raise
                return False
            run(*self._tensors)
            results.append(self._tensors[-1].numpy().astype(np.float64))
        got, expected = results
        return bool(np.allclose(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(expected).max(initial=0)))))

    def _build(self, func: Any) -> Any:
        """Raises BuildFailed."""
        return build_functions({"run": func}, self._target).function("run")


def _seconds(run: Any, tensors: list[Any], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run(*tensors)
    return time.perf_counter() - started
