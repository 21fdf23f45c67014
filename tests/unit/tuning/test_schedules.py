"""What is kept of a function's search, and told of it later: the time of the schedule that the function has."""

from __future__ import annotations

import math

import pytest

from hone.compiler.metaschedule import Progress, RemainingFunction, SearchResult
from hone.compiler.phases.schedule import SEARCHED, ScheduledFunction
from hone.kernels import DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources
from hone.tuning.contest import SearchCounts
from hone.tuning.decisions import SCHEDULE_FILE
from hone.tuning.schedules import FunctionSearch

FUNCTION = RemainingFunction(name="softmax", digest="f" * 64, func=None, num_calls=2, microseconds=1000.0)

FOUND = SearchResult("[]", 7.0, 2.0, 3, 0, is_complete=True)


class Searched(FunctionSearch):
    """A search that ends as a test says. `asked` is what it was to go on from."""

    result = SearchResult(None, 5.0, 5.0, 3, 0, "nothing was faster", is_complete=True)

    def find(self, model):
        return [FUNCTION]

    def search(self, function, seconds, tell, known):
        self.asked.append(known)
        return self.result


@pytest.fixture
def search(tmp_path):
    device = DeviceKey({"kind": "gpu", "name": "a GPU", "architecture": "sm_80"})
    search = Searched(KernelsCache(tmp_path / "cache"), device, Sources("t" * 64, "p" * 64), {"architecture": "80"})
    search.asked = []
    return search


def scheduled(rule, digest=FUNCTION.digest):
    return ScheduledFunction("softmax", digest, rule, 1000.0, True, 2)


def decide(search, result):
    search.result = result
    return search.decide(None, 60.0, SearchCounts(), lambda share, text: None)


def test_a_function_has_the_time_of_the_schedule_that_it_has(search):
    assert decide(search, FOUND) == {FUNCTION.digest: "[]"}
    assert search.nanoseconds(scheduled(SEARCHED)) == 2000.0
    # The record did not fit, say.
    assert search.nanoseconds(scheduled("reduction")) == 7000.0
    assert search.nanoseconds(scheduled(SEARCHED, "0" * 64)) is None


def test_where_nothing_was_faster_the_plain_schedule_has_its_time(search):
    assert decide(search, Searched.result) == {}
    assert search.nanoseconds(scheduled("reduction")) == 5000.0


def test_a_plain_schedule_that_tvm_refuses_is_a_result(search):
    broken = SearchResult(None, math.inf, math.inf, 0, 0, "the plain schedule does not build", is_complete=True)
    assert decide(search, broken) == {}
    assert search.nanoseconds(scheduled("reduction")) is None
    assert decide(search, FOUND) == {}, "it was searched again"


@pytest.mark.parametrize("reason", ["nothing was faster", "the machine could not build the plain schedule"])
def test_what_ended_for_want_of_something_before_it_began_is_not_kept(search, reason):
    assert decide(search, SearchResult(None, 5.0, 5.0, 0, 0, reason)) == {}
    assert decide(search, FOUND) == {FUNCTION.digest: "[]"}
    assert search.asked == [Progress(), Progress()]


def test_what_was_not_searched_to_its_end_serves_and_goes_on(search):
    progress = Progress(16, 5, (("[1]", 4.0), ("[2]", 5.0)))
    assert decide(search, SearchResult("[1]", 7.0, 4.0, 16, 1, progress=progress)) == {FUNCTION.digest: "[1]"}
    assert search.recall(None) == {FUNCTION.digest: "[1]"}
    assert search.nanoseconds(scheduled(SEARCHED)) == 4000.0
    further = Progress(32, 0, (("[3]", 3.0),))
    assert decide(search, SearchResult("[3]", 7.0, 3.0, 16, 0, is_complete=True, progress=further)) == {
        FUNCTION.digest: "[3]"
    }
    assert search.asked == [Progress(), progress]
    assert decide(search, FOUND) == {FUNCTION.digest: "[3]"}, "it was searched again"


def test_without_time_what_was_found_so_far_serves(search):
    decide(search, SearchResult("[1]", 7.0, 4.0, 16, 1, progress=Progress(16, 5, (("[1]", 4.0),))))
    assert search.decide(None, 0.0, SearchCounts(), lambda share, text: None) == {FUNCTION.digest: "[1]"}
    assert len(search.asked) == 1


def test_a_decision_that_does_not_say_whether_it_is_complete_is_not(search):
    """As older ones are."""
    decide(search, FOUND)
    key = search._key(FUNCTION.digest)
    search._cache.publish(
        "decisions", key.digest, key.device, {SCHEDULE_FILE: b'{"trace": null}'}, {"key": key.fields}, replace=True
    )
    assert decide(search, FOUND) == {FUNCTION.digest: "[]"}
    assert len(search.asked) == 2
