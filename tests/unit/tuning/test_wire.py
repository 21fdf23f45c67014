from __future__ import annotations

import pytest

from hone.tuning.wire import Garbage, LineReader, encode


def test_messages_come_out_however_the_bytes_are_cut():
    data = encode({"event": "a", "text": "größer\n"}) + encode({"event": "b"})
    reader = LineReader()
    found = [message for i in range(len(data)) for message in reader.feed(data[i : i + 1])]
    assert [m["event"] for m in found] == ["a", "b"]
    assert found[0]["text"] == "größer\n"


def test_limits_hold_before_the_line_ends():
    reader = LineReader(max_line_bytes=10)
    with pytest.raises(Garbage, match="at most 10 bytes a message"):
        list(reader.feed(b"x" * 11))


def test_what_came_before_garbage_counts():
    messages = LineReader().feed(encode({"event": "a"}) + b"nonsense\n" + encode({"event": "b"}))
    assert next(messages) == {"event": "a"}
    with pytest.raises(Garbage, match="found 'nonsense'"):
        next(messages)


def test_all_messages_together_are_bounded():
    reader = LineReader(max_total_bytes=30)
    list(reader.feed(encode({"event": "a"})))
    list(reader.feed(encode({"event": "a"})))
    with pytest.raises(Garbage, match="30 bytes a job"):
        list(reader.feed(encode({"event": "a"})))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes"])
def test_what_is_no_json_is_not_sent(value):
    with pytest.raises(Garbage, match="not expressible in JSON"):
        encode({"event": "a", "value": value})


def test_too_long_is_not_sent():
    with pytest.raises(Garbage, match="at most 100 bytes a message, found"):
        encode({"event": "x" * 100}, 100)
