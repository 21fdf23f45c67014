"""A server with small limits: what exceeds them is refused, and never held in memory."""

import gzip
import json
import zlib

import numpy as np
import pytest

from tests import models
from tests.protocol.raw_socket import chunked, connected, request
from tests.protocol.wire import Input, invalid, raw_input
from tests.running import run_server

LIMIT = 64 * 1024
SAYS = "exceeds the maximum allowed input size", "Use --http-max-input-size to increase the limit."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("limits")
    for datatype in ("FP32", "FP64", "BYTES"):
        models.write_model(root, f"identity_{datatype.lower()}", models.identity(datatype, ("batch", "n")))
    limit = str(LIMIT)
    with run_server(root, f"--http-max-input-size={limit}", f"--grpc-max-message-size={limit}") as running:
        yield running


@pytest.mark.row(37)
def test_input_too_large(client):
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", np.zeros((1, LIMIT // 4)))])
    if client.protocol == "http":
        invalid(answer, *SAYS)
    else:
        assert answer.status == "RESOURCE_EXHAUSTED", answer


def test_input_within_the_limit(client):
    given = np.ones((1, LIMIT // 4 - 100), np.float32)
    assert client.infer("identity_fp32", [raw_input("IN", "FP32", given)])["OUT"].array.all()


@pytest.mark.row(37)
def test_response_too_large_for_grpc(grpc):
    """Strings grow by four bytes each: the request fits, the response does not."""
    given = np.full((1, 15_000), b"x", np.object_)
    answer = grpc.infer("identity_bytes", [Input("IN", "BYTES", given.shape, data=given.reshape(-1).tolist())])
    invalid(answer, "--grpc-max-message-size")


@pytest.mark.row(37)
@pytest.mark.parametrize(
    ("model", "datatype", "data"),
    [("identity_fp64", "FP64", [0] * (LIMIT // 8 + 1)), ("identity_bytes", "BYTES", [""] * (LIMIT // 4 + 1))],
)
def test_json_that_expands(http, model, datatype, data):
    text = json.dumps([{"name": "IN", "datatype": datatype, "shape": [1, len(data)], "data": data}])
    body = b'{"inputs":' + text.replace(", ", ",").encode() + b"}"
    assert len(body) < LIMIT
    invalid(http.infer_bytes(model, body), *SAYS)


@pytest.mark.row(37)
def test_shape_claims_more_json_than_allowed(http):
    """Refused for its size, without looking for the elements."""
    answer = http.infer("identity_fp32", [Input("IN", "FP32", (1, 2**40), data=[1])])
    invalid(answer, *SAYS)


@pytest.mark.row(37)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("factor", [2, 500])
def test_compressed_body_that_inflates(http, encoding, factor):
    plain = b" " * LIMIT * factor
    body = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    if len(body) < LIMIT:
        invalid(http.infer_bytes("identity_fp32", body, {"Content-Encoding": encoding}), *SAYS)


@pytest.mark.row(37)
@pytest.mark.parametrize("path", ["/v2/models/identity_fp32/infer", "/v2/repository/index"])
def test_announced_body_is_refused_before_it_comes(http, path):
    with connected(http.port) as connection:
        connection.send(request(b"", path=path.encode(), length=LIMIT + 1))
        reply = connection.reply()
        assert reply is not None and reply.status == 400, reply
        assert all(part in reply.error for part in SAYS)
        assert reply.headers["connection"] == "close"


@pytest.mark.row(37)
def test_body_beyond_any_integer(http):
    """Content-Length past 2 GiB and past 64 bits."""
    for length in (2**31 + 5, 2**63 - 1, 2**63, 2**64, 10**30):
        with connected(http.port) as connection:
            connection.send(request(b"", length=length))
            reply = connection.reply()
            assert reply is not None and reply.status == 400, (length, reply)


@pytest.mark.row(37)
def test_chunked_body_too_large(http):
    with connected(http.port) as connection:
        connection.send(chunked(*[b" " * 8192] * 9, end=b""))
        reply = connection.reply()
        assert reply is not None and reply.status == 400, reply
        assert all(part in reply.error for part in SAYS)


@pytest.mark.row(37)
def test_raw_binary_request_too_large(http):
    answer = http.infer_bytes("identity_fp32", bytes(LIMIT + 4), {"Inference-Header-Content-Length": "0"})
    invalid(answer, *SAYS)


@pytest.mark.row(37)
def test_control_call_too_large(http):
    invalid(http.call("POST", "/v2/repository/index", body=b" " * (LIMIT + 1)), *SAYS)


def test_the_connection_is_of_use_after_a_refusal(http):
    invalid(http.infer("identity_fp32", [Input("IN", "FP32", (1, 2**40), data=[1])]))
    assert http.infer("identity_fp32", [Input("IN", "FP32", (1, 1), data=[1])])["OUT"].tolist() == [[1]]
