"""What is kept of a function's search, and told of it later: the time of the schedule that the function has."""

from __future__ import annotations

import math

import pytest

from hone.compiler.metaschedule import RemainingFunction, SearchResult
from hone.compiler.phases.schedule import SEARCHED, ScheduledFunction
from hone.kernels import DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources
from hone.tuning.contest import SearchCounts
from hone.tuning.schedules import FunctionSearch

FUNCTION = RemainingFunction(name="softmax", digest="f" * 64, func=None, num_calls=2, microseconds=1000.0)


class Searched(FunctionSearch):
    """A search that ends as a test says."""

    result = SearchResult(None, 5.0, 5.0, 3, 0, "nothing was faster")

    def find(self, model):
        return [FUNCTION]

    def search(self, function, seconds, tell):
        return self.result


@pytest.fixture
def search(tmp_path):
    device = DeviceKey({"kind": "gpu", "name": "a GPU", "architecture": "sm_80"})
    return Searched(KernelsCache(tmp_path / "cache"), device, Sources("t" * 64, "p" * 64), {"architecture": "80"})


def scheduled(rule, digest=FUNCTION.digest):
    return ScheduledFunction("softmax", digest, rule, 1000.0, True, 2)


def decide(search, result):
    search.result = result
    return search.decide(None, 60.0, SearchCounts(), lambda share, text: None)


def test_a_function_has_the_time_of_the_schedule_that_it_has(search):
    assert decide(search, SearchResult("[]", 7.0, 2.0, 3, 0)) == {FUNCTION.digest: "[]"}
    assert search.nanoseconds(scheduled(SEARCHED)) == 2000.0
    # The record did not fit, say.
    assert search.nanoseconds(scheduled("reduction")) == 7000.0
    assert search.nanoseconds(scheduled(SEARCHED, "0" * 64)) is None


def test_where_nothing_was_faster_the_plain_schedule_has_its_time(search):
    assert decide(search, Searched.result) == {}
    assert search.nanoseconds(scheduled("reduction")) == 5000.0


def test_what_could_not_be_timed_has_no_time_and_is_remembered(search):
    broken = SearchResult(None, math.inf, math.inf, 0, 0, "the plain schedule does not build")
    assert decide(search, broken) == {}
    assert search.nanoseconds(scheduled("reduction")) is None
    assert decide(search, SearchResult("[]", 7.0, 2.0, 3, 0)) == {}, "it was not searched again"
