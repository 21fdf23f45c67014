"""A model version has so many specializations at once, and no more."""

from __future__ import annotations

import logging

import pytest

from hone.specialization import Signature
from hone.tuning.places import MAX_SIGNATURES, Choice, choose
from tests.unit.tuning.fakes import PASS, Engine, Rig


def one(*shape):
    return Signature.of([("IN", "FP32", shape)])


A, B, C, D, E = (one(1, size) for size in range(1, 6))


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    assert rig.tuner.stop()


def ask(rig, sizes, count=100, rows=1):
    for size in sizes:
        for _ in range(count):
            rig.traffic.ran("m", 1, one(rows, size), 0.001)
    rig.pass_time(100)
    rig.run()


def sizes_of(buckets):
    return {int(text.partition(",")[2].rstrip("]")) for text in buckets}


# --- the choice


def test_free_places_go_to_the_configured_first_and_then_to_the_most_used():
    uses = {B: 10.0, C: 30.0, D: 20.0}
    assert choose([], configured=[A], seen=[B, C, D], uses=uses, limit=3) == Choice((A, C, D))


def test_whoever_is_used_far_more_takes_the_place_of_the_least_used():
    uses = {A: 100.0, B: 40.0, C: 90.0}
    assert choose([A, B], configured=[], seen=[A, B, C], uses=uses, limit=2) == Choice((C,), (B,))


@pytest.mark.parametrize(("least", "newcomer"), [(40, 79), (1, 20), (0, 19)])
def test_a_little_more_moves_nothing(least, newcomer):
    assert choose([A], configured=[], seen=[A, B], uses={A: least, B: newcomer}, limit=1) == Choice()


def test_two_that_take_turns_do_not_take_each_others_place():
    held, counts, moves = [A], {A: 100.0, B: 0.0}, 0
    for turn in range(1, 50):
        counts[B if turn % 2 else A] += 100
        choice = choose(held, configured=[], seen=[A, B], uses=counts, limit=1)
        moves += len(choice.retired)
        held = [one for one in held if one not in choice.retired] + list(choice.added)
    assert moves == 0


def test_what_is_configured_keeps_its_place_and_takes_anybodys():
    uses = {B: 1000.0, C: 5000.0}
    assert choose([A], configured=[A], seen=[B], uses=uses, limit=1) == Choice()
    assert choose([B, C], configured=[A], seen=[B, C], uses=uses, limit=2) == Choice((A,), (B,))
    assert choose([], configured=[A, B, C], seen=[], uses={}, limit=2) == Choice((A, B))


def test_what_is_being_made_keeps_its_place():
    assert choose([A], configured=[B], seen=[], uses={}, busy={A}, limit=1) == Choice()
    assert choose([A], configured=[], seen=[B], uses={B: 1000.0}, busy={A}, limit=1) == Choice()


def test_more_than_there_are_places_for_go():
    assert choose([A, B, C], configured=[], seen=[], uses={A: 3.0, B: 1.0, C: 2.0}, limit=1) == Choice((), (B, C))


# --- the tuner


def test_shifting_traffic_never_has_more_than_its_places(rig):
    rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0)
    count = 40
    for phase in range(5):
        ask(rig, range(12 * phase + 1, 12 * phase + 13), count)
        count *= 3
        assert len(rig.buckets()) <= MAX_SIGNATURES
        assert len(rig.serving.running()) <= MAX_SIGNATURES
        assert sum(not engine.closed for engine in rig.engines.values()) == len(rig.serving.running())
    now = set(range(49, 61))
    assert now <= sizes_of(rig.buckets()), "what is asked for now is tuned"
    assert sizes_of(rig.serving.running()) == sizes_of(rig.buckets())
    retired = [line for line in rig.status()["history"] if line["event"] == "retired"]
    assert retired
    assert retired[0]["reason"] == "seldom used of late: its place is another's"
    assert rig.tuner.counters.num_rollbacks == {}, "nothing was wrong with it"
    assert len(rig.watch.watched()) == len(rig.serving.running())


def test_traffic_that_stays_as_it_is_moves_nothing(rig):
    rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0)
    ask(rig, range(1, 25))
    for _ in range(10):
        ask(rig, range(1, 25))
    assert len(rig.buckets()) == MAX_SIGNATURES
    assert "retired" not in rig.events()
    assert len(rig.children()) == 1


def test_what_comes_back_is_in_the_cache(rig):
    rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0)
    ask(rig, range(1, 17))
    ask(rig, range(20, 36), 1000)
    assert 1 not in sizes_of(rig.buckets())
    made = len(rig.children())
    ask(rig, [1], 10_000)
    assert 1 in sizes_of(rig.serving.running())
    assert len(rig.children()) == made


def test_what_waits_to_be_made_and_is_retired_is_not_made(rig):
    rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0)
    for sizes, count in ((range(1, 17), 100), (range(20, 36), 1000)):
        for size in sizes:
            for _ in range(count):
                rig.traffic.ran("m", 1, one(1, size), 0.001)
        rig.pass_time(100)
        rig.tuner.attend()
    rig.run()
    [tasks] = rig.children()
    assert len(tasks) == MAX_SIGNATURES
    assert sizes_of(rig.serving.running()) == set(range(20, 36))


def test_a_configuration_that_names_more_than_there_are_places_for_is_told_of(rig, caplog):
    caplog.set_level(logging.WARNING)
    named = "; ".join(f"IN:1x{size}" for size in range(1, 21))
    ref = rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0, parameters={"signatures": named})
    rig.run()
    assert sizes_of(rig.serving.running()) == set(range(1, 17))
    told = (
        "its configuration asks for 20 signatures, of which the first 16 are specialized; without: "
        "IN:FP32[1,17], IN:FP32[1,18], IN:FP32[1,19] and 1 more"
    )
    assert (rig.status()["state"], rig.status()["reason"]) == ("tuned", told)
    rig.pass_time(100)
    rig.run()
    assert caplog.text.count(told) == 1
    rig.model(
        {"*": PASS}, baseline=rig.serving.versions[ref].baseline, max_batch_size=0, parameters={"signatures": "IN:1x1"}
    )
    rig.run()
    assert rig.status()["reason"] == ""


def test_what_a_new_configuration_names_takes_the_place_of_what_traffic_brought(rig):
    ref = rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=0)
    ask(rig, range(1, 17))
    rig.model(
        {"*": PASS}, baseline=rig.serving.versions[ref].baseline, max_batch_size=0, parameters={"signatures": "IN:1x99"}
    )
    rig.run()
    assert 99 in sizes_of(rig.serving.running())
    assert len(rig.serving.running()) == len(rig.buckets()) == MAX_SIGNATURES


def test_batches_that_are_used_come_before_those_that_are_not(rig):
    rig.model({"*": PASS}, baseline=Engine(shape=(-1, -1)), max_batch_size=8)
    ask(rig, range(1, 9))
    assert len(rig.buckets()) == MAX_SIGNATURES
    assert {text for text in rig.buckets() if text.startswith("IN:FP32[1,")} == {f"IN:FP32[1,{n}]" for n in range(1, 9)}
