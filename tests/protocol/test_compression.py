"""Compression both ways."""

import gzip
import json
import zlib

import grpc as grpc_library
import numpy as np
import pytest

from tests.protocol.grpc_client import infer_request
from tests.protocol.http_client import answer_of, encode_infer
from tests.protocol.wire import accepted, raw_input, typed_input

LARGE = np.arange(40_000, dtype=np.float32).reshape(4, -1)
SMALL = np.ones((1, 4), np.float32)
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}
INFLATE = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", " gzip "])
@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("form", [raw_input, typed_input])
def test_request(http, encoding, array, form):
    body, headers = encode_infer([form("IN", "FP32", array)])
    packed = COMPRESS[encoding.strip().lower()](body)
    answer = http.infer_bytes("identity_fp32", packed, {**headers, "Content-Encoding": encoding})
    np.testing.assert_array_equal(answer["OUT"].array, array)


def test_gzip_of_several_members(http):
    """What `cat a.gz b.gz` makes is one gzip file."""
    body, headers = encode_infer([raw_input("IN", "FP32", SMALL)])
    packed = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert http.infer_bytes("identity_fp32", packed, {**headers, "Content-Encoding": "gzip"})["OUT"].array.all()


def test_identity_encoding(http):
    body, headers = encode_infer([raw_input("IN", "FP32", SMALL)])
    accepted(http.infer_bytes("identity_fp32", body, {**headers, "Content-Encoding": "identity"}))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("identity", None),
        ("br", None),
        ("", None),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0.5, identity;q=0.8", None),
        ("gzip;q=0", None),
        ("GZIP", "gzip"),
        ("br, gzip;q=0.1", "gzip"),
        ("gzip;q=nonsense", None),
    ],
)
@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("binary", [True, False])
def test_response(http, accept, expected, array, binary):
    body, headers = encode_infer([raw_input("IN", "FP32", array)], binary=binary)
    status, fields, content = http.send(
        "POST", "/v2/models/identity_fp32/infer", body, {**headers, "Accept-Encoding": accept}
    )
    assert fields.get("content-encoding") == expected
    if expected:
        content = INFLATE[expected](content)
        assert "accept-encoding" in fields["vary"].lower()
    np.testing.assert_array_equal(answer_of(status, fields, content)["OUT"].array, array)


def test_errors_are_sent_plain(http):
    answer = http.call("POST", "/v2/models/nothing/infer", {}, {"Accept-Encoding": "gzip"})
    assert answer.status == 404 and "content-encoding" not in answer.headers


def test_control_calls_take_compressed_bodies(http):
    answer = http.call(
        "POST", "/v2/repository/index", body=gzip.compress(b'{"ready": true}'), headers={"Content-Encoding": "gzip"}
    )
    assert all(line["state"] == "READY" for line in accepted(answer))


@pytest.mark.parametrize("algorithm", [grpc_library.Compression.Gzip, grpc_library.Compression.Deflate])
def test_grpc_request(grpc, algorithm):
    request = infer_request("identity_fp32", [raw_input("IN", "FP32", LARGE)])
    answer = grpc.infer_message(request, compression=algorithm)
    np.testing.assert_array_equal(answer["OUT"].array, LARGE)


def test_decoded_length_is_what_the_header_length_means(http):
    document = json.dumps(
        {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}
    ).encode()
    body = gzip.compress(document + np.array([1, 2], np.float32).tobytes())
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(document))}
    assert http.infer_bytes("identity_fp32", body, headers)["OUT"].tolist() == [[1, 2]]
