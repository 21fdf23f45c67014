"""Which candidate of which template is fastest for each workload of a model, on this GPU. In the child only.

Kernels know no sizes and are built once an architecture, so most of a search is measuring: candidates whose kernels are
in the cache come first, and the next are built while one is measured. Rankings are kept as decisions, which no model
asks for again; those that were not finished go on from where they were.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hone.compiler.build import BuildFailed
from hone.compiler.cuda.padding import Padding
from hone.compiler.cuda.partition import CudaTemplate, Templates, Wanted, takers
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.roofline import operations, traffic
from hone.compiler.templates.base import Candidate
from hone.compiler.workload import Workload
from hone.kernels import DecisionKey, DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources, toolchain_of
from hone.tuning.contest import Ranked, SearchCounts
from hone.tuning.decisions import RANKING_FILE, read_decision
from hone.tuning.gpu_operands import Operands
from hone.tuning.jobs import PROFILING_STAGE
from hone.tuning.profiler import Profiler, Skipped, Subject
from hone.types import Array

_log = logging.getLogger(__name__)

#: Candidates of one workload, all templates together.
MAX_CANDIDATES = 50
#: Candidates in a row that may be no better, once every template had its say.
_PATIENCE = 10
_BETTER = 0.98
#: A pair in one kernel must be so much faster than the two.
_PAIR_MARGIN = 0.03
#: What tensor cores multiply faster than the float16 of which the maker's rate is told: no limit follows from that.
_FASTER = frozenset({"int8", "uint8"})
#: Kernels sum in other orders and round operands alike; results are rounded to their dtype.
_TOLERANCES = {"float16": 1e-2, "bfloat16": 4e-2, "float32": 4e-3}


class Kernel(Protocol):
    """A kernel at hand; see `templates.cutlass.published.PublishedKernel`."""

    digest: str

    def __call__(self, *tensors: Any) -> None: ...


class KernelSource(Protocol):
    """Kernels from the cache, built into it where they are not there."""

    def digest_of(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> str: ...

    def has(self, digest: str) -> bool: ...

    def get(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> Kernel:
        """Raises BuildFailed."""


@dataclass(slots=True)
class GpuSearch:
    """Decides workloads for one GPU. `counts` says what it took."""

    cache: KernelsCache
    device: DeviceKey
    target: CudaTarget
    sources: Sources
    profiler: Profiler
    kernels: KernelSource
    templates: Templates
    precision: str = "tf32"
    num_builders: int = 1
    counts: SearchCounts = field(default_factory=SearchCounts)
    clock: Callable[[], float] = time.monotonic
    _best: dict[str, Ranked] = field(default_factory=dict)
    _cannot_build: BuildFailed | None = None
    """What this machine lacks to build any kernel: those that are there are measured all the same."""
    _no_better: dict[str, int] = field(default_factory=dict)
    """By the workload's digest: candidates in a row that were no better."""

    def decide(self, wanted: Wanted, seconds: float, tell: Callable[[float, str], None]) -> dict[str, Candidate]:
        """The best candidate by the workload's digest. Workloads that the time is not enough for are left out. A pair
        is in only where one kernel is faster than two. Raises DeviceLost."""
        weighed = sorted(wanted.counts.items(), key=lambda item: -item[1] * self._modelled_ns(item[0]))
        contests = [workload for workload, _ in weighed] + [pair.fused for pair in wanted.pairs]
        found = self._ranked_all(contests, {**wanted.counts}, seconds, tell)
        for pair in wanted.pairs:
            fused = found.pop(pair.fused.digest, None)
            parts = [found.get(workload.digest) for workload in (pair.first, pair.second)]
            if fused is None or None in parts:
                continue
            apart = sum(part.ns for part in parts if part is not None)
            _log.info("%s: one kernel takes %.1f us, two take %.1f", pair.fused, fused.ns / 1e3, apart / 1e3)
            if fused.ns * (1 + _PAIR_MARGIN) <= apart:
                found[pair.fused.digest] = fused
        return {digest: ranked.candidate for digest, ranked in found.items()}

    def decide_paddings(
        self, paddings: Sequence[Padding], seconds: float, tell: Callable[[float, str], None]
    ) -> dict[str, int]:
        """By the operator's digest, the multiple that its sizes are rounded up to; 1 where padding does not pay. What
        could not be measured is left out. The copy that some need counts by what memory takes at least."""
        chosen: dict[str, int] = {}
        contests = dict.fromkeys(one for padding in paddings for one in (padding.operator, padding.padded))
        found = self._ranked_all(list(contests), {}, seconds, tell)
        for padding in paddings:
            ranked = [found.get(workload.digest) for workload in (padding.operator, padding.padded)]
            bare, padded = (one.ns if one is not None else None for one in ranked)
            if padded is None:
                continue
            padded += 1e3 * self.target.microseconds(0.0, padding.copied_bytes)
            chosen[padding.operator.digest] = padding.multiple if bare is None or padded < bare else 1
        return chosen

    def ranking(self, workload: Workload) -> dict[str, Any] | None:
        """What was measured of a workload, as it is kept; None where nothing is. `limit_ns`: what arithmetic and
        traffic take at least by what the GPU's maker states; null where that is not known."""
        return read_decision(self.cache, self._key(workload), RANKING_FILE)

    def _ranked_all(
        self,
        contests: Sequence[Workload],
        counts: Mapping[Workload, int],
        seconds: float,
        tell: Callable[[float, str], None],
    ) -> dict[str, Ranked]:
        """By the workload's digest. Each has its part of the time by its modelled part of the model's, so that where
        kernels are still to be built the heaviest do not leave the others nothing; what is over then goes to those
        that were not finished."""
        began = self.clock()
        found: dict[str, Ranked] = {}
        for turn in range(2):
            weights = [counts.get(one, 1) * self._modelled_ns(one) for one in contests]
            for at, workload in enumerate(contests):
                left = seconds - (self.clock() - began)
                if turn and (left <= 0 or workload.digest in self._best):
                    continue
                part = left if turn else left * weights[at] / max(sum(weights[at:]), 1e-9)
                told = (turn + at / len(contests)) / 2
                ranked = self._ranked(workload, part, lambda text, told=told: tell(told, text))  # type: ignore[misc]
                if ranked is not None:
                    found[workload.digest] = ranked
        return found

    # --- one workload

    def _ranked(self, workload: Workload, seconds: float, tell: Callable[[str], None]) -> Ranked | None:
        if workload.digest in self._best:
            return self._best[workload.digest]
        complete, known = self._recall(workload)
        if complete:
            self.counts.num_remembered += 1
        elif seconds > 0:
            num_known = len(known)
            try:
                complete = self._search(workload, known, seconds, tell)
            finally:  # the device may be lost: who comes after goes on from here
                if known and (complete or len(known) > num_known):
                    self._keep(workload, known, complete=complete)
        if not known:
            return None
        best = min(known, key=lambda candidate: known[candidate])
        ranked = Ranked(best, known[best])
        if complete:
            self._best[workload.digest] = ranked
        return ranked

    def _search(
        self, workload: Workload, times: dict[Candidate, float], seconds: float, tell: Callable[[str], None]
    ) -> bool:
        """Add nanoseconds by candidate to those that are known. Whether nobody is left who is worth trying; whom the
        machine could not build is, another time."""
        deadline = self.clock() + seconds
        able = takers(workload, self.target, self.templates)
        order = self._order(workload, able, times)
        contest = _Contest(self, workload, tell)
        num_no_better, num_not_tried = self._no_better.get(workload.digest, 0), 0
        try:
            for at, (template, candidate, kernel) in enumerate(self._built(workload, order)):
                best = min(times.values(), default=float("inf"))
                ns = contest.measure(template, candidate, kernel, best)
                if ns is not None:
                    times[candidate] = ns
                if isinstance(kernel, BuildFailed) and kernel.is_of_the_machine:
                    num_not_tried += 1
                else:
                    num_no_better = 0 if ns is not None and ns < _BETTER * best else num_no_better + 1
                    self._no_better[workload.digest] = num_no_better
                if at + 1 >= len(able) and num_no_better >= _PATIENCE:
                    self.counts.num_cut += len(order) - at - 1
                    return num_not_tried == 0
                if self.clock() > deadline:
                    return at + 1 == len(order) and num_not_tried == 0
        finally:
            contest.close()
        return num_not_tried == 0

    def _order(
        self, workload: Workload, able: Sequence[CudaTemplate], known: Mapping[Candidate, float]
    ) -> list[tuple[CudaTemplate, Candidate]]:
        """Untried candidates: each template's first guess, then those whose kernels are there, then the rest; without
        the blocked."""
        lists = [[(template, one) for one in template.candidates(workload, self.target)] for template in able]
        firsts = [each[0] for each in lists if each]
        turns = [each[i] for i in range(1, max(map(len, lists), default=0)) for each in lists if i < len(each)]
        digests = {one: self.kernels.digest_of(template, workload, one) for template, one in (*firsts, *turns)}
        turns.sort(key=lambda pair: not self.kernels.has(digests[pair[1]]))
        order = []
        for template, candidate in (*firsts, *turns):
            reason = self.profiler.trials.blocked(digests[candidate])
            if reason is not None:
                _log.info("candidate %s is not tried: %s", candidate, reason)
                self.counts.num_failed += 1
            elif candidate not in known:
                order.append((template, candidate))
        return order[: max(0, MAX_CANDIDATES - len(known))]

    def _built(
        self, workload: Workload, order: Sequence[tuple[CudaTemplate, Candidate]]
    ) -> Iterator[tuple[CudaTemplate, Candidate, Kernel | BuildFailed]]:
        """Kernels in order; the next few are built while one is measured."""
        with ThreadPoolExecutor(self.num_builders, thread_name_prefix="build") as builders:
            ahead: list[Future[Kernel | BuildFailed]] = []
            try:
                for at, (template, candidate) in enumerate(order):
                    while len(ahead) <= self.num_builders and at + len(ahead) < len(order):
                        ahead.append(builders.submit(self._build, workload, *order[at + len(ahead)]))
                    began = self.clock()
                    kernel = ahead.pop(0).result()
                    self.counts.build_seconds += self.clock() - began
                    yield template, candidate, kernel
            finally:
                for future in ahead:
                    future.cancel()

    def _build(self, workload: Workload, template: CudaTemplate, candidate: Candidate) -> Kernel | BuildFailed:
        lacking = self._cannot_build
        if lacking is not None and not self.kernels.has(self.kernels.digest_of(template, workload, candidate)):
            return lacking
        try:
            return self.kernels.get(template, workload, candidate)
        except BuildFailed as problem:
            if isinstance(problem.__cause__, OSError) and self._cannot_build is None:
                self._cannot_build = problem
                _log.warning("no more kernels are built in this job: %s", problem)
            return problem

    def _modelled_ns(self, workload: Workload) -> float:
        return 1e3 * self.target.microseconds(operations(workload), traffic(workload))

    # --- what is known

    def _recall(self, workload: Workload) -> tuple[bool, dict[Candidate, float]]:
        told = self.ranking(workload)
        if told is None:
            return False, {}
        try:
            measured = {Candidate.from_fields(one): float(one["ns"]) for one in told["ranking"]}
            complete = bool(told["complete"])
            num_no_better = int(told.get("num_no_better", 0))
        except (ValueError, KeyError, IndexError, TypeError):
            return False, {}  # not understood: searched again
        names = {template.name for template in self.templates}
        # A winner that was blocked since (it crashed serving, say) is none.
        measured = {
            one: ns for one, ns in measured.items() if one.template in names and not self._is_out(workload, one)
        }
        self._no_better.setdefault(workload.digest, num_no_better if measured else 0)
        return complete and bool(measured), measured

    def _is_out(self, workload: Workload, candidate: Candidate) -> bool:
        template = next(template for template in self.templates if template.name == candidate.template)
        return self.profiler.trials.blocked(self.kernels.digest_of(template, workload, candidate)) is not None

    def _keep(self, workload: Workload, times: Mapping[Candidate, float], *, complete: bool) -> None:
        ranking = [Ranked(one, times[one]) for one in sorted(times, key=lambda one: times[one])]
        told = {
            "workload": str(workload),
            "complete": complete,
            "num_no_better": self._no_better.get(workload.digest, 0),
            "limit_ns": None if workload.inputs[0].dtype in _FASTER else self._modelled_ns(workload),
            "ranking": [one.fields() for one in ranking],
        }
        key = self._key(workload)
        data = json.dumps(told, indent=2).encode()
        self.cache.publish(
            "decisions", key.digest, self.device.digest, {RANKING_FILE: data}, {"key": key.fields}, replace=True
        )

    def _key(self, workload: Workload) -> DecisionKey:
        return DecisionKey(
            workload=workload.fields(),
            templates_sha256=self.sources.templates_sha256,
            precision=self.precision,
            device=self.device.digest,
            toolchain=toolchain_of(self.device),
        )


