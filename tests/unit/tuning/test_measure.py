"""Comparisons on scripted rounds and scripted clocks: no test here takes the time it speaks of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hone.tuning.activity import Activity
from hone.tuning.measure import (
    Comparison,
    LocalRunner,
    Patience,
    Plan,
    Reference,
    Round,
    compare,
    wait_for_idle_threads,
)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Scripted:
    """A Runner whose rounds a function makes up; each takes 10 ms of the clock."""

    def __init__(self, clock: Clock, make: Callable[[int], Round], seconds: float = 0.01) -> None:
        self.clock, self.make, self.seconds, self.num = clock, make, seconds, 0
        self.patience: list[float] = []

    def round(self, number: int, patience_seconds: float) -> Round:
        assert number == self.num
        self.num += 1
        self.patience.append(patience_seconds)
        self.clock.pass_seconds(self.seconds)
        return self.make(number)


DEFAULT = Plan()
GENERATOR = np.random.default_rng(3)


def noise(share: float = 0.02) -> float:
    return float(GENERATOR.normal(1.0, share))


def steady(ratio: float, quiet: bool = True) -> Callable[[int], Round]:
    return lambda number: Round(1e6 * noise(), 1e6 * ratio * noise(), (100.0, 100.0), quiet)


def compared(make: Callable[[int], Round], plan: Plan = DEFAULT, seconds: float = 0.01) -> tuple[Comparison, Scripted]:
    clock = Clock()
    runner = Scripted(clock, make, seconds)
    found = compare(runner, plan, clock=clock)
    return found, runner


def test_much_faster_is_certain_at_the_first_look():
    found, runner = compared(steady(0.5))
    assert found.is_faster(0.03)
    assert not found.provisional
    assert 1.9 < found.speedup < 2.1
    assert runner.num == 10


def test_much_slower_is_certain_at_the_first_look():
    found, runner = compared(steady(1.5))
    assert found.is_not_faster(0.03)
    assert found.is_slower()
    assert runner.num == 10


@pytest.mark.parametrize("ratio", [1.0, 0.985])
def test_equal_or_a_little_faster_is_not_faster_by_the_margin(ratio):
    found, runner = compared(steady(ratio))
    assert not found.is_faster(0.03)
    assert runner.num <= 80


def test_a_drift_of_the_machine_that_both_feel_does_not_change_the_ratio():
    def slowing(number: int) -> Round:
        factor = 1.0 + number / 20
        # within the reference's tolerance: only pairing helps
        return Round(1e6 * factor, 0.9e6 * factor, (100.0, 100.0), True)

    found, _ = compared(slowing)
    assert found.ratio.value == pytest.approx(0.9)
    assert found.is_faster(0.03)


def test_rounds_in_which_the_reference_is_off_are_dropped():
    def disturbed(number: int) -> Round:
        if number % 3 == 0:  # a neighbour hits the candidate
            return Round(1e6, 9e6, (100.0, 150.0), True)
        return Round(1e6 * noise(), 0.8e6 * noise(), (100.0, 101.0), True)

    found, _ = compared(disturbed)
    assert found.num_dropped > 0
    assert found.speedup == pytest.approx(1.25, rel=0.05)


def test_overlapped_rounds_are_left_out_while_quiet_ones_come():
    def mixed(number: int) -> Round:
        return Round(1e6, 5e6, (100.0, 100.0), False) if number % 2 else Round(1e6, 0.5e6, (100.0, 100.0), True)

    found, runner = compared(mixed)
    assert found.is_faster(0.03)
    assert (found.num_rounds, found.num_quiet, found.provisional) == (10, 10, False)
    assert runner.num == 19


def test_without_quiet_rounds_overlapped_ones_count_and_the_result_is_provisional():
    found, runner = compared(steady(0.5, quiet=False), seconds=1.0)
    assert found.provisional
    assert found.num_quiet == 0
    assert found.is_faster(0.03)
    assert runner.num == 10, "nobody waits for quiet rounds that do not come"


def test_overlapped_rounds_are_looked_at_as_often_as_quiet_ones_and_no_longer_waited_for():
    found, runner = compared(steady(0.985, quiet=False))
    assert found.provisional
    assert not found.is_faster(0.03)
    assert runner.num == found.num_rounds == 80
    assert runner.patience == [DEFAULT.wait_seconds] * 10 + [0.0] * 70


def test_what_one_comparison_learned_of_the_load_holds_for_the_next_until_the_load_ends():
    patience, clock = Patience(), Clock()

    def waited(quiet: bool) -> list[float]:
        runner = Scripted(clock, steady(1 / 1.03, quiet))
        compare(runner, DEFAULT, patience=patience, clock=clock)
        return runner.patience

    assert any(waited(quiet=False))
    assert not any(waited(quiet=False))
    assert patience.waits is False
    assert set(waited(quiet=True)) == {0.0, DEFAULT.wait_seconds}, "it waits again once rounds were quiet"
    assert patience.waits


def test_overlapped_equal_subjects_pass_as_faster_no_more_often_than_stated():
    wrong = 0
    for _ in range(300):
        clock = Clock()
        found = compare(Scripted(clock, steady(1.0 / 1.03, quiet=False)), Plan(), clock=clock)
        wrong += found.is_faster(0.03)
    assert wrong <= 300 * 0.01 + 8


def test_the_time_limit_leaves_the_rounds_of_the_first_look():
    found, runner = compared(steady(1.0), Plan(seconds=1.0), seconds=5.0)
    assert runner.num == 10
    assert found.num_rounds == 10


def wild(ratio: float) -> Callable[[int], Round]:
    def make(number: int) -> Round:
        disturbed = float(GENERATOR.uniform(1.0, 6.0))
        reference = GENERATOR.uniform(100.0, 600.0, 2).tolist()
        return Round(1e6 * disturbed * noise(0.3), 1e6 * ratio * disturbed * noise(0.3), tuple(reference), True)

    return make


def test_on_a_machine_without_rest_all_rounds_count_provisionally():
    found, runner = compared(wild(0.4))
    assert found.provisional
    assert runner.num == 80, "more rounds would be no better"
    assert found.is_faster(0.03)
    found, _ = compared(wild(1.0))
    assert found.provisional
    assert not found.is_faster(0.03)


def test_equal_subjects_pass_as_faster_no_more_often_than_stated():
    wrong = 0
    for _ in range(300):
        clock = Clock()
        found = compare(Scripted(clock, steady(1.0 / 1.03)), Plan(), clock=clock)
        assert isinstance(found, Comparison)
        wrong += found.is_faster(0.03)
    assert wrong <= 300 * 0.01 + 8


def test_progress_never_falls_and_is_told():
    told: list[float] = []
    clock = Clock()
    compare(Scripted(clock, steady(0.97)), Plan(), clock=clock, tell=told.append)
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1.0


@pytest.mark.parametrize("looks", [(), (10, 5), (10, 10), (0, 5)])
def test_looks_must_rise(looks):
    with pytest.raises(ValueError, match="looks: expected rising numbers"):
        Plan(looks=looks)


def test_json_has_all_numbers_and_no_infinity():
    found, _ = compared(steady(0.5), Plan(looks=(3,), error=0.01, seconds=0.01))
    told = found.to_json()
    assert told["ratio"][0] is None, "three samples bound nothing"
    assert told["speedup"] == found.speedup
    assert told["num_rounds"] == 3


# --- the runner of this process


class Timed:
    """Subjects that take scripted time, on one clock with the reference."""

    def __init__(self, baseline_ms: float, candidate_ms: float) -> None:
        self.clock = Clock()
        self.calls: list[tuple[str, int]] = []
        self.inputs = [{"IN": np.full(1, i, np.float32)} for i in range(3)]
        self.activity = Activity(7, 7)
        self.runner = LocalRunner(
            self.subject("baseline", baseline_ms),
            self.subject("candidate", candidate_ms),
            self.inputs,
            activity=lambda: self.activity,
            reference=lambda: self.clock.pass_seconds(0.0001),
            clock=self.clock,
            sleep=self.clock.pass_seconds,
        )

    def subject(self, name, ms):
        def call(inputs):
            self.calls.append((name, int(inputs["IN"][0])))
            self.clock.pass_seconds(ms / 1e3)

        return call


def test_a_round_times_both_in_turns():
    timed = Timed(4.0, 1.0)
    rounds = [timed.runner.round(number, 0.0) for number in range(2)]
    assert [(r.baseline_ns, r.candidate_ns) for r in rounds] == [(4e6, 1e6)] * 2
    assert all(r.quiet and r.reference_ns == (1e5, 1e5) for r in rounds)
    order = list(dict.fromkeys(name for name, _ in timed.calls[: len(timed.calls) // 2]))
    assert order == ["baseline", "candidate"]
    order = list(dict.fromkeys(name for name, _ in timed.calls[len(timed.calls) // 2 :]))
    assert order == ["candidate", "baseline"]


def test_inputs_rotate_and_both_get_the_same():
    timed = Timed(2.0, 2.0)
    for number in range(3):
        timed.runner.round(number, 0.0)
    used = {name: [i for n, i in timed.calls if n == name] for name in ("baseline", "candidate")}
    assert used["baseline"] == used["candidate"]
    assert set(used["baseline"]) == {0, 1, 2}


def test_short_calls_are_repeated_to_fill_a_sample():
    timed = Timed(0.01, 0.002)
    found = timed.runner.round(0, 0.0)
    assert (found.baseline_ns, found.candidate_ns) == (1e4, 2e3)
    assert sum(name == "baseline" for name, _ in timed.calls) == 151
    assert sum(name == "candidate" for name, _ in timed.calls) == 151


def test_what_interrupts_a_few_of_many_calls_does_not_count():
    timed = Timed(0.01, 0.01)
    inner = timed.runner.candidate

    def interrupted(inputs):
        inner(inputs)
        if len(timed.calls) % 40 == 0:
            timed.clock.pass_seconds(0.002)

    timed.runner.candidate = interrupted
    assert timed.runner.round(0, 0.0).candidate_ns == pytest.approx(1e4)


def test_long_calls_run_once():
    timed = Timed(900.0, 30.0)
    timed.runner.round(0, 0.0)
    assert len(timed.calls) == 2


def test_a_round_with_serving_in_it_is_not_quiet():
    timed = Timed(1.0, 1.0)
    inner = timed.runner.candidate

    def serving_meanwhile(inputs):
        timed.activity = Activity(8, 8)
        inner(inputs)

    timed.runner.candidate = serving_meanwhile
    assert not timed.runner.round(0, 0.0).quiet
    assert timed.runner.round(1, 0.0).quiet


def test_a_round_waits_for_requests_to_finish_but_not_for_ever():
    timed = Timed(1.0, 1.0)
    timed.activity = Activity(8, 7)
    began = timed.clock()
    assert not timed.runner.round(0, 0.5).quiet
    assert timed.clock() - began >= 0.5e9


def test_the_reference_and_the_wait_for_idle_threads_work_here():
    Reference()()
    wait_for_idle_threads(0.05)
