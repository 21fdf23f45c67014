"""JSON with NaN, with bounded nesting, and with nothing but InvalidRequest for what is none."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.errors import InvalidRequest
from hone.frontends.http_json import MAX_DEPTH, check_depth, dump_numbers, loads


def nested(depth: int, filler: str = "") -> bytes:
    return (filler + "[" * depth + "]" * depth).encode()


def test_depth_is_counted_exactly():
    check_depth(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="maximum allowed depth of 100"):
        check_depth(nested(MAX_DEPTH + 1))


def test_many_brackets_side_by_side_are_not_deep():
    check_depth(b"[" + b",".join([b"[[1],[2]]"] * 1000) + b"]")


@pytest.mark.parametrize(
    "text",
    ['"' + "[" * 500 + '"', '"\\"' + "[" * 500 + '"', '"\\\\",' + '"' + "{" * 500 + '"', '"\\n' + "[" * 500 + '"'],
)
def test_brackets_in_strings_do_not_count(text):
    check_depth(f"[{text}]".encode())


@pytest.mark.parametrize("text", ['"a",', '"\\"",', '"\\\\",', '"\\n",'])
def test_strings_do_not_hide_brackets_behind_them(text):
    with pytest.raises(InvalidRequest, match="depth"):
        check_depth(f"[{text}".encode() + nested(MAX_DEPTH) + b"]")


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values, st.integers(0, 120), st.booleans())
def test_depth_is_judged_as_by_parsing(value, wrapping, ascii_only):
    # Enough siblings that the count of brackets alone never decides.
    document = [[[]] * 60, value]
    for _ in range(wrapping):
        document = [document]
    text = json.dumps(document, ensure_ascii=ascii_only).encode()
    if depth_of(document) > MAX_DEPTH:
        with pytest.raises(InvalidRequest):
            loads(text)
    else:
        assert loads(text) == document


@given(st.binary(max_size=100))
def test_any_bytes_are_json_or_refused(text):
    with contextlib.suppress(InvalidRequest):
        loads(text)


@pytest.mark.parametrize("text", [b"[NaN, " + b"1" * 5000 + b"]", b"[NaN]]", b'{"a":NaN', b"[-NaN2]", b"[Info]"])
def test_bad_json_with_non_finite_numbers_is_refused(text):
    with pytest.raises(InvalidRequest, match="failed to parse the request JSON buffer"):
        loads(text)


def test_non_finite_literals_inside_strings_stay_as_they_are():
    assert loads(b'{"Inf": "Inf NaN", "x": [Inf, -Inf]}') == {"Inf": "Inf NaN", "x": [np.inf, -np.inf]}


def test_numbers_are_written_row_by_row_whatever_their_memory_looks_like():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert dump_numbers(array.T) == b"[0,3,1,4,2,5]"
    assert dump_numbers(array[:, ::2]) == b"[0,2,3,5]"
    assert dump_numbers(np.array([[True, False]])) == b"[true,false]"
    assert dump_numbers(np.float32(0.1).reshape(())) == b"[0.1]"
