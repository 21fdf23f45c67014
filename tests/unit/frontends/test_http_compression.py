"""Compressed bodies: what is chosen, what is refused, and that nothing inflates past the limit."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.errors import InvalidRequest
from hone.frontends.http_compression import accepted_encoding, compress, content_encoding, inflate
from hone.frontends.http_errors import HttpError


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (b"", None),
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"gzip, deflate", "gzip"),
        (b"deflate, gzip", "deflate"),
        (b"gzip;q=0.5, deflate;q=0.8", "deflate"),
        (b"gzip;q=0.5, identity;q=0.8", None),
        (b"identity, gzip", None),
        (b"GZIP ; Q=0.3", "gzip"),
        (b"gzip;q=0", None),
        (b"*", "gzip"),
        (b"*;q=0", None),
        (b"br, zstd", None),
        (b"br, gzip;q=0.1", "gzip"),
        (b"gzip;q=abc, deflate;q=0.1", "deflate"),
        (b"gzip;q=nan", None),
        (b"gzip;q=\xb2", None),
        (b";;,,=", None),
    ],
)
def test_the_highest_weight_is_chosen_and_the_first_of_equals(header, chosen):
    assert accepted_encoding(header) == chosen


@given(st.binary(max_size=60))
def test_any_accept_encoding_is_understood_or_passed_over(header):
    assert accepted_encoding(header) in {None, "gzip", "deflate"}


@pytest.mark.parametrize("value", [None, b"", b"identity", b" Identity "])
def test_identity_is_no_encoding(value):
    assert content_encoding(value) is None


def test_an_unknown_encoding_is_refused_with_those_that_are_known():
    with pytest.raises(HttpError, match="Unsupported compression type 'br'") as refused:
        content_encoding(b"br")
    assert refused.value.status == 501
    assert dict(refused.value.headers)[b"Accept-Encoding"] == b"gzip, deflate"


@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from(["gzip", "deflate"]))
def test_what_is_compressed_inflates_to_the_same(parts, encoding):
    body = compress([memoryview(part) for part in parts], encoding)
    assert inflate(body, encoding, 10_000) == b"".join(parts)


def test_the_forms_are_those_that_other_programs_read():
    assert gzip.decompress(compress([b"abc"], "gzip")) == b"abc"
    assert zlib.decompress(compress([b"abc"], "deflate")) == b"abc"


def test_a_gzip_body_may_have_several_members_but_not_any_number():
    member = gzip.compress(b"abc")
    assert inflate(member * 3, "gzip", 100) == b"abcabcabc"
    with pytest.raises(InvalidRequest, match="more than 16 members"):
        inflate(gzip.compress(b"") * 1000, "gzip", 100)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_cut_corrupt_and_trailing_bytes_are_refused(encoding):
    whole = compress([bytes(range(256)) * 10], encoding)
    for cut in (0, 1, 5, len(whole) // 2, len(whole) - 1):
        with pytest.raises(InvalidRequest, match="failed to decompress"):
            inflate(whole[:cut], encoding, 10_000)
    with pytest.raises(InvalidRequest, match="failed to decompress"):
        inflate(whole + b"garbage", encoding, 10_000)
    with pytest.raises(InvalidRequest, match="failed to decompress"):
        inflate(b"this is not compressed at all", encoding, 10_000)


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_any_bytes_inflate_or_are_refused(body, encoding):
    try:
        assert len(inflate(body, encoding, 1000)) <= 1000
    except InvalidRequest:
        pass
    except HttpError as error:
        assert error.status == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_the_limit_is_exact(encoding):
    body = compress([bytes(1000)], encoding)
    assert len(inflate(body, encoding, 1000)) == 1000
    with pytest.raises(HttpError, match="Use --http-max-input-size to increase the limit"):
        inflate(body, encoding, 999)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_costs_no_more_than_the_limit(encoding):
    bomb = compress([bytes(1 << 20)] * 256, encoding)
    limit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(HttpError) as refused:
            inflate(bomb, encoding, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400
    assert peak < 4 * limit
