from __future__ import annotations

import threading

import numpy as np
import pytest

from hone.repository import parse_signatures
from hone.specialization import Signature
from hone.tuning.settings import model_tuning
from hone.tuning.signatures import (
    SpaceSaving,
    Traffic,
    batch_buckets,
    seen_signatures,
    wanted_signatures,
)
from hone.types import TensorSpec

IMAGE = TensorSpec("IMAGE", "FP32", (-1, 3, -1, -1))
FLAG = TensorSpec("FLAG", "BOOL", (1,))


def one(*shape):
    return Signature.of([("IN", "FP32", shape)])


def test_signatures_are_equal_whatever_the_order_and_survive_json():
    first = Signature.of([("B", "INT64", (2,)), ("A", "FP32", (2, 3))])
    assert first == Signature.of([("A", "FP32", (2, 3)), ("B", "INT64", (2,))])
    assert first.text == "A:FP32[2,3] B:INT64[2]"
    assert Signature.from_json(first.to_json()) == first
    assert first.rows == 2
    assert first.with_rows(5).text == "A:FP32[5,3] B:INT64[5]"
    assert first.fits({"A": np.zeros((2, 3)), "B": np.zeros(2)})
    assert not first.fits({"A": np.zeros((2, 3))})


@pytest.mark.parametrize(
    ("largest", "buckets"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_buckets_double_up_to_the_largest_batch(largest, buckets):
    assert batch_buckets(largest) == buckets


def test_fixed_shapes_get_every_bucket():
    wanted = wanted_signatures([TensorSpec("IN", "FP32", (-1, 4))], 4)
    assert [s.text for s in wanted] == ["IN:FP32[1,4]", "IN:FP32[2,4]", "IN:FP32[4,4]"]


def test_models_that_do_not_batch_get_their_own_shape():
    assert wanted_signatures([TensorSpec("IN", "FP32", (2, 4))], 0) == [one(2, 4)]
    assert wanted_signatures([TensorSpec("IN", "FP32", (-1, 4))], 0) == []


def test_variable_shapes_come_from_names_and_traffic():
    wanted = wanted_signatures([TensorSpec("IN", "FP32", (-1, -1))], 2, named=[one(1, 3)])
    assert [s.text for s in wanted] == ["IN:FP32[1,3]", "IN:FP32[2,3]"]
    assert seen_signatures([one(7, 5), one(2, 5)], 2) == [one(1, 5), one(2, 5)]
    assert seen_signatures([one(7, 5), one(2, 5)], 0) == [one(7, 5), one(2, 5)]


def test_what_has_no_items_is_left_to_the_baseline():
    empty, some = one(1, 0), one(1, 3)
    assert seen_signatures([empty, some], 0) == [some]
    assert wanted_signatures([TensorSpec("IN", "FP32", (-1, -1))], 2, named=[empty]) == []
    assert wanted_signatures([TensorSpec("IN", "FP32", (-1, 0))], 2) == []
    assert seen_signatures([one(0, 3)], 1) == [some]


def test_signatures_in_the_configuration():
    found = parse_signatures(" IMAGE:1x3x224x224 ; IMAGE:2x3x64x64,FLAG:1", [IMAGE, FLAG])
    assert [s.text for s in found] == [
        "FLAG:BOOL[1] IMAGE:FP32[1,3,224,224]",
        "FLAG:BOOL[1] IMAGE:FP32[2,3,64,64]",
    ]
    assert parse_signatures("X:scalar", [TensorSpec("X", "FP32", ())])[0].shapes == {"X": ()}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("IMAGE", "expected NAME:DIMxDIM, as in 'IN:1x3x224x224', found 'IMAGE'"),
        ("IMAGE:1x3x0x4", "expected NAME:DIMxDIM"),
        ("OTHER:1", "unknown input 'OTHER'"),
        ("IMAGE:1x4x2x2", r"input 'IMAGE': expected a shape that fits \[-1, 3, -1, -1\], found \[1, 4, 2, 2\]"),
        ("IMAGE:1x3x2", "expected a shape that fits"),
        ("FLAG:1", "input 'IMAGE' of variable shape"),
        ("FLAG:1,FLAG:1", "input 'FLAG' is given twice"),
    ],
)
def test_wrong_signatures_say_what_is_wrong(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_signatures(text, [IMAGE, FLAG])


def test_settings_of_a_model():
    parameters = {
        "precision": "bf16",
        "tolerance": "0.01",
        "budget_seconds": "60",
        "signatures": "IN:1x4",
        "objective": "throughput",
        "capture": "true",
    }
    found = model_tuning(parameters, [TensorSpec("IN", "FP32", (-1, 4))], "on")
    assert (found.mode, found.precision, found.tolerance, found.budget_seconds) == ("on", "bf16", 0.01, 60.0)
    assert (found.signatures, found.objective, found.capture) == ((one(1, 4),), "throughput", True)


@pytest.mark.parametrize(
    ("server", "model", "mode"),
    [
        ("on", "on", "on"),
        ("on", "off", "off"),
        ("off", "on", "off"),
        ("cache", "on", "cache"),
        ("on", "cache", "cache"),
    ],
)
def test_a_model_cannot_turn_on_what_the_server_turned_off(server, model, mode):
    assert model_tuning({"tuning": model}, [], server).mode == mode


# --- counting


def test_space_saving_keeps_every_heavy_hitter_of_a_long_stream():
    generator = np.random.default_rng(0)
    counter = SpaceSaving(32)
    heavy = {f"heavy {i}": 0.05 for i in range(6)}  # 6 x 5 % of the stream, more than 1/32
    names = list(heavy)
    stream = [
        names[int(generator.integers(6))] if generator.random() < 0.3 else f"rare {generator.integers(10**6)}"
        for _ in range(30_000)
    ]
    true = {name: stream.count(name) for name in names}
    for key in stream:
        counter.add(key)
    assert len(counter) == 32
    assert set(names) <= set(counter)
    sure = dict(counter.frequent(0.02))
    assert set(sure) == set(names), "what is not frequent is never told"
    for name in names:
        assert sure[name] * counter.total <= true[name]


def test_space_saving_counts_exactly_while_there_is_room():
    counter = SpaceSaving(4)
    for key in "aabaacb":
        counter.add(key)
    assert counter.frequent(0.2) == [("a", 4 / 7), ("b", 2 / 7)]
    assert SpaceSaving(1).frequent(0.1) == []
    with pytest.raises(ValueError, match="capacity"):
        SpaceSaving(0)


def test_traffic_tells_frequent_signatures_and_shares_of_time():
    traffic = Traffic()
    for _ in range(40):
        traffic.ran("m", 1, one(3, 4), 0.01)
    for size in range(30):
        traffic.ran("m", 1, one(100 + size, 4), 0.0)
    traffic.ran("other", 1, one(1, 4), 0.1)
    assert traffic.frequent("m", 1) == [one(3, 4)]
    assert traffic.frequent("other", 1) == [], "once is not frequent"
    assert traffic.frequent("unknown", 1) == []
    assert traffic.time_share("m", 1) == pytest.approx(0.8)
    assert traffic.time_share("unknown", 1) == 0.0
    traffic.forget("m", 1)
    assert traffic.time_share("other", 1) == pytest.approx(1.0)


def test_traffic_of_late_counts_more_than_what_came_before():
    traffic = Traffic(span=1000)
    for _ in range(10_000):
        traffic.ran("m", 1, one(1, 4), 0.01)
    assert traffic.counts("m", 1)[one(1, 4)] < 2000
    for _ in range(3000):
        traffic.ran("m", 1, one(1, 5), 0.01)
    counts = traffic.counts("m", 1)
    assert counts[one(1, 5)] > 4 * counts[one(1, 4)]
    assert traffic.frequent("m", 1)[0] == one(1, 5)
    traffic.ran("other", 1, one(1, 4), 130.0)
    assert sum(traffic.shares("m", 1).values()) == pytest.approx(0.5), "as much engine time as the other has had"
    assert traffic.counts("unknown", 1) == {}


def test_traffic_takes_fixed_memory():
    traffic = Traffic(capacity=8, max_models=3)
    for model in range(10):
        for size in range(100):
            traffic.ran(f"m{model}", 1, one(size, 1), 0.0)
    assert len(traffic._models) == 3
    assert all(len(counted.signatures) == 8 for counted in traffic._models.values())


def test_traffic_counts_from_many_threads():
    traffic = Traffic()
    threads = [
        threading.Thread(target=lambda: [traffic.ran("m", 1, one(1, 4), 0.001) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traffic._models["m", 1].signatures.total == 8000
