"""MetaSchedule's proposals for one function: evolution, with a cost model (gradient-boosted trees: XGBoost) that learns
from what was measured and says which of a population are worth measuring."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import tvm
from tvm.s_tir import ScheduleError
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Trace

from hone.compiler.build import first_line

logger = logging.getLogger(__name__)

TRIALS_PER_ROUND = 16
#: More than anybody tries: who measures proposals knows when to stop.
_MAX_TRIALS = 100_000


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
                population_size=128, init_min_unmeasured=TRIALS_PER_ROUND, max_fail_count=2, genetic_num_iters=3
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
        self._mod = mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        self._context = _Context(mod, target.tvm(), rules, seed)
        self._model = ms.cost_model.XGBModel(num_warmup_samples=2 * TRIALS_PER_ROUND, num_tuning_cores=1)
        # A database in memory: the strategy breeds from what it holds. Nothing is kept under its keys.
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(mod)
        self._context.pre_tuning(
            _MAX_TRIALS,
            TRIALS_PER_ROUND,
            self._context.generate_design_space(),
            self._database,
            self._model,
        )

    def propose(self) -> list[Any]:
        return list(self._context.generate_measure_candidates() or [])

    def learn(self, candidates: list[Any], microseconds: Sequence[float]) -> None:
        """What was measured of proposals; nothing is learnt of those that were not tried (not a number)."""
        tried = [(one, took) for one, took in zip(candidates, microseconds, strict=True) if not math.isnan(took)]
        self._learn(tried)
        self._context.notify_runner_results(candidates, [_result_of(took) for took in microseconds])

    def remember(self, records: Sequence[tuple[str, float]]) -> None:
        """Records of an earlier search: they are bred from, and the model learns of them."""
        known = []
        for trace, took in records:
            schedule = tvm.s_tir.Schedule(self._mod)
            try:
                Trace.apply_json_to_schedule(json.loads(trace), schedule)
            except (ScheduleError, ValueError, TypeError, RuntimeError) as problem:
                logger.warning("a recorded schedule does not fit its function: %s", first_line(problem))
                continue
            known.append((ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_prim_func(self._mod["main"])), took))
        self._learn(known)

    def _learn(self, tried: Sequence[tuple[Any, float]]) -> None:
        for candidate, took in tried:
            if math.isfinite(took):
                self._database.commit_tuning_record(
                    ms.database.TuningRecord(
                        candidate.sch.trace, self._workload, [took * 1e-6], self._context.target, candidate.args_info
                    )
                )
        if tried:
            self._model.update(self._context, [one for one, _ in tried], [_result_of(took) for _, took in tried])


def _result_of(microseconds: float) -> Any:
    if math.isfinite(microseconds):
        return ms.runner.RunnerResult([microseconds * 1e-6], None)
    return ms.runner.RunnerResult(None, "it does not build or run")
