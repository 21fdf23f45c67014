"""Which candidate of which template is fastest for each workload of a model, on this machine. In the child only.

Time goes where most is to be gained: each turn belongs to the workload of which the model may save most, as far as its
best candidate is above the machine's limit (the idea of the task scheduler in Zheng et al., "Ansor", 2020, section 6).
So a search may end at any moment with what matters most decided. Rankings are kept as decisions, which no model asks
for again; those that were not finished go on from where they were.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hone.compiler.roofline import Roofline, measure_roofline
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import BuiltKernel, Candidate
from hone.compiler.templates.registry import template_named
from hone.compiler.workload import Workload
from hone.kernels import DecisionKey, DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources, toolchain_of
from hone.tuning.contest import Contest, Ranked, SearchCounts
from hone.tuning.decisions import RANKING_FILE, read_decision

__all__ = ["Search", "SearchCounts"]

_log = logging.getLogger(__name__)

#: Candidates in one turn of a workload, after a first one for the templates' first guesses.
_TURN = 4
#: Of the whole model's time: what a workload may save at most and still be left as it is.
_NOT_WORTH_IT = 0.001
#: The same for one that was searched before, for another model, say: what was left then is mostly noise.
_NOT_WORTH_AGAIN = 0.005
#: Operands that are kept between turns, all workloads together.
_MAX_DATA_BYTES = 512 << 20
_ROOFLINE = "roofline.json"
#: Winners for the same operator that a workload tries early.
_NUM_LIKELY = 4


@dataclass(slots=True)
class Search:
    """Decides workloads for one device. `tell` hears what is tried, and the best so far."""

    cache: KernelsCache
    device: DeviceKey
    target: CpuTarget
    sources: Sources
    counts: SearchCounts = field(default_factory=SearchCounts)
    clock: Callable[[], int] = time.perf_counter_ns
    precision: str = "f32"
    num_builders: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    built: dict[str, BuiltKernel] = field(default_factory=dict)
    """Kernels that won in the last `decide`, by their digest."""
    _known: dict[str, Candidate] = field(default_factory=dict)
    _winners: dict[str, Counter[Candidate]] = field(default_factory=dict)
    _alike: dict[str, Candidate] = field(default_factory=dict)
    _roofline: Roofline | None = None

    def decide(
        self, workloads: Mapping[Workload, int], seconds: float, tell: Callable[[float, str], None]
    ) -> dict[str, Candidate]:
        """The best candidate by the workload's digest; `workloads` says how often an inference calls each. Workloads
        that the time is not enough for take their template's first guess, and are decided another time."""
        self.built = {}
        found: dict[str, Candidate] = {}
        contests: list[Contest] = []
        for workload, num_calls in workloads.items():
            candidate, known = self._recall(workload)
            if candidate is not None:
                found[workload.digest] = candidate
            else:
                contests.append(self._contest(workload, num_calls, known))
        if not contests:
            return found
        with ThreadPoolExecutor(self.num_builders, thread_name_prefix="build") as builders:
            self._hold(contests, builders, time.monotonic(), seconds, tell)
            for contest in contests:
                ranking = contest.ranking()
                contest.rest()
                if ranking:
                    self._remember(contest.workload, ranking[0].candidate)
                    if contest.has_news:
                        self._keep(contest, ranking)
                    else:  # what was known is good enough for this model
                        self.counts.num_remembered += 1
                    found[contest.workload.digest] = ranking[0].candidate
                    self.built.update({kernel.digest: kernel for kernel in contest.kernels_of(ranking[0].candidate)})
                if contest.is_over:
                    self.counts.num_cut += contest.num_waiting
                _log.info("%s", contest)
        return found

    def recall(self, workloads: Iterable[Workload]) -> dict[str, Candidate]:
        """What is decided, or leads so far, by the workload's digest; nothing is built or measured."""
        found: dict[str, Candidate] = {}
        for workload in workloads:
            candidate, known = self._recall(workload)
            if candidate is None and known:
                candidate = min(known, key=lambda one: known[one])
            if candidate is not None:
                found[workload.digest] = candidate
        return found

    def ranking(self, workload: Workload) -> dict[str, Any] | None:
        """What was measured of a workload, as it is kept; None where nothing is."""
        return read_decision(self.cache, self._key(workload), RANKING_FILE)

    @property
    def roofline(self) -> Roofline:
        """The machine's limits, from the cache or measured now. Raises BuildFailed."""
        if self._roofline is None:
            self._roofline = recall_roofline(self.cache, self.device, self.target)
        if self._roofline is None:
            self._roofline = measured = measure_roofline(self.target, self.clock)
            _log.info("roofline: %s", measured)
            if measured.is_plausible:  # else other work was in the way: measured again another time
                told = {"workload": "roofline", **measured.fields()}
                self._publish(_roofline_key(self.device, self.target), _ROOFLINE, told)
        return self._roofline

    # --- whose turn it is

    def _hold(
        self,
        contests: list[Contest],
        builders: ThreadPoolExecutor,
        began: float,
        seconds: float,
        tell: Callable[[float, str], None],
    ) -> None:
        """Give turns until the time is up or nothing is worth it."""

        def told(text: str) -> None:
            tell(min(1.0, (time.monotonic() - began) / max(seconds, 1e-3)), text)

        ordered = sorted(contests, key=lambda contest: -contest.num_calls * contest.limit_ns)
        for contest in ordered:  # the heaviest first: time may run out
            if time.monotonic() - began >= seconds:
                return
            contest.expect(self._likely(contest.workload))
            if contest.leader is None:
                contest.turn(1 + contest.num_templates, builders, told)
            if contest.leader is not None:
                self._note(contest.workload, contest.leader)
            self._rest(contests, contest)
        while time.monotonic() - began < seconds:
            total = sum(contest.num_calls * contest.best_ns for contest in contests if contest.leader is not None)
            worth_it = [one for one in contests if one.gain_ns > _least_share(one) * total]
            if not worth_it:
                return
            contest = max(worth_it, key=lambda one: one.gain_ns)
            contest.turn(_TURN, builders, told)
            self._rest(contests, contest)

    def _rest(self, contests: list[Contest], current: Contest) -> None:
        """Give operands back when there are too many: they are made anew in an instant."""
        if sum(contest.data_bytes for contest in contests) > _MAX_DATA_BYTES:
            for contest in contests:
                if contest is not current:
                    contest.rest()

    def _contest(self, workload: Workload, num_calls: int, known: Mapping[Candidate, float]) -> Contest:
        return Contest(
            workload,
            num_calls,
            self.target,
            self.roofline.of(workload),
            self.counts,
            known=known,
            clock=self.clock,
        )

    # --- what is known

    def _recall(self, workload: Workload) -> tuple[Candidate | None, Mapping[Candidate, float]]:
        """The decision, or what was measured before time was up."""
        if workload.digest in self._known:
            return self._known[workload.digest], {}
        told = self.ranking(workload)
        if told is None:
            return None, {}
        try:
            ranking = sorted(told["ranking"], key=lambda one: int(one["turn"]))
            measured = {Candidate.from_fields(one): float(one["ns"]) for one in ranking}
            complete = bool(told["complete"])
        except (ValueError, KeyError, IndexError, TypeError):
            return None, {}  # not understood: searched again
        measured = {one: ns for one, ns in measured.items() if template_named(one.template) is not None}
        if not complete or not measured:
            return None, measured
        candidate = min(measured, key=lambda one: measured[one])
        self.counts.num_remembered += 1
        self._remember(workload, candidate)
        return candidate, {}

    def _remember(self, workload: Workload, candidate: Candidate) -> None:
        self._known[workload.digest] = candidate
        self._note(workload, candidate)

    def _note(self, workload: Workload, candidate: Candidate) -> None:
        self._winners.setdefault(workload.op, Counter())[candidate] += 1
        self._alike[_likeness(workload)] = candidate

    def _likely(self, workload: Workload) -> list[Candidate]:
        """What won for the same layer at another batch, then for others of its operator."""
        alike = self._alike.get(_likeness(workload))
        often = [candidate for candidate, _ in self._winners.get(workload.op, Counter()).most_common(_NUM_LIKELY)]
        return list(dict.fromkeys([*([alike] if alike else []), *often]))

    def _keep(self, contest: Contest, ranking: list[Ranked]) -> None:
        told = {
            "workload": str(contest.workload),
            "complete": contest.is_complete,
            "limit_ns": contest.limit_ns,
            "num_waiting": contest.num_waiting,
            "ranking": [one.fields() for one in ranking],
        }
        self._publish(self._key(contest.workload), RANKING_FILE, told)

    def _publish(self, key: DecisionKey, file: str, told: Mapping[str, Any]) -> None:
        data = json.dumps(told, indent=2).encode()
        # An unfinished one gives way to what came after.
        self.cache.publish("decisions", key.digest, self.device.digest, {file: data}, {"key": key.fields}, replace=True)

    def _key(self, workload: Workload) -> DecisionKey:
        return DecisionKey(
            workload={**workload.fields(), "threads": self.target.num_threads},
            templates_sha256=self.sources.templates_sha256,
            precision=self.precision,
            device=self.device.digest,
            toolchain=toolchain_of(self.device),
        )


def recall_roofline(cache: KernelsCache, device: DeviceKey, target: CpuTarget) -> Roofline | None:
    """The machine's limits as they were measured for this device key; None where they were not."""
    key = _roofline_key(device, target)
    told = read_decision(cache, key, _ROOFLINE)
    try:
        return None if told is None else Roofline.from_fields(told)
    except (ValueError, KeyError, TypeError):
        return None


def _roofline_key(device: DeviceKey, target: CpuTarget) -> DecisionKey:
    """Part of the device key's record: it hangs on the machine and the threads alone."""
    return DecisionKey(
        workload={"op": "roofline", "version": 4, "threads": target.num_threads},
        templates_sha256="",
        precision="f32",
        device=device.digest,
        toolchain=toolchain_of(device),
    )


def _least_share(contest: Contest) -> float:
    return _NOT_WORTH_AGAIN if contest.known else _NOT_WORTH_IT


def _likeness(workload: Workload) -> str:
    """Names a layer whatever the batch: the operator and its weight."""
    weight = workload.inputs[1].shape if len(workload.inputs) > 1 else workload.inputs[0].shape[1:]
    return f"{workload.op} {weight} {workload.attributes}"
