"""Bodies of HTTP requests that cannot be read: JSON, lengths, compression."""

import gzip
import json
import zlib

import numpy as np
import pytest

from tests.protocol.http_client import HEADER_LENGTH
from tests.protocol.raw_socket import chunked, connected, still_serves
from tests.protocol.wire import Input, Output, invalid, raw_input

GOOD = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
GOOD_BYTES = json.dumps(GOOD).encode()
#: Without the time of day: workers of a parallel run must collect the same tests.
GZIPPED = gzip.compress(GOOD_BYTES, mtime=0)


def variant(**changes):
    """The good request with fields of its input changed, or taken away where the value is ..."""
    entry = {**GOOD["inputs"][0], **changes}
    return {"inputs": [{name: value for name, value in entry.items() if value is not ...}]}


# --- JSON


@pytest.mark.row(8)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"nonsense",
        b'{"inputs":[}',
        GOOD_BYTES[:-1],
        GOOD_BYTES + b"x",
        GOOD_BYTES.replace(b'"', b"'"),
        b"\xff\xfe" + GOOD_BYTES,
        GOOD_BYTES.replace(b"IN", b"\xff"),
        b'{"inputs": [NaN, NaX]}',
        b'{"inputs": "\\ud800"}',
        b"\0" * 100,
        b"1e999999",
        b"9" * 5000,
    ],
    ids=lambda body: repr(body[:16]),
)
def test_malformed_json(http, body):
    answer = http.infer_bytes("identity_fp32", body)
    assert answer.status == 400
    if body not in (b"1e999999", b'{"inputs": "\\ud800"}'):
        assert "failed to parse the request JSON buffer" in answer.error and " at " in answer.error


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"1", b"true", b"[{}]"])
def test_json_that_is_no_object(http, body):
    answer = http.infer_bytes("identity_fp32", body)
    assert answer.status == 400 and "JSON object" in answer.error


@pytest.mark.row(8)
@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/add_sub/load",
        "/v2/repository/models/add_sub/unload",
        "/v2/trace/setting",
        "/v2/logging",
        "/v2/systemsharedmemory/region/r/register",
    ],
)
@pytest.mark.parametrize("body", [b"{", b"nonsense", b"[1]", b"\xff"])
def test_malformed_json_for_control_calls(http, path, body):
    answer = http.call("POST", path, body=body)
    assert answer.status == 400, answer


def nested(depth, opening=b"[", closing=b"]"):
    return opening * depth + closing * depth