class _Contest:
    """The candidates of one workload against the first of them that ran, which is the reference."""

    def __init__(self, search: GpuSearch, workload: Workload, tell: Callable[[str], None]) -> None:
        self._search, self._workload, self._tell = search, workload, tell
        self._operands = Operands(workload, search.profiler)
        self._reference: Subject | None = None
        self._expected: Array | None = None
        self._num_tried = 0

    def measure(
        self, template: CudaTemplate, candidate: Candidate, kernel: Kernel | BuildFailed, best_ns: float
    ) -> float | None:
        """Nanoseconds; None for one that failed, with a line in the log. Raises DeviceLost."""
        counts, began = self._search.counts, self._search.clock()
        self._num_tried += 1
        best = f", best {best_ns / 1e3:.1f} us" if best_ns < float("inf") else ""
        self._tell(f"{PROFILING_STAGE}: {self._workload}: candidate {self._num_tried}{best}")
        try:
            found: float | Skipped | BuildFailed
            if isinstance(kernel, BuildFailed):
                found = kernel
            else:
                counts.num_built += 1
                found = self._measure(template, candidate, kernel, best_ns)
            if isinstance(found, float):
                counts.num_measured += 1
                return found
            counts.num_failed += 1
            told = found.reason if isinstance(found, Skipped | BuildFailed) else found
            _log.info("candidate %s of %s is skipped: %s", candidate, self._workload, told)
            return None
        finally:
            counts.measure_seconds += self._search.clock() - began

    def close(self) -> None:
        if self._reference is not None:
            self._search.profiler.release(self._reference)

    def _measure(self, template: CudaTemplate, candidate: Candidate, kernel: Kernel, best_ns: float) -> float | Skipped:
        profiler = self._search.profiler
        sets = self._operands.sets(template, candidate, self._search.target)
        if isinstance(sets, Skipped):
            return sets
        subject = Subject(kernel.digest, lambda arguments: kernel(*arguments), sets)
        self._operands.poison(sets[0])
        refused = profiler.run_once(subject)
        if refused is not None:
            return refused
        output = self._operands.output_of(sets[0])
        if self._expected is None:
            if not np.isfinite(output).all():
                return Skipped("its outputs are not finite")
            self._expected = output
        elif not self._is_close(output):
            return Skipped("it computes something else than the others")
        if self._reference is None:
            settled = profiler.settle(subject)
            if isinstance(settled, Skipped):
                return settled
            self._reference = subject
            return settled.ns
        timed = profiler.measure(subject, self._reference, best_ns)
        return timed if isinstance(timed, Skipped) else timed.ns

    def _is_close(self, output: Array) -> bool:
        assert self._expected is not None
        tolerance = _TOLERANCES.get(self._workload.output.dtype, 0.0)
        scale = float(np.sqrt(np.mean(np.square(self._expected, dtype=np.float64))))
        allowed = tolerance * np.maximum(np.abs(self._expected), scale)
        return bool(np.all(np.abs(output - self._expected) <= allowed))
