"""Search for schedules of what has no template: MetaSchedule's evolution with its XGBoost cost model, in this process.

The loop is ours and ends at a deadline: candidates are proposed, built, timed against the plain schedule in turns, and
told to the model. The best record is returned as a JSON trace, for a decision cache to keep under our own digest.
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
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.logging import get_logging_func

from hone.compiler.build import BuildFailed, build_functions, first_line, graph_problem
from hone.compiler.choices import Choices
from hone.compiler.phases.concats import keeps_runs
from hone.compiler.phases.schedule import apply_trace, calls_of_main, function_digest, trace_text
from hone.compiler.pipeline import GRAPH_PHASES, Compilation, Model, lowering_phases, run_phases
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from hone.types import Array

logger = logging.getLogger(__name__)

_TRIALS_PER_ROUND = 16
_MAX_TRIALS = 100_000
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
class SearchResult:
    """`trace` is None where nothing better than the plain schedule was found."""

    trace: str | None
    plain_us: float
    best_us: float
    num_trials: int
    num_failed: int
    reason: str = ""


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
) -> SearchResult:
    """Search for at most so many seconds. `tell` hears of trials done, best and plain microseconds after each round.

    Nothing is raised for what TVM cannot search: the result then has no trace, and a reason.
    """
    deadline = time.monotonic() + seconds
    bench = _Bench(function.func, target)
    plain = plain_schedule(function.func, target).func
    return search_on(bench, function.func, plain, lambda: Proposals(function.func, target, seed), deadline, tell)


class Bench(Protocol):
    """Builds and times schedules of one function; on whatever device."""

    def times(self, funcs: Sequence[Any], until: float) -> list[float]:
        """Microseconds of each; infinite where it does not build or run, not a number where the time `until` (of the
        monotonic clock) was not enough to try it."""

    def agrees(self, func: Any, reference: Any) -> bool:
        """Whether two schedules give the same results."""


def search_on(
    bench: Bench,
    func: Any,
    plain: Any,
    propose: Callable[[], Proposals],
    deadline: float,
    tell: Callable[[int, float, float], None] | None = None,
    *,
    good_enough_us: float = 0.0,
) -> SearchResult:
    """See `search_schedule`; `plain` is the function as it is scheduled without a search. Where that takes no more than
    `good_enough_us` nothing is tried."""
    (plain_us,) = bench.times([plain], math.inf)
    if math.isinf(plain_us):
        return SearchResult(None, plain_us, plain_us, 0, 0, "the plain schedule does not build")
    if plain_us <= good_enough_us:
        return SearchResult(None, plain_us, plain_us, 0, 0, "the plain schedule is as fast as memory")
    try:
        strategy = propose()
    except Exception as problem:  # TVM raises many kinds where it has no rule for a function
        return SearchResult(None, plain_us, plain_us, 0, 0, f"no design space: {first_line(problem)}")
    best_us, best, num_trials, num_failed = plain_us, None, 0, 0
    while time.monotonic() < deadline:
        candidates = strategy.propose()
        if not candidates:
            break
        times = bench.times([candidate.sch.mod["main"] for candidate in candidates], deadline)
        for candidate, took in zip(candidates, times, strict=True):
            num_trials += not math.isnan(took)
            num_failed += math.isinf(took)
            if took < best_us:
                best_us, best = took, trace_text(candidate.sch)
        strategy.learn(candidates, times)
        if tell is not None:
            tell(num_trials, best_us, plain_us)
    if best is None:
        return SearchResult(None, plain_us, plain_us, num_trials, num_failed, "nothing was faster")
    return _confirm(func, plain, bench, best, num_trials, num_failed)


def _confirm(func: Any, plain: Any, bench: Bench, trace: str, num_trials: int, num_failed: int) -> SearchResult:
    """Build the winner from its record, as a later compilation will, check its numbers, and time it in turns."""
    searched = apply_trace(func, trace)
    if searched is None or not bench.agrees(searched, plain):
        return SearchResult(None, math.inf, math.inf, num_trials, num_failed, "the best record computes something else")
    turns = [bench.times([plain, searched], math.inf) for _ in range(3)]
    plain_us, best_us = (float(np.median([turn[i] for turn in turns])) for i in (0, 1))
    if plain_us < best_us * _MIN_GAIN:
        return SearchResult(None, plain_us, best_us, num_trials, num_failed, "not measurably faster")
    return SearchResult(trace, plain_us, best_us, num_trials, num_failed)


class _Context(ms.TuneContext):  # type: ignore[misc]  # TVM is untyped
    """TVM's context without its constructor, which parses the intrinsics of every GPU there is for 10 seconds."""

    def __init__(self, mod: tvm.IRModule, target: Any, rules: str, seed: int) -> None:
        self.__init_handle_by_constructor__(
            ms._ffi_api.TuneContext,
            mod,
            target,
            ms.space_generator.PostOrderApply(
                sch_rules=ms.ScheduleRule.create(rules),
                postprocs=ms.Postproc.create(rules),
                mutator_probs=ms.Mutator.create(rules),
            ),
            # Small populations: a round of proposals must not outlast the budget, and cannot be interrupted.
            ms.search_strategy.EvolutionarySearch(
                population_size=128, init_min_unmeasured=_TRIALS_PER_ROUND, max_fail_count=2, genetic_num_iters=3
            ),
            "main",
            1,
            seed + 1,
            get_logging_func(logging.getLogger(f"{__name__}.tvm")),
        )
        ms._ffi_api.TuneContextInitialize(self)