@pytest.mark.row(9)
@pytest.mark.parametrize("depth", [101, 1_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_deep_json(http, depth, opening, closing):
    middle = b"" if opening == b"[" else b"1"
    body = b'{"inputs":' + opening * depth + middle + closing * depth + b"}"
    for path in ("/v2/models/identity_fp32/infer", "/v2/repository/index"):
        answer = http.call("POST", path, body=body)
        assert answer.status == 400 and "JSON nesting depth exceeds maximum allowed" in answer.error


@pytest.mark.row(9)
def test_brackets_in_strings_are_no_nesting(http):
    document = {**GOOD, "id": "[" * 500 + '\\"{' * 200}
    assert http.infer_document("identity_fp32", document).document["id"] == document["id"]


@pytest.mark.row(9)
def test_deep_data_within_the_limit(http):
    document = variant(data=json.loads(nested(90).replace(b"[]", b"[1,2]")))
    assert http.infer_document("identity_fp32", document)["OUT"].tolist() == [[1, 2]]


@pytest.mark.row(10)
@pytest.mark.parametrize("field", ["name", "datatype", "shape"])
def test_missing_member_of_an_input(http, field):
    answer = http.infer_document("identity_fp32", variant(**{field: ...}))
    says = f"Unable to parse '{field}'", f"attempt to access non-existing object member '{field}'"
    invalid(answer, *says)


@pytest.mark.row(10)
@pytest.mark.parametrize("document", [{}, {"id": "1"}, {"input": []}])
def test_missing_inputs(http, document):
    answer = http.infer_document("identity_fp32", document)
    invalid(answer, "Unable to parse 'inputs'", "attempt to access non-existing object member 'inputs'")


@pytest.mark.row(10)
def test_missing_name_of_an_output(http):
    answer = http.infer_document("identity_fp32", {**GOOD, "outputs": [{}]})
    invalid(answer, "Unable to parse 'name'", "non-existing object member 'name'")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 1},
        {"name": None},
        {"name": ["IN"]},
        {"datatype": 1},
        {"datatype": None},
        {"datatype": ["FP32"]},
        {"datatype": {}},
        {"shape": 2},
        {"shape": "12"},
        {"shape": None},
        {"shape": {"0": 1}},
        {"shape": [1, "2"]},
        {"shape": [1, 2.0]},
        {"shape": [True, 2]},
        {"shape": [[1, 2]]},
        {"shape": [1, None]},
        {"shape": [1, 10**400]},
        {"data": "12"},
        {"data": None},
        {"data": 1},
        {"data": {}},
        {"data": [1, "2"]},
        {"data": [1, None]},
        {"data": [1, {}]},
        {"data": [1, [2]]},
        {"data": [[1], 2]},
        {"data": [[1], "2"]},
        {"data": [1, True]},
        {"data": [1, 10**400]},
        {"parameters": []},
        {"parameters": "x"},
        {"parameters": {"binary_data_size": -1}},
        {"parameters": {"binary_data_size": "8"}},
        {"parameters": {"binary_data_size": 1.5}},
        {"parameters": {"binary_data_size": 10**30}},
        {"parameters": {"shared_memory_region": 1}},
        {"parameters": {"shared_memory_byte_size": 8}},
    ],
    ids=str,
)
def test_members_of_the_wrong_type(http, changes):
    invalid(http.infer_document("identity_fp32", variant(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {}},
        {"inputs": "IN"},
        {"inputs": None},
        {"inputs": [1]},
        {"inputs": [None]},
        {"inputs": [[]]},
        {"outputs": {}},
        {"outputs": "OUT"},
        {"outputs": ["OUT"]},
        {"outputs": [{"name": 1}]},
        {"outputs": [{"name": "OUT", "parameters": 1}]},
        {"outputs": [{"name": "OUT", "parameters": {"classification": -1}}]},
        {"outputs": [{"name": "OUT", "parameters": {"classification": "2"}}]},
        {"outputs": [{"name": "OUT", "parameters": {"classification": 1_000_001}}]},
        {"outputs": [{"name": "OUT", "parameters": {"binary_data": "yes"}}]},
        {"outputs": [{"name": "OUT", "parameters": {"binary_data": 1}}]},
        {"id": 7},
        {"id": None},
        {"parameters": []},
        {"parameters": {"binary_data_output": 1}},
        {"parameters": {"key": {}}},
        {"parameters": {"key": [1]}},
        {"parameters": {"key": None}},
    ],
    ids=str,
)
def test_members_of_the_request_of_the_wrong_type(http, changes):
    invalid(http.infer_document("identity_fp32", {**GOOD, **changes}))


@pytest.mark.row(14)
def test_half_floats_in_json(http):
    document = {"inputs": [{"name": "IN", "datatype": "FP16", "shape": [1, 2], "data": [1, 2]}]}
    invalid(http.infer_document("identity_fp16", document), "FP16 data via JSON is not supported")


# --- lengths


def infer_with(http, length, body=GOOD_BYTES):
    return http.infer_bytes("identity_fp32", body, {HEADER_LENGTH: length})


@pytest.mark.row(30)
@pytest.mark.parametrize("length", ["x", "", "1x", "0x10", "1.0", "1e2", "--1", "1 2", "٣", "+", "-"])
def test_header_length_that_is_no_integer(http, length):
    length = length.encode().decode("latin-1")
    invalid(infer_with(http, length), "Unable to parse Inference-Header-Content-Length, got:")


@pytest.mark.row(30)
@pytest.mark.parametrize("length", [2**31, -(2**31) - 1, 2**63, 2**64, 10**40, -(10**40)])
def test_header_length_out_of_range(http, length):
    invalid(infer_with(http, str(length)), "Inference-Header-Content-Length", "value is out of range [ ")


@pytest.mark.row(31)
@pytest.mark.parametrize("length", [-1, -(2**31), len(GOOD_BYTES) + 1, 2**31 - 1])
def test_header_length_outside_the_body(http, length):
    says = f"inference header size should be in range (0, {len(GOOD_BYTES)}), got: {length}"
    invalid(infer_with(http, str(length)), says)


@pytest.mark.row(31)
def test_header_length_that_cuts_the_json(http):
    invalid(infer_with(http, str(len(GOOD_BYTES) - 1)), "failed to parse the request JSON buffer")


@pytest.mark.row(32)
@pytest.mark.parametrize(("size", "tail", "lacking"), [(8, 7, 1), (8, 1, 7), (2**40, 8, 2**40 - 8)])
def test_binary_data_cut_short(http, size, tail, lacking):
    document = variant(data=..., parameters={"binary_data_size": size})
    says = f"unexpected size for input 'IN', expecting {lacking} additional bytes for model 'identity_fp32'"
    invalid(http.infer_document("identity_fp32", document, bytes(tail)), says)


