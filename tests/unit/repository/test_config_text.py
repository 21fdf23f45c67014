from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError, ErrorKind, RepositoryError
from hone.repository.config_text import MAX_CONFIG_BYTES, parse_config
from hone.repository.validation import validate


def test_a_config_is_parsed():
    config = parse_config(
        b'name: "m" max_batch_size: 8 input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]', "m"
    )
    assert (config.name, config.max_batch_size, list(config.input[0].dims)) == ("m", 8, [3, -1])


def test_a_byte_order_mark_is_no_error():
    assert parse_config(b'\xef\xbb\xbfname: "m"', "m").name == "m"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'name: "m"\nmax_batch_size: 1e9\n', "line 2, column 17: "),
        (
            b'name: "m"\n  colour: 3\n',
            'line 2, column 3: Message type "inference.ModelConfig" has no field named "colour"',
        ),
        (b"input [ {\n name: 'x' data_type: TYPE_FLOAT } ]", "line 2, column 23: "),
        (b"input [ {\n name: 'x' data_type: TYPE_FLOAT } ]", "has no value named TYPE_FLOAT"),
        (b"max_batch_size: 99999999999", "Value out of range"),
        (b'name: "m"\n\n\xff\xfe', "line 3, byte 1: expected UTF-8 text"),
        (b"input [ { name: ", "column"),
        (b"\0", "line 1, column 1"),
        (b"dynamic_batching {} sequence_batching {}", "oneof"),
    ],
)
def test_a_bad_text_names_the_place(text, expected):
    with pytest.raises(RepositoryError) as caught:
        parse_config(text, "m")
    assert caught.value.kind is ErrorKind.INTERNAL
    assert str(caught.value).startswith(
        "failed to load 'm', failed to poll from model repository: cannot parse config.pbtxt"
    )
    assert expected in caught.value.reason


def test_a_message_quotes_no_endless_line():
    with pytest.raises(RepositoryError) as caught:
        parse_config(b"name: " + b"x" * 100_000, "m")
    assert len(caught.value.reason) < 500


def test_a_huge_config_is_refused_unparsed(disk):
    disk.model("m", "#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(RepositoryError, match=f"config.pbtxt is larger than the {MAX_CONFIG_BYTES} bytes allowed"):
        disk.repository.read("m")


def test_a_config_that_is_a_folder_or_a_pipe_is_refused(disk):
    disk.model("folder")
    (disk.root / "folder" / "config.pbtxt").mkdir()
    disk.model("pipe")
    os.mkfifo(disk.root / "pipe" / "config.pbtxt")
    for name in ("folder", "pipe"):
        with pytest.raises(RepositoryError, match=r"cannot read config\.pbtxt: not a regular file"):
            disk.repository.read(name)


_NAMES = "name input dims max_batch_size dynamic_batching instance_group parameters optimization TYPE_FP32"
_MARKS = ': { } [ ] , < > -1 0 99999999999999999999 "m" \' " # \\377'
_WORDS = st.sampled_from([*_NAMES.split(), *_MARKS.split(), "\n"])


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=300), st.lists(_WORDS, max_size=40).map(lambda words: " ".join(words).encode())))
def test_any_bytes_give_a_config_or_a_refusal(data):
    try:
        validate(parse_config(data, "m"), "m")
    except (RepositoryError, ConfigError) as refusal:
        str(refusal).encode("utf-8")


@pytest.mark.parametrize("text", [b"input{", b"[", b"input[", b"optimization{cuda{", b"<"])
def test_deep_nesting_is_refused(text):
    with pytest.raises(RepositoryError):
        parse_config(text * 50_000, "m")