class _HasTvm(Protocol):
    def tvm(self) -> Any:
        """The target as TVM knows it."""


class Proposals:
    """MetaSchedule's proposals for one function. `rules` names TVM's sets of them: "llvm" or "cuda"."""

    def __init__(self, func: Any, target: _HasTvm, seed: int, rules: str = "llvm") -> None:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        self._context = _Context(mod, target.tvm(), rules, seed)
        self._model = ms.cost_model.XGBModel(num_warmup_samples=2 * _TRIALS_PER_ROUND, num_tuning_cores=1)
        # A database in memory: the strategy breeds from what it holds. Nothing is kept under its keys.
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(mod)
        self._context.pre_tuning(
            _MAX_TRIALS,
            _TRIALS_PER_ROUND,
            self._context.generate_design_space(),
            self._database,
            self._model,
        )

    def propose(self) -> list[Any]:
        return list(self._context.generate_measure_candidates() or [])

    def learn(self, candidates: list[Any], microseconds: list[float]) -> None:
        results = [
            ms.runner.RunnerResult([took * 1e-6], None)
            if math.isfinite(took)
            else ms.runner.RunnerResult(None, "it does not build or run")
            for took in microseconds
        ]
        for candidate, took in zip(candidates, microseconds, strict=True):
            if math.isfinite(took):
                self._database.commit_tuning_record(
                    ms.database.TuningRecord(
                        candidate.sch.trace, self._workload, [took * 1e-6], self._context.target, candidate.args_info
                    )
                )
        self._model.update(self._context, candidates, results)
        self._context.notify_runner_results(candidates, results)


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
        """The best of a few runs in microseconds; infinite where it does not build or run."""
        run = self._build(func)
        if run is None:
            return math.inf
        try:
            repeats = 1
            while (took := _seconds(run, self._tensors, repeats)) < _MIN_RUN_SECONDS:
                repeats *= 4
            return min(took, *(_seconds(run, self._tensors, repeats) for _ in range(_RUNS))) / repeats * 1e6
        except Exception as problem:  # a candidate that does not run is a result
            logger.debug("a candidate does not run: %s", first_line(problem))
            return math.inf

    def agrees(self, func: Any, reference: Any) -> bool:
        results: list[Array] = []
        for each in (func, reference):
            run = self._build(each)
            if run is None:
                return False
            run(*self._tensors)
            results.append(self._tensors[-1].numpy().astype(np.float64))
        got, expected = results
        return bool(np.allclose(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(expected).max(initial=0)))))

    def _build(self, func: Any) -> Any | None:
        try:
            return build_functions({"run": func}, self._target).function("run")
        except BuildFailed as problem:
            logger.debug("a candidate does not build: %s", problem)
            return None


def _seconds(run: Any, tensors: list[Any], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run(*tensors)
    return time.perf_counter() - started
