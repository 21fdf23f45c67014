"""The contest between all candidates of one workload: who was tried, how fast they were, who is worth trying next.

Candidates are built, compared with the first one's outputs, and timed. Each template sends its own best guess first,
and is out when a number of candidates in a row was no better, when it is clearly behind the other templates, or when it
is as good as at the machine's limit. In the child only.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from hone.compiler.build import BuildFailed
from hone.compiler.roofline import is_bf16
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import BuiltKernel, Candidate, Template
from hone.compiler.templates.registry import templates_for
from hone.compiler.workload import Workload
from hone.tuning.operands import Expected, Operands, num_turns
from hone.types import Array

_log = logging.getLogger(__name__)

#: Candidates of one workload, all templates together.
MAX_CANDIDATES = 50
#: The fastest few are kept at hand, and timed once more against each other.
_FINALISTS = 3
_FINAL_ROUNDS = 7
_SAMPLE_NS = 500_000
_NUM_SAMPLES = 3
_MAX_REPEATS = 1000
#: Candidates in a row that may be no better, by the nanoseconds of the best: there is little to win in short kernels.
_PATIENCE = ((20_000, 4), (100_000, 6), (500_000, 10), (float("inf"), 14))
_BETTER = 0.98
#: A template is out when its best of so many is slower than the best of all by so much.
_PROBES, _BEHIND = 3, 1.3
#: A candidate whose first runs take so much longer than the best is not measured further.
_CLEARLY_SLOWER = 1.5
#: Within this of the roofline there is nothing left to find.
_AT_LIMIT = 1.04
#: What one expects of the next candidate: at least this part of the time, and less after each that was no better.
_MIN_HEADROOM, _HOPE = 0.15, 0.8
#: Candidates compute the same sums in other orders, or (Winograd, bfloat16) with other roundings.
_TOLERANCE, _BF16_TOLERANCE = 2e-3, 4e-2


@dataclass(slots=True)
class SearchCounts:
    """What searching took, for metrics."""

    num_built: int = 0
    num_measured: int = 0
    num_failed: int = 0
    num_cut: int = 0
    """Candidates that were never built, since their template was out, and those that one look was enough for."""
    num_remembered: int = 0
    """Workloads whose decision was in the cache."""
    build_seconds: float = 0.0
    measure_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranked:
    candidate: Candidate
    ns: float
    turn: int = 0
    """When it was measured: the how manieth."""

    def fields(self) -> dict[str, Any]:
        return {**self.candidate.fields(), "ns": self.ns, "turn": self.turn}


@dataclass(slots=True)
class _Entrant:
    """A template in the contest. `waiting` are its untried candidates, the most promising first."""

    template: Template
    waiting: deque[Candidate]
    not_tried: list[Candidate] = field(default_factory=list)
    """Whom the machine could not build: nothing is held against them, and another search tries them."""
    best_ns: float = float("inf")
    num_tried: int = 0
    num_no_better: int = 0


@dataclass(slots=True)
class Contest:
    """One workload, which an inference calls `num_calls` times. `known` are candidates that were measured before, in
    their order, with their nanoseconds; `limit_ns` is what the roofline says a call takes at least."""

    workload: Workload
    num_calls: int
    target: CpuTarget
    limit_ns: float
    counts: SearchCounts
    known: Mapping[Candidate, float] = field(default_factory=dict)
    clock: Callable[[], int] = time.perf_counter_ns
    _entrants: list[_Entrant] = field(default_factory=list)
    _ns: dict[Candidate, float] = field(default_factory=dict)
    _kernels: dict[Candidate, BuiltKernel] = field(default_factory=dict)
    """Of the fastest few."""
    _expected: Expected | None = None
    _data: Operands | None = None

    def __post_init__(self) -> None:
        for template in templates_for(self.workload, self.target):
            candidates = list(template.candidates(self.workload, self.target))
            entrant = _Entrant(template, deque(candidate for candidate in candidates if candidate not in self.known))
            self._entrants.append(entrant)
            for candidate in self.known:
                if candidate in candidates:
                    entrant.num_tried += 1
                    self._note(entrant, candidate, self.known[candidate])

    def expect(self, likely: Sequence[Candidate]) -> None:
        """Try these early (those that are candidates here): the first of them before anything else."""
        for entrant in self._entrants:
            promising = [candidate for candidate in likely if candidate in entrant.waiting]
            own = list(entrant.waiting)
            entrant.waiting = deque(dict.fromkeys([*promising[:1], *own[:1], *promising[1:], *own]))

    @property
    def has_news(self) -> bool:
        """Whether anybody was measured who was not known before."""
        return len(self._ns) > sum(candidate in self._ns for candidate in self.known)

    @property
    def num_templates(self) -> int:
        return len(self._entrants)

    @property
    def num_waiting(self) -> int:
        return sum(len(entrant.waiting) for entrant in self._entrants)

    @property
    def leader(self) -> Candidate | None:
        """The fastest so far."""
        return min(self._ns, key=lambda candidate: self._ns[candidate], default=None)

    @property
    def best_ns(self) -> float:
        """Of the leader; infinity before the first."""
        return min(self._ns.values(), default=float("inf"))

    @property
    def is_over(self) -> bool:
        """Nobody is left who can be tried now and is worth it."""
        return self._next() is None

    @property
    def is_complete(self) -> bool:
        """Nobody is left who is worth trying, now or another time."""
        return self.is_over and (
            self._num_tried >= MAX_CANDIDATES
            or not any(entrant.not_tried and self._is_worth_it(entrant) for entrant in self._entrants)
        )

    @property
    def gain_ns(self) -> float:
        """Nanoseconds of one inference that further candidates may save, as far as one can tell: what is above the
        machine's limit (or a part of the time, as some algorithms pass that), less with every candidate that was no
        better."""
        if not self._ns or self.is_over:
            return 0.0
        num_no_better = min(entrant.num_no_better for entrant in self._entrants if self._may_go_on(entrant))
        above = max(self.best_ns - self.limit_ns, _MIN_HEADROOM * self.best_ns)
        return self.num_calls * above * _HOPE**num_no_better

    @property
    def data_bytes(self) -> int:
        """Memory of the operands that are kept between turns."""
        return self._data.num_bytes if self._data is not None else 0

    def rest(self) -> None:
        """Give the operands back; they are made again in the next turn."""
        self._data = self._expected = None

    def turn(self, num: int, builders: Executor, tell: Callable[[str], None]) -> None:
        """Build and measure up to `num` more candidates."""
        chosen: list[tuple[_Entrant, Candidate]] = []
        for _ in range(num):
            entrant = self._next()
            if entrant is None:
                break
            chosen.append((entrant, entrant.waiting.popleft()))
            entrant.num_tried += 1
        best = f", best {self.best_ns / 1e3:.1f} us" if self._ns else ""
        tell(f"searching {self.workload}: {len(self._ns)} candidates tried{best}")
        began = time.monotonic()
        built = list(builders.map(lambda one: self._build(*one), chosen))
        self.counts.build_seconds += time.monotonic() - began
        for (entrant, candidate), kernel in zip(chosen, built, strict=True):
            if isinstance(kernel, BuildFailed):
                _log.info("candidate %s of %s: %s", candidate, self.workload, kernel)
                self.counts.num_failed += 1
                if kernel.is_of_the_machine:
                    entrant.num_tried -= 1
                    entrant.not_tried.append(candidate)
                else:
                    entrant.num_no_better += 1
                continue
            self.counts.num_built += 1
            self._try(entrant, candidate, kernel)
            tell(f"searching {self.workload}: {len(self._ns)} candidates tried, best {self.best_ns / 1e3:.1f} us")

    def ranking(self) -> list[Ranked]:
        """All that were measured, the fastest first; the best few once more in turns, so that what disturbs one
        disturbs all. Empty where nobody could be measured."""
        order = sorted(self._ns, key=lambda candidate: self._ns[candidate])
        finalists = [candidate for candidate in order[:_FINALISTS] if candidate in self._kernels]
        if len(finalists) > 1:
            times: dict[Candidate, list[float]] = {candidate: [] for candidate in finalists}
            turns = {candidate: self._turns(candidate, self._tensors(candidate)) for candidate in finalists}
            for i in range(_FINAL_ROUNDS):
                for candidate in finalists if i % 2 == 0 else reversed(finalists):
                    times[candidate].append(self._sample(self._kernels[candidate], turns[candidate]))
            self._ns.update({candidate: statistics.median(taken) for candidate, taken in times.items()})
            order.sort(key=lambda candidate: self._ns[candidate])
        turns_of = {candidate: turn for turn, candidate in enumerate(self._ns)}
        return [Ranked(candidate, self._ns[candidate], turns_of[candidate]) for candidate in order]

    def kernels_of(self, candidate: Candidate) -> list[BuiltKernel]:
        """The candidate's kernel, if it was built here."""
        return [self._kernels[candidate]] if candidate in self._kernels else []

    def __str__(self) -> str:
        """For the log: who won, how far from the limit, and how many were tried and cut."""
        winner = self.leader
        if winner is None:
            return f"{self.workload}: nothing could be measured"
        return (
            f"{self.workload}: {winner} takes {self._ns[winner] / 1e3:.1f} us, limit {self.limit_ns / 1e3:.1f} us; "
            f"{len(self._ns)} candidates measured, {self.num_waiting} cut"
        )

    # --- who is next

    def _next(self) -> _Entrant | None:
        """First every template's first guess, then whoever leads of those that may still win."""
        if self._num_tried >= MAX_CANDIDATES:
            return None
        going = [entrant for entrant in self._entrants if self._may_go_on(entrant)]
        fresh = [entrant for entrant in going if entrant.num_tried < _PROBES]
        return min(fresh or going, key=lambda entrant: (entrant.num_tried > 0, entrant.best_ns), default=None)

    @property
    def _num_tried(self) -> int:
        return sum(entrant.num_tried for entrant in self._entrants)

    def _may_go_on(self, entrant: _Entrant) -> bool:
        return bool(entrant.waiting) and self._is_worth_it(entrant)

    def _is_worth_it(self, entrant: _Entrant) -> bool:
        best = entrant.best_ns
        # One that passed the limit needs less arithmetic than the limit counts: it says nothing about that one.
        if self.limit_ns <= best <= _AT_LIMIT * self.limit_ns:
            return False
        if entrant.num_tried >= _PROBES and best > _BEHIND * self.best_ns:
            return False
        return entrant.num_no_better < next(patience for ns, patience in _PATIENCE if self.best_ns <= ns)

    def _note(self, entrant: _Entrant, candidate: Candidate, ns: float) -> None:
        self._ns[candidate] = ns
        entrant.num_no_better = 0 if ns < _BETTER * entrant.best_ns else entrant.num_no_better + 1
        entrant.best_ns = min(entrant.best_ns, ns)

    # --- one candidate

    def _build(self, entrant: _Entrant, candidate: Candidate) -> BuiltKernel | BuildFailed:
        try:
            return entrant.template.build(self.workload, candidate, self.target)
        except BuildFailed as problem:
            return problem

    def _try(self, entrant: _Entrant, candidate: Candidate, kernel: BuiltKernel) -> None:
        began = time.monotonic()
        try:
            output, tensors = self._run(kernel, candidate)
            if output is None:
                self.counts.num_failed += 1
                entrant.num_no_better += 1
                return
            if self._expected is None:
                tolerance = _BF16_TOLERANCE if is_bf16(self.workload) else _TOLERANCE
                self._expected = Expected(self._reference(output), tolerance)
            if not self._expected.matches(output):
                _log.warning("candidate %s of %s computes something else", candidate, self.workload)
                self.counts.num_failed += 1
                entrant.num_no_better += 1
                return
            self._note(entrant, candidate, self._time(kernel, self._turns(candidate, tensors)))
            self._hold(candidate, kernel)
            self.counts.num_measured += 1
        finally:
            self.counts.measure_seconds += time.monotonic() - began

    def _hold(self, candidate: Candidate, kernel: BuiltKernel) -> None:
        """Keep the kernels of the fastest, and no others: they take memory."""
        self._kernels[candidate] = kernel
        if len(self._kernels) > _FINALISTS:
            del self._kernels[max(self._kernels, key=lambda one: self._ns[one])]

    def _reference(self, output: Array) -> Array:
        """What candidates of an earlier turn compute; that output where there was none."""
        for candidate, kernel in self._kernels.items():
            earlier, _ = self._run(kernel, candidate)
            if earlier is not None:
                return earlier
        return output

    def _run(self, kernel: BuiltKernel, candidate: Candidate) -> tuple[Array | None, Sequence[Any]]:
        """Its outputs, and its arguments; no outputs where it failed, or left some of them as they were."""
        tensors = self._tensors(candidate)
        assert self._data is not None
        self._data.poison()
        try:
            kernel(*tensors)
        except Exception as problem:  # compiled code raises whatever tvm-ffi makes of it
            _log.info("kernel %s failed: %s", kernel.digest, problem)
            return None, tensors
        return self._data.output.copy(), tensors

    def _tensors(self, candidate: Candidate) -> list[Any]:
        if self._data is None:
            self._data = Operands(self.workload)
        return self._data.tensors(self._template(candidate), candidate, self.target)

    def _template(self, candidate: Candidate) -> Template:
        return next(one.template for one in self._entrants if one.template.name == candidate.template)

    def _turns(self, candidate: Candidate, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """Arguments for calls in turn: weights come from beyond the second cache, as they do within a model, where
        other layers' have been there in between. A packing that makes them larger must show what that costs."""
        assert self._data is not None
        num = num_turns(self._data.weight_bytes(self._template(candidate), candidate, self.target), self.target)
        return [
            tensors,
            *(self._data.copies(self._template(candidate), candidate, self.target) for _ in range(num - 1)),
        ]

    def _time(self, kernel: BuiltKernel, turns: Sequence[Sequence[Any]]) -> float:
        """Nanoseconds of a call, roughly for one that is clearly behind."""
        first = self._sample(kernel, turns)
        if first > _CLEARLY_SLOWER * self.best_ns:
            self.counts.num_cut += 1
            return first
        return min(first, *(self._sample(kernel, turns) for _ in range(_NUM_SAMPLES - 1)))

    def _sample(self, kernel: BuiltKernel, turns: Sequence[Sequence[Any]]) -> float:
        started = self.clock()
        kernel(*turns[-1])
        once = max(1, self.clock() - started)
        if once >= _SAMPLE_NS or once > 4 * _CLEARLY_SLOWER * self.best_ns:
            return float(once)
        repeats = max(1, min(_MAX_REPEATS, _SAMPLE_NS // once))
        started = self.clock()
        for at in range(repeats):
            kernel(*turns[at % len(turns)])
        return (self.clock() - started) / repeats