@pytest.mark.row(32)
def test_binary_data_without_header_length(http):
    document = variant(data=..., parameters={"binary_data_size": 8})
    invalid(http.infer_document("identity_fp32", document), "expecting 8 additional bytes")


@pytest.mark.row(33)
@pytest.mark.parametrize("extra", [1, 100_000])
def test_binary_data_left_over(http, extra):
    document = variant(data=..., parameters={"binary_data_size": 8})
    says = "unexpected additional input data for model 'identity_fp32'"
    invalid(http.infer_document("identity_fp32", document, bytes(8 + extra)), says)


@pytest.mark.row(33)
def test_binary_data_that_no_input_asked_for(http):
    invalid(http.infer_document("identity_fp32", GOOD, b"x"), "unexpected additional input data")


# --- compression


@pytest.mark.row(39)
@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x-nothing", "gzip;q=1", "compress"])
def test_unknown_content_encoding(http, encoding):
    answer = http.infer_bytes("identity_fp32", GOOD_BYTES, {"Content-Encoding": encoding})
    assert answer.status == 501 and "Unsupported compression type" in answer.error
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.row(40)
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", GOOD_BYTES),
        ("gzip", b""),
        ("gzip", GZIPPED[:-9]),
        ("gzip", GZIPPED[:-4] + b"\0\0\0\0"),
        ("gzip", GZIPPED + b"trailing"),
        ("gzip", zlib.compress(GOOD_BYTES)),
        ("deflate", GOOD_BYTES),
        ("deflate", b""),
        ("deflate", zlib.compress(GOOD_BYTES)[:-1]),
        ("deflate", zlib.compress(GOOD_BYTES) + b"trailing"),
        ("deflate", GZIPPED),
    ],
)
def test_corrupt_compression(http, encoding, body):
    answer = http.infer_bytes("identity_fp32", body, {"Content-Encoding": encoding})
    invalid(answer, "decompress", encoding)


@pytest.mark.row(40)
def test_corrupt_compression_of_control_calls(http):
    answer = http.call("POST", "/v2/repository/index", body=b"{}", headers={"Content-Encoding": "gzip"})
    invalid(answer, "decompress")


@pytest.mark.row(41)
def test_too_many_chunks(http):
    with connected(http.port) as connection:
        connection.send(chunked(*[b" "] * 65_537))
        reply = connection.reply()
        assert reply is not None and reply.status == 400
        assert reply.error == "Chunked request body exceeds maximum of 65536 non-empty chunks"
        assert reply.headers["connection"] == "close" and connection.closed()
    still_serves(http.port)


@pytest.mark.row(41)
def test_as_many_chunks_as_allowed(http):
    with connected(http.port) as connection:
        connection.send(chunked(*[b" "] * 65_535, GOOD_BYTES))
        reply = connection.reply()
        assert reply is not None and reply.status == 200, reply


# --- parameters


@pytest.mark.row(48)
@pytest.mark.parametrize("key", ["triton_", "triton_anything", "triton_final_response"])
def test_reserved_parameter(client, key):
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", np.zeros((1, 1)))], parameters={key: True})
    invalid(answer, "parameter keys starting with 'triton_' are reserved")


@pytest.mark.row(49)
@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": "high"},
        {"priority": 1.5},
        {"priority": True},
        {"priority": -1},
        {"timeout": "5"},
        {"timeout": 0.5},
        {"timeout": -(2**63)},
        {"sequence_id": 1.5},
        {"sequence_id": True},
        {"sequence_start": 1},
        {"sequence_end": "true"},
    ],
    ids=str,
)
def test_parameter_of_the_wrong_type(client, parameters):
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", np.zeros((1, 1)))], parameters=parameters)
    invalid(answer, f"'{next(iter(parameters))}' parameter")


@pytest.mark.row(49)
@pytest.mark.parametrize("value", [-1, 1_000_001, "2", True, 1.0])
def test_classification_of_the_wrong_type(client, value):
    given = [Input("IN", "FP32", (1, 4), raw=bytes(16))]
    answer = client.infer("labelled", given, [Output("OUT", parameters={"classification": value})])
    invalid(answer, "'classification'", "'OUT'")


@pytest.mark.parametrize(
    ("datatype", "item"),
    [
        ("INT32", 1.5),
        ("INT32", "1"),
        ("INT32", True),
        ("UINT8", -1),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("BYTES", 5),
        ("BYTES", None),
        ("BYTES", {}),
        ("FP64", "NaN"),
        ("FP64", False),
    ],
)
def test_json_items_of_another_datatype(http, datatype, item):
    """Refused rather than converted: half of a conversion is a wrong answer."""
    answer = http.infer(f"identity_{datatype.lower()}", [Input("IN", datatype, (1, 2), data=[item, item])])
    invalid(answer, "'IN'")
