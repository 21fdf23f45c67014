"""The contest between candidates, with made-up templates, kernels and a clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hone.compiler.build import BuildFailed
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpp.compiler import CompilerFailed
from hone.compiler.templates.registry import templates_for
from hone.compiler.workload import TensorType, Workload
from hone.tuning import contest as module
from hone.tuning.contest import MAX_CANDIDATES, Contest, SearchCounts
from hone.tuning.operands import num_turns

VECTOR = TensorType((64,), "float32")
DOUBLING = Workload("double", (VECTOR,), VECTOR)
TARGET = CpuTarget.of_features("generic", ("avx2",), num_threads=1)
#: Nanoseconds of candidates in most tests: long enough that one call is a sample.
SLOW = 1_000_000


class Clock:
    """Nanoseconds that pass only while made-up kernels run."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Template:
    """Candidate i takes `times[i]` nanoseconds. `wrong`, `partial` and `broken` are those that compute something else,
    leave a part as it was, or do not compile; `unlucky` are those that the machine cannot build now."""

    def __init__(self, name, times, clock, *, wrong=(), partial=(), broken=(), unlucky=()):
        self.name, self.times, self.clock = name, times, clock
        self.wrong, self.partial, self.broken, self.unlucky = wrong, partial, broken, unlucky
        self.built: list[int] = []

    def matches(self, workload, target):
        return True

    def candidates(self, workload, target):
        return [Candidate.of(self.name, at=at) for at in range(len(self.times))]

    def packing(self, workload, candidate, target):
        return {}

    def digest(self, workload, candidate, target):
        return f"{self.name}{candidate['at']}"

    def build(self, workload, candidate, target):
        at = candidate["at"]
        self.built.append(at)
        if at in self.broken:
            raise BuildFailed("a made-up kernel", ValueError("it does not compile"))
        if at in self.unlucky:
            raise BuildFailed("a made-up kernel", CompilerFailed("g++", -9, ""))
        return Kernel(self, at)


class Kernel:
    def __init__(self, template, at):
        self.template, self.at = template, at
        self.name = self.digest = f"{template.name}{at}"

    def __call__(self, data, output):
        self.template.clock.now += self.template.times[self.at]
        data, output = np.from_dlpack(data), np.from_dlpack(output)
        half = len(output) // 2 if self.at in self.template.partial else len(output)
        output[:half] = data[:half] * (3 if self.at in self.template.wrong else 2)


@pytest.fixture
def builders():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def hold(monkeypatch, builders):
    """Run a contest of templates to its end."""

    def run(*templates, clock, limit_ns=1.0, known=None, turns=100):
        monkeypatch.setattr(module, "templates_for", lambda workload, target: templates)
        one = Contest(DOUBLING, 1, TARGET, limit_ns, SearchCounts(), known=known or {}, clock=clock)
        for _ in range(turns):
            if one.is_over:
                break
            one.turn(4, builders, lambda text: None)
        return one

    return run


def test_the_fastest_wins(hold):
    clock = Clock()
    template = Template("a", [5 * SLOW, 3 * SLOW, 2 * SLOW, 4 * SLOW], clock)
    one = hold(template, clock=clock)
    ranking = one.ranking()
    assert [ranked.candidate["at"] for ranked in ranking] == [2, 1, 3, 0]
    assert one.leader == Candidate.of("a", at=2)
    assert ranking[0].ns == 2 * SLOW


@pytest.mark.parametrize("fault", ["wrong", "partial", "broken"])
def test_who_computes_something_else_or_does_not_compile_is_out(hold, fault):
    clock = Clock()
    template = Template("a", [5 * SLOW, SLOW, 3 * SLOW], clock, **{fault: (1,)})
    one = hold(template, clock=clock)
    assert [ranked.candidate["at"] for ranked in one.ranking()] == [2, 0]
    assert one.counts.num_failed == 1


def test_whom_the_machine_could_not_build_was_not_tried(hold):
    """Nothing is held against such a candidate nor its template, and the contest is not complete without it."""
    clock = Clock()
    template = Template("a", [5 * SLOW, 4 * SLOW, 3 * SLOW, *[2 * SLOW] * 6], clock, unlucky=(0, 1, 2, 4, 5, 6, 7))
    one = hold(template, clock=clock)
    assert template.built == list(range(9)), "four in a row that are no better would have ended it"
    assert one.is_over and not one.is_complete
    known = {ranked.candidate: ranked.ns for ranked in one.ranking()}
    assert [candidate["at"] for candidate in known] == [3, 8]
    template.unlucky = ()
    again = hold(template, clock=clock, known=known)
    assert again.is_complete
    assert template.built[9:] == [0, 1, 2, 4, 5, 6, 7]


def test_a_template_that_is_out_by_what_was_measured_waits_for_nobody(hold):
    clock = Clock()
    fast = Template("fast", [SLOW] * 3, clock)
    slow = Template("slow", [9 * SLOW] * 5, clock, unlucky=(1,))
    one = hold(fast, slow, clock=clock)
    assert one.is_complete
    assert hold(Template("b", [SLOW] * 3, clock, broken=(1,)), clock=clock).is_complete


def test_one_workload_never_has_more_candidates_than_allowed(hold):
    clock = Clock()
    # Always better, so that patience plays no part.
    template = Template("a", [int(1000 * SLOW * 0.95**at) for at in range(120)], clock)
    one = hold(template, clock=clock)
    assert one.is_over
    assert len(template.built) == MAX_CANDIDATES
    assert one.num_waiting == 120 - MAX_CANDIDATES


def test_a_template_at_the_limit_of_the_machine_is_searched_no_more(hold):
    clock = Clock()
    template = Template("a", [SLOW + 1000] * 30, clock)
    hold(template, clock=clock, limit_ns=SLOW)
    assert len(template.built) <= 4


