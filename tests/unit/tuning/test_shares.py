"""What children of several kinds of device are promised of the memory that somebody set for all of them."""

from __future__ import annotations

import pytest

from hone.tuning.shares import MemoryShares


@pytest.fixture
def taken():
    return {}


@pytest.fixture
def shares(taken):
    return MemoryShares(600, 3, lambda kind: taken.get(kind, 0))


def test_alone_it_is_promised_all_and_nobody_joins(shares):
    assert shares.has_room("a", [])
    assert shares.promise("a", 1) == 600
    assert not shares.has_room("b", ["a"])
    shares.release("a")
    assert shares.has_room("b", [])


def test_together_each_is_promised_its_part(shares):
    assert [shares.promise(kind, 3) for kind in "abc"] == [200, 200, 200]
    shares.release("c")
    assert shares.has_room("c", ["a", "b"])
    shares.release("b")
    assert shares.promise("b", 2) == 300, "c had no work any more"
    assert not shares.has_room("c", ["a", "b"]), "until b ends"
    shares.release("b")
    assert shares.promise("b", 3) == 200
    assert shares.has_room("c", ["a", "b"])
    assert shares.promise("c", 3) == 200


def test_who_comes_later_is_promised_no_more_than_is_left(shares):
    assert shares.promise("a", 3) == 200
    assert shares.promise("b", 3) == 200
    assert shares.promise("c", 1) == 200


def test_a_job_that_has_no_child_yet_gets_its_part(shares):
    assert shares.promise("a", 2) == 300
    assert shares.has_room("b", ["a"])
    assert not shares.has_room("c", ["a", "b"]), "b is to have 200 of the 300 that are left"


def test_what_others_leave_may_be_taken_and_is_waited_for_then(shares, taken):
    assert shares.promise("a", 2) == 300
    taken["a"] = 500
    assert not shares.has_room("b", ["a"])
    taken["a"] = 350
    assert shares.has_room("b", ["a"])
    assert shares.promise("b", 2) == 250
    taken["b"] = 100
    assert (shares.others_bytes("a"), shares.others_bytes("b"), shares.others_bytes("c")) == (100, 350, 450)


def test_nobody_is_promised_less_than_its_part(shares, taken):
    """A child follows another of its job at once; what took more than it was promised meanwhile is at fault."""
    shares.promise("a", 3)
    taken["a"] = 590
    assert shares.promise("b", 2) == 200
