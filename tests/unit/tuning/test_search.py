"""Deciding workloads: whose turn it is, and what is remembered. With made-up templates in a real cache."""

from __future__ import annotations

import dataclasses

import pytest

from hone.compiler.roofline import Roofline
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.workload import TensorType, Workload
from hone.kernels import DeviceKey, KernelsCache
from hone.tuning import contest as contest_module
from hone.tuning import search as search_module
from hone.tuning.artifacts import Sources
from hone.tuning.search import Search
from tests.unit.tuning.test_contest import SLOW, Clock, Template

TARGET = CpuTarget.of_features("generic", ("avx2",), num_threads=1)
SOURCES = Sources("t", "p")
LIMITS = Roofline(1, 100.0, 100.0, 100.0, ((1 << 30, 1000.0),))


def workload(size: int) -> Workload:
    tensor = TensorType((size,), "float32")
    return Workload("double", (tensor,), tensor)


@pytest.fixture
def cache(tmp_path):
    return KernelsCache(tmp_path / "cache")


@pytest.fixture
def search(cache, monkeypatch):
    """A search over one made-up template of these times; every call makes another, with the same cache."""
    measured = []

    def measure(target, clock):
        measured.append(target)
        return LIMITS

    monkeypatch.setattr(search_module, "measure_roofline", measure)
    monkeypatch.setattr(search_module, "template_named", lambda name: name)

    def make(times, *, sources=SOURCES):
        clock = Clock()
        template = Template("a", times, clock)
        monkeypatch.setattr(contest_module, "templates_for", lambda workload, target: (template,))
        device = DeviceKey({"kind": "cpu", "name": "test", "architecture": "x86_64", "features": []})
        return Search(cache, device, TARGET, sources, clock=clock), template

    make.measured = measured
    return make


def decide(one: Search, *workloads: Workload, seconds: float = 60.0) -> dict[str, Candidate]:
    return one.decide(dict.fromkeys(workloads, 1), seconds, lambda share, text: None)


TIMES = [4 * SLOW, 2 * SLOW, 3 * SLOW]


def test_the_best_candidate_is_chosen_and_its_kernel_at_hand(search):
    one, _ = search(TIMES)
    assert decide(one, workload(64)) == {workload(64).digest: Candidate.of("a", at=1)}
    assert list(one.built) == ["a1"]


def test_a_decision_is_not_made_twice_in_one_cache(search):
    one, _ = search(TIMES)
    decide(one, workload(64))
    again, template = search(TIMES)
    assert decide(again, workload(64), workload(32))[workload(64).digest] == Candidate.of("a", at=1)
    assert again.counts.num_remembered == 1
    assert len(template.built) == 3  # those of the other workload
    assert again.recall([workload(64)]) == {workload(64).digest: Candidate.of("a", at=1)}


def test_other_templates_decide_anew(search):
    one, _ = search(TIMES)
    decide(one, workload(64))
    other, template = search(TIMES, sources=Sources("others", "p"))
    decide(other, workload(64))
    assert len(template.built) == 3


def test_without_time_nothing_is_decided(search):
    one, template = search(TIMES)
    assert decide(one, workload(64), seconds=0.0) == {}
    assert template.built == []


def test_a_search_that_was_not_finished_goes_on(search, monkeypatch):
    one, template = search([SLOW * (20 - at) for at in range(12)])
    # The time is up after the first turn.
    times = iter([0.0, 0.0, *[100.0] * 1000])
    with monkeypatch.context() as patch:
        patch.setattr(search_module.time, "monotonic", lambda: next(times))
        first = decide(one, workload(64), seconds=50.0)
    tried = list(template.built)
    assert 0 < len(tried) < 12
    assert first == {workload(64).digest: Candidate.of("a", at=max(tried))}
    again, template = search([SLOW * (20 - at) for at in range(12)])
    assert again.recall([workload(64)]) == first
    assert decide(again, workload(64)) == {workload(64).digest: Candidate.of("a", at=11)}
    assert not set(template.built) & set(tried)


def test_a_search_whose_compilers_were_killed_goes_on(search):
    one, template = search(TIMES)
    template.unlucky = (1,)
    assert decide(one, workload(64)) == {workload(64).digest: Candidate.of("a", at=2)}
    assert one.ranking(workload(64))["complete"] is False
    again, template = search(TIMES)
    assert decide(again, workload(64)) == {workload(64).digest: Candidate.of("a", at=1)}
    assert template.built == [1]
    assert again.ranking(workload(64))["complete"] is True


def test_a_search_that_could_build_nothing_leaves_nothing(search):
    one, template = search(TIMES)
    template.unlucky = (0, 1, 2)
    assert decide(one, workload(64)) == {}
    assert one.ranking(workload(64)) is None


def test_a_candidate_that_does_not_compile_is_a_result(search):
    one, template = search(TIMES)
    template.broken = (1,)
    decide(one, workload(64))
    again, template = search(TIMES)
    assert decide(again, workload(64)) == {workload(64).digest: Candidate.of("a", at=2)}
    assert template.built == []


def test_what_one_model_found_not_worth_it_another_leaves_alone(search, monkeypatch):
    one, _ = search([SLOW] * 40)
    monkeypatch.setattr(search_module, "_NOT_WORTH_IT", 0.3)
    first = decide(one, workload(64))
    monkeypatch.setattr(search_module, "_NOT_WORTH_AGAIN", 0.3)
    monkeypatch.setattr(search_module, "_NOT_WORTH_IT", 0.001)
    again, template = search([SLOW] * 40)
    assert decide(again, workload(64)) == first
    assert template.built == []
    assert again.counts.num_remembered == 1


def test_what_won_for_one_batch_is_tried_first_for_another(search):
    one, template = search([5 * SLOW, 5 * SLOW, 5 * SLOW, 5 * SLOW, 5 * SLOW, SLOW])
    decide(one, workload(64))
    template.built.clear()
    decide(one, workload(128))
    assert 5 in template.built[:2]


def test_the_limits_are_measured_once_a_machine(search):
    one, _ = search(TIMES)
    decide(one, workload(64))
    again, _ = search(TIMES)
    decide(again, workload(32))
    assert again.roofline == LIMITS
    assert len(search.measured) == 1


def test_limits_that_other_work_got_in_the_way_of_are_not_kept(search, monkeypatch):
    poor = dataclasses.replace(LIMITS, num_threads=4)
    monkeypatch.setattr(search_module, "measure_roofline", lambda target, clock: poor)
    one, _ = search(TIMES)
    assert one.roofline == poor
    monkeypatch.setattr(search_module, "measure_roofline", lambda target, clock: LIMITS)
    again, _ = search(TIMES)
    assert again.roofline == LIMITS
