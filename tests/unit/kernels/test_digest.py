"""Digests are of everything, and of nothing but what is said."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from hone.kernels import digest_of, digest_of_bytes, digest_of_file


def test_it_is_sha256_of_canonical_json():
    fields = {"b": [1, 2.5, None, True, "ä"], "a": {"y": 1, "x": 2}}
    text = '{"a":{"x":2,"y":1},"b":[1,2.5,null,true,"\\u00e4"]}'
    assert digest_of(fields) == hashlib.sha256(text.encode()).hexdigest()


def test_order_of_keys_does_not_matter_and_order_of_items_does():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"a": [1, 2]}) != digest_of({"a": [2, 1]})


def test_what_json_makes_of_fields_has_the_same_digest():
    fields = {"shape": (1, 3, 224), "scale": 0.1, "name": 'quote " and \\ and \n', "none": None, "big": 2**70}
    assert digest_of(json.loads(json.dumps(fields))) == digest_of(fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": None}, {}),
        ({"a": ""}, {"a": []}),
    ],
)
def test_things_that_look_alike_differ(one, other):
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"a\.b\[1\]"),
        ({"a": float("inf")}, "a: inf"),
    ],
)
def test_numbers_that_json_has_not_are_refused_by_place(fields, place):
    with pytest.raises(ValueError, match=place):
        digest_of(fields)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"a": {1: "x"}}, "a: key 1 is int"),
        ({"a": {1, 2}}, "a: set"),
        ({"a": b"x"}, "a: bytes"),
        ({"a": [np.float32(1)]}, r"a\[0\]: float32"),
        ({"a": np.float64(1)}, "a: float64"),
        ({"a": np.int64(1)}, "a: int64"),
    ],
)
def test_what_is_not_json_is_refused_by_place(fields, place):
    with pytest.raises(TypeError, match=place):
        digest_of(fields)


def test_a_file_has_the_digest_of_its_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    assert digest_of_file(path) == digest_of_bytes(b"x" * 3_000_000)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic"):
        digest_of_file(tmp_path / "link")