def test_one_that_passed_the_limit_goes_on(hold):
    clock = Clock()
    template = Template("a", [SLOW // 2, *([SLOW // 3] * 12)], clock)
    one = hold(template, clock=clock, limit_ns=SLOW)
    assert one.best_ns == SLOW // 3


def test_a_template_clearly_behind_is_dropped(hold):
    clock = Clock()
    fast = Template("fast", [SLOW] * 3, clock)
    slow = Template("slow", [2 * SLOW - at for at in range(40)], clock)
    hold(fast, slow, clock=clock)
    assert len(slow.built) <= 4


def test_patience_ends(hold):
    clock = Clock()
    template = Template("a", [SLOW] * 40, clock)
    one = hold(template, clock=clock)
    assert len(template.built) < 25
    assert one.is_over


def test_what_is_known_is_not_built_again(hold):
    clock = Clock()
    template = Template("a", [5 * SLOW, 3 * SLOW, 2 * SLOW], clock)
    known = {Candidate.of("a", at=0): 5.0 * SLOW, Candidate.of("a", at=1): 3.0 * SLOW}
    one = hold(template, clock=clock, known=known)
    assert template.built == [2]
    assert one.leader == Candidate.of("a", at=2)


def test_patience_that_was_used_up_stays_so(monkeypatch, builders):
    clock = Clock()
    times = [SLOW, *[2 * SLOW] * 29]
    monkeypatch.setattr(module, "templates_for", lambda workload, target: (Template("a", times, clock),))
    first = Contest(DOUBLING, 1, TARGET, 1.0, SearchCounts(), clock=clock)
    while not first.is_over:
        first.turn(1, builders, lambda text: None)
    ranking = sorted(first.ranking(), key=lambda one: one.turn)
    known = {one.candidate: one.ns for one in ranking}
    assert Contest(DOUBLING, 1, TARGET, 1.0, SearchCounts(), known=known, clock=clock).is_over
    # The same with the best one last: there is hope.
    turned = dict(reversed(known.items()))
    assert not Contest(DOUBLING, 1, TARGET, 1.0, SearchCounts(), known=turned, clock=clock).is_over


def test_likely_ones_come_first(monkeypatch, builders):
    clock = Clock()
    template = Template("a", [SLOW] * 10, clock)
    monkeypatch.setattr(module, "templates_for", lambda workload, target: (template,))
    one = Contest(DOUBLING, 1, TARGET, 1.0, SearchCounts(), clock=clock)
    one.expect([Candidate.of("a", at=7), Candidate.of("b", at=1), Candidate.of("a", at=5)])
    one.turn(3, builders, lambda text: None)
    assert sorted(template.built) == [0, 5, 7]


def test_hope_of_gain_falls_with_every_candidate_that_is_no_better(monkeypatch, builders):
    clock = Clock()
    template = Template("a", [SLOW] * 30, clock)
    monkeypatch.setattr(module, "templates_for", lambda workload, target: (template,))
    one = Contest(DOUBLING, 3, TARGET, 1.0, SearchCounts(), clock=clock)
    assert one.gain_ns == 0.0
    gains = []
    for _ in range(3):
        one.turn(2, builders, lambda text: None)
        gains.append(one.gain_ns)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > gains[-1] > 0


def test_operands_may_be_given_back_between_turns(monkeypatch, builders):
    clock = Clock()
    template = Template("a", [5 * SLOW, 4 * SLOW, 3 * SLOW, 2 * SLOW], clock, wrong=(3,))
    monkeypatch.setattr(module, "templates_for", lambda workload, target: (template,))
    one = Contest(DOUBLING, 1, TARGET, 1.0, SearchCounts(), clock=clock)
    one.turn(2, builders, lambda text: None)
    assert one.data_bytes > 0
    one.rest()
    assert one.data_bytes == 0
    one.turn(2, builders, lambda text: None)
    assert one.leader == Candidate.of("a", at=2)


def test_weights_are_measured_as_cold_as_a_model_has_them():
    """All copies together exceed the second cache twice; what is far smaller or far larger needs no copies."""
    target = CpuTarget.of_features("haswell", ("avx2", "fma"), caches={1: 32 << 10, 2: 1 << 20})
    assert num_turns(0, target) == num_turns(4 << 10, target) == num_turns(4 << 20, target) == 1
    for num_bytes in (100 << 10, 589_824, 1 << 20):
        assert 2 * target.l2_bytes <= num_turns(num_bytes, target) * num_bytes < 2 * target.l2_bytes + num_bytes


def test_turns_have_the_same_numbers_in_weights_of_their_own():
    shape = TensorType((256, 64, 3, 3), "float32")
    attributes = {"dilation": (1, 1), "groups": 1, "padding": (1,) * 4, "strides": (1, 1), "weights": (1,)}
    workload = Workload(
        "conv2d", (TensorType((1, 4, 8, 8, 16), "float32"), shape), TensorType((1, 16, 8, 8, 16), "float32"),
        tuple(sorted(attributes.items())),
    )  # fmt: skip
    target = CpuTarget.detect(num_threads=1)
    contest = Contest(workload, 1, target, 0.0, SearchCounts())
    template = templates_for(workload, target)[0]
    candidate = template.candidates(workload, target)[0]
    turns = contest._turns(candidate, contest._tensors(candidate))
    assert len(turns) > 1
    (data, weight, _), *others = [[np.from_dlpack(tensor) for tensor in arguments] for arguments in turns]
    for other_data, other_weight, _ in others:
        assert np.shares_memory(data, other_data)
        assert np.array_equal(weight, other_weight) and not np.shares_memory(weight, other_weight)
