"""Requests and responses over HTTP, byte by byte."""

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hone.errors import ErrorKind, HoneError, InvalidRequest, NotFound
from hone.frontends.http_codec import decode_request, encode_response, parse_header_length, refuse_json_outputs
from hone.frontends.http_errors import HttpError
from hone.frontends.http_tensors import COPIED_BYTES
from hone.types import BYTES, NUMPY_DTYPES, InferOutput, InferRequest, InferResponse, ModelMetadata, RegionSlice
from tests.unit.frontends.http_fakes import FakeRegions, model, models

LIMIT = 1 << 20
ANY_MODEL = model("m", [("IN", "FP32", (-1,))])


def decode(
    document: object,
    tensors: bytes = b"",
    *,
    binary: bool = True,
    metadata: ModelMetadata = ANY_MODEL,
    regions: FakeRegions | None = None,
    limit: int = LIMIT,
    forwarded: dict[str, str] | None = None,
) -> InferRequest:
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_request(
        header + tensors,
        len(header) if binary else None,
        metadata=metadata,
        version="",
        batching=False,
        regions=regions or FakeRegions(),
        limit=limit,
        received_ns=7,
        forwarded=forwarded,
    ).request


def tensor(datatype: str, shape: list[int], **more: object) -> dict[str, object]:
    return {"name": "IN", "datatype": datatype, "shape": shape, **more}


def binary(datatype: str, shape: list[int], size: int) -> dict[str, object]:
    return {"inputs": [tensor(datatype, shape, parameters={"binary_data_size": size})]}


def data(datatype: str, shape: list[int], values: object) -> dict[str, object]:
    return {"inputs": [tensor(datatype, shape, data=values)]}


# --- requests that are understood


def test_golden_request_with_two_binary_inputs_and_all_fields():
    header = (
        b'{"id":"r1","inputs":['
        b'{"name":"A","datatype":"INT16","shape":[3],"parameters":{"binary_data_size":6}},'
        b'{"name":"B","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}],'
        b'"outputs":[{"name":"X","parameters":{"binary_data":false,"classification":3}},{"name":"Y"}],'
        b'"parameters":{"binary_data_output":true,"priority":2,"timeout":500,"sequence_id":"s","sequence_start":true,'
        b'"colour":"red","ratio":0.5,"number":7,"flag":false}}'
    )
    request = decode(header, b"\x01\x00\x02\x00\xff\xff" + b"\x00\x00\x80\x3f\x00\x00\x00\xc0")
    assert request.id == "r1"
    assert (request.model_name, request.protocol, request.received_ns) == ("m", "http", 7)
    assert (request.priority, request.timeout_us) == (2, 500)
    assert request.parameters == {
        "sequence_id": "s",
        "sequence_start": True,
        "colour": "red",
        "ratio": 0.5,
        "number": 7,
        "flag": False,
    }
    assert list(request.inputs) == ["A", "B"]
    np.testing.assert_array_equal(request.inputs["A"].data, np.array([1, 2, -1], np.int16))
    np.testing.assert_array_equal(request.inputs["B"].data, np.array([[1.0, -2.0]], np.float32))
    assert [(o.name, o.binary, o.classification, o.region) for o in request.outputs] == [
        ("X", False, 3, None),
        ("Y", True, 0, None),
    ]


def test_golden_response_with_binary_and_json_outputs():
    outputs = [
        InferOutput("A", "FP32", (1, 2), np.array([[1.0, -2.0]], np.float32), binary=True),
        InferOutput("B", "INT64", (2,), np.array([3, -4])),
        InferOutput("C", BYTES, (1,), np.array([b"yes"], object), binary=True),
    ]
    response = InferResponse("m", "2", "r1", outputs, {"note": "x"})
    headers, parts = encode_response(response, explicit=True, binary=False)
    header = (
        b'{"model_name":"m","model_version":"2","id":"r1","parameters":{"note":"x"},"outputs":['
        b'{"name":"A","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}},'
        b'{"name":"B","datatype":"INT64","shape":[2],"data":[3,-4]},'
        b'{"name":"C","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":7}}]}'
    )
    assert b"".join(parts) == header + b"\x00\x00\x80\x3f\x00\x00\x00\xc0" + b"\x03\x00\x00\x00yes"
    assert dict(headers) == {
        b"Content-Type": b"application/octet-stream",
        b"Inference-Header-Content-Length": str(len(header)).encode(),
    }


def test_a_response_without_id_has_none_and_empty_binary_outputs_are_json():
    response = InferResponse("m", "1", "", [InferOutput("A", "FP32", (0,), np.empty(0, np.float32))])
    headers, parts = encode_response(response, explicit=False, binary=True)
    assert dict(headers) == {b"Content-Type": b"application/json"}
    assert json.loads(b"".join(parts)) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "A", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}],
    }


def test_a_large_output_travels_as_a_view_of_the_array():
    array = np.arange(COPIED_BYTES, dtype=np.float32)
    _, parts = encode_response(
        InferResponse("m", "1", "", [InferOutput("A", "FP32", array.shape, array)]), explicit=False, binary=True
    )
    assert isinstance(parts[1], memoryview)
    assert np.shares_memory(np.frombuffer(parts[1], np.float32), array)


def test_inputs_are_views_of_an_aligned_body_and_copies_otherwise():
    header = json.dumps(binary("FP32", [100_000], 400_000)).encode()
    memory = np.zeros(len(header) + 400_064, np.uint8)
    for shift, shared in ((0, True), (1, False)):
        start = (-(memory.ctypes.data + len(header)) % 64) + shift
        body = memory[start : start + len(header) + 400_000]
        body[: len(header)] = np.frombuffer(header, np.uint8)
        decoded = decode_request(
            body.data,
            len(header),
            metadata=ANY_MODEL,
            version="",
            batching=False,
            regions=FakeRegions(),
            limit=LIMIT,
            received_ns=0,
        ).request.inputs["IN"]
        assert decoded.data.flags.aligned
        assert np.shares_memory(decoded.data, memory) is shared


def test_small_binary_tensors_are_aligned_whatever_the_length_of_the_header():
    for padding in range(16):
        document = {"id": "x" * padding, **binary("FP64", [2], 16)}
        assert decode(document, struct.pack("<2d", 1.5, -2.5)).inputs["IN"].data.flags.aligned


@pytest.mark.parametrize("values", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]], [[[1], [2]], [[3], [4]], [[5], [6]]]])
def test_json_data_may_be_flat_or_nested(values):
    decoded = decode(data("INT32", [2, 3], values), binary=False).inputs["IN"].data
    np.testing.assert_array_equal(decoded, np.arange(1, 7, dtype=np.int32).reshape(2, 3))


def test_non_finite_numbers_go_both_ways_in_json():
    request = decode(
        b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[5],"data":[NaN,Infinity,-Infinity,Inf,1e40]}]}'
    )
    received = request.inputs["IN"].data
    np.testing.assert_array_equal(received, np.array([np.nan, np.inf, -np.inf, np.inf, np.inf], np.float32))
    _, parts = encode_response(
        InferResponse("m", "1", "", [InferOutput("A", "FP32", (5,), received)]), explicit=False, binary=False
    )
    assert b'"data":[NaN,Infinity,-Infinity,Infinity,Infinity]' in parts[0]


def test_booleans_above_one_become_true():
    decoded = decode(binary("BOOL", [4], 4), b"\x00\x01\x02\xff").inputs["IN"].data
    assert decoded.view(np.uint8).tolist() == [0, 1, 1, 1]


def test_empty_tensors_are_legal_in_both_forms():
    assert decode(binary("FP32", [0, 3], 0)).inputs["IN"].data.shape == (0, 3)
    assert decode(data("FP32", [2, 0], []), binary=False).inputs["IN"].data.shape == (2, 0)
    assert decode(binary(BYTES, [0], 0)).inputs["IN"].data.shape == (0,)


def test_inputs_come_from_shared_memory():
    regions = FakeRegions()
    regions.memory["r"] = bytearray(struct.pack("<4f", 0, 1, 2, 3))
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    decoded = decode({"inputs": [tensor("FP32", [2], parameters=region)]}, regions=regions).inputs["IN"].data
    np.testing.assert_array_equal(decoded, [1, 2])
    with pytest.raises(NotFound):
        decode({"inputs": [tensor("FP32", [2], parameters={**region, "shared_memory_region": "z"})]}, regions=regions)


def test_outputs_in_shared_memory_carry_their_place_instead_of_data():
    output = InferOutput("A", "FP32", (2,), np.zeros(2, np.float32), region=RegionSlice("r", 16, 8))
    headers, parts = encode_response(InferResponse("m", "1", "", [output]), explicit=True, binary=True)
    assert dict(headers)[b"Content-Type"] == b"application/json"
    assert json.loads(parts[0])["outputs"][0]["parameters"] == {
        "shared_memory_region": "r",
        "shared_memory_byte_size": 8,
        "shared_memory_offset": 16,
    }


def test_forwarded_headers_win_over_parameters_of_the_same_name():
    document = {**data("FP32", [0], []), "parameters": {"x-user": "forged", "other": 1}}
    request = decode(document, binary=False, forwarded={"x-user": "real"})
    assert request.parameters == {"x-user": "real", "other": 1}


# --- the raw binary form


def raw(name: str, body: bytes, batching: bool = False) -> InferRequest:
    decoded = decode_request(
        body,
        0,
        metadata=models()[name][0],
        version="",
        batching=batching,
        regions=FakeRegions(),
        limit=LIMIT,
        received_ns=0,
    )
    assert decoded.binary
    return decoded.request


def test_a_raw_binary_request_takes_its_shape_from_the_model():
    assert raw("echo_fp32", bytes(12)).inputs["IN"].shape == (3,)
    assert raw("batched", bytes(16), batching=True).inputs["IN"].shape == (1, 4)
    assert raw("fixed", bytes(24)).inputs["IN"].shape == (2, 3)
    assert raw("strings", b"hello", batching=True).inputs["IN"].data.tolist() == [[b"hello"]]


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("two", 8, "needs a model with 1 input"),
        ("grid", 8, "at most 1 variable dimension"),
        ("sentence", 8, "needs shape [1]"),
        ("fixed", 8, "Expected 24, got 8"),
        ("echo_fp32", 7, "expected a multiple of 4"),
    ],
)
def test_a_raw_binary_request_that_does_not_fit_is_refused(name, size, message):
    with pytest.raises(InvalidRequest, match=message.replace("[", r"\[")):
        raw(name, bytes(size))


def test_a_raw_binary_request_to_a_model_without_inputs_has_no_input():
    assert raw("none", b"").inputs == {}


# --- requests that are refused, by row of the error table

STRING = struct.Struct("<I")


def strings(*items: bytes) -> bytes:
    return b"".join(STRING.pack(len(item)) + item for item in items)


REFUSED = {
    "8 malformed": (b"{", b"", "failed to parse the request JSON buffer"),
    "8 not an object": (b"[]", b"", "expected the request to be a JSON object, got an array"),
    "8 blank": (b" ", b"", "failed to parse the request JSON buffer"),
    "8 not UTF-8": (b'{"id":"\xff"}', b"", "failed to parse the request JSON buffer"),
    "8 NaN and bad": (b'{"id":NaN,}', b"", "failed to parse the request JSON buffer"),
    "8 half a surrogate": (b'{"id":"\\ud800","x":NaN}', b"", "failed to parse the request JSON buffer"),
    "9 too deep": (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", b"", "JSON nesting depth exceeds maximum allowed"),
    "9 hopelessly deep": (b"[" * 200_000, b"", "JSON nesting depth exceeds maximum allowed"),
    "10 no inputs": ({}, b"", "Unable to parse 'inputs' of the request: attempt to access non-existing object member"),
    "10 no name": ({"inputs": [{"datatype": "FP32", "shape": [1]}]}, b"", "Unable to parse 'name'"),
    "10 no datatype": ({"inputs": [{"name": "IN", "shape": [1]}]}, b"", "Unable to parse 'datatype' of input 'IN'"),
    "10 no shape": ({"inputs": [{"name": "IN", "datatype": "FP32"}]}, b"", "Unable to parse 'shape' of input 'IN'"),
    "inputs no array": ({"inputs": {}}, b"", "Unable to parse 'inputs': expected an array, got an object"),
    "input no object": ({"inputs": [1]}, b"", "Unable to parse 'inputs': expected an object, got an integer"),
    "name no string": ({"inputs": [{"name": 3}]}, b"", "Unable to parse 'name' of an input: expected a string"),
    "11 negative": (data("FP32", [-1], [1]), b"", "attempt to access JSON non-unsigned-integer"),
    "11 fraction": (data("FP32", [1.0], [1]), b"", "attempt to access JSON non-unsigned-integer"),
    "11 boolean": (data("FP32", [True], [1]), b"", "attempt to access JSON non-unsigned-integer"),
    "11 shape no array": ({"inputs": [{**tensor("FP32", []), "shape": "1"}]}, b"", "expected an array, got a string"),
    "12 too many": (data("FP32", [1], [1, 2]), b"", "Shape does not match true shape of 'data' field"),
    "13 too few": (data("FP32", [3], [1, 2]), b"", "field: shape does not match true shape"),
    "14 FP16": (data("FP16", [1], [1.0]), b"", "receiving FP16 data via JSON is not supported"),
    "14 BF16": (data("BF16", [1], [1.0]), b"", "receiving BF16 data via JSON is not supported"),
    "19 duplicate input": (
        {"inputs": [tensor("FP32", [0], data=[]), tensor("FP32", [0], data=[])]},
        b"",
        "input 'IN' already exists in request",
    ),
    "19 duplicate output": (
        {**data("FP32", [0], []), "outputs": [{"name": "A"}, {"name": "A"}]},
        b"",
        "output 'A' already exists in request",
    ),
    "20 unknown datatype": (data("FP31", [1], [1]), b"", "data-type is 'FP31'"),
    "20 datatype no string": ({"inputs": [{**tensor("FP32", [1]), "datatype": 1}]}, b"", "data-type is '1'"),
    "25 bytes": (binary("FP32", [2], 4), bytes(4), "Expected 8, got 4"),
    "26 no length": (binary(BYTES, [1], 3), bytes(3), "expected 1 string elements|incomplete string length indicator"),
    "26 no length left": (
        binary(BYTES, [2], 10),
        strings(b"abc") + bytes(3),
        "incomplete string length indicator for inference input 'IN', expecting 4 bytes but only 3 bytes available",
    ),
    "27 too many strings": (
        binary(BYTES, [1], 10),
        strings(b"a", b"b"),
        "unexpected number of string elements 2 for inference input 'IN', expecting 1",
    ),
    "28 too few strings": (
        binary(BYTES, [3], 10),
        strings(b"a", b"b"),
        "expected 3 string elements for inference input 'IN', got 2",
    ),
    "29 overrun": (binary(BYTES, [1], 6), STRING.pack(2**32 - 1) + b"ab", "incomplete string data"),
    "29 overrun of the last": (
        binary(BYTES, [2], 11),
        strings(b"ab") + STRING.pack(2) + b"a",
        "incomplete string data",
    ),
    "32 beyond the body": (binary("FP32", [2], 8), bytes(5), "expecting 3 additional bytes"),
    "33 left over": (binary("FP32", [1], 4), bytes(6), "unexpected additional input data for model 'm': 2 bytes"),
    "34 no data": ({"inputs": [tensor("FP32", [1])]}, b"", "Input must set only one of the following fields"),
    "34 two sources": (
        {"inputs": [tensor("FP32", [1], data=[1], parameters={"binary_data_size": 4})]},
        bytes(4),
        "Input must set only one of the following fields",
    ),
    "34 binary and region": (
        {
            "inputs": [
                tensor(
                    "FP32",
                    [1],
                    parameters={"binary_data_size": 4, "shared_memory_region": "r", "shared_memory_byte_size": 4},
                )
            ]
        },
        bytes(4),
        "Input must set only one of the following fields",
    ),
    "38 overflow": (data("FP32", [2**40, 2**40], []), b"", "causes total element count to exceed maximum size"),
    "38 one dimension": (data("INT8", [2**63], []), b"", "causes total element count to exceed maximum size"),
    "38 in bytes": (data("FP64", [2**61], []), b"", "causes total element count to exceed maximum size"),
    "38 beside a zero": (data("FP32", [0, 2**62], []), b"", "unusable shape for input 'IN'"),
    "38 too many dimensions": (data("FP32", [1] * 100, [1]), b"", "unusable shape for input 'IN'"),
    "48 reserved": ({**data("FP32", [0], []), "parameters": {"triton_x": 1}}, b"", "reserved"),
    "49 priority": ({**data("FP32", [0], []), "parameters": {"priority": -1}}, b"", "must not be negative"),
    "49 priority type": ({**data("FP32", [0], []), "parameters": {"priority": "1"}}, b"", "expected an integer"),
    "49 timeout type": ({**data("FP32", [0], []), "parameters": {"timeout": 1.5}}, b"", "expected an integer"),
    "49 timeout bool": ({**data("FP32", [0], []), "parameters": {"timeout": True}}, b"", "expected an integer"),
    "49 sequence_id": ({**data("FP32", [0], []), "parameters": {"sequence_id": 1.5}}, b"", "a string or an integer"),
    "49 sequence_start": ({**data("FP32", [0], []), "parameters": {"sequence_start": 1}}, b"", "expected a boolean"),
    "49 null": ({**data("FP32", [0], []), "parameters": {"x": None}}, b"", "got null"),
    "49 list": ({**data("FP32", [0], []), "parameters": {"x": [1]}}, b"", "got an array"),
    "49 not an object": ({**data("FP32", [0], []), "parameters": [1]}, b"", "Unable to parse 'parameters'"),
    "49 binary_data_output": (
        {**data("FP32", [0], []), "parameters": {"binary_data_output": "yes"}},
        b"",
        "expected a boolean",
    ),
    "id": ({**data("FP32", [0], []), "id": 7}, b"", "Unable to parse 'id': expected a string, got an integer"),
    "binary size type": ({"inputs": [tensor("FP32", [1], parameters={"binary_data_size": "4"})]}, b"", "an integer"),
    "binary size negative": ({"inputs": [tensor("FP32", [1], parameters={"binary_data_size": -4})]}, b"", "negative"),
    "input parameters": ({"inputs": [tensor("FP32", [1], parameters=[])]}, b"", "Unable to parse 'parameters'"),
    "region without size": (
        {"inputs": [tensor("FP32", [1], parameters={"shared_memory_region": "r"})]},
        b"",
        "'shared_memory_byte_size' must be specified",
    ),
    "size without region": (
        {"inputs": [tensor("FP32", [1], parameters={"shared_memory_byte_size": 4})]},
        b"",
        "specified without 'shared_memory_region'",
    ),
    "region no string": (
        {"inputs": [tensor("FP32", [1], parameters={"shared_memory_region": 5, "shared_memory_byte_size": 4})]},
        b"",
        "expected a string, got an integer",
    ),
    "outputs no array": ({**data("FP32", [0], []), "outputs": {}}, b"", "Unable to parse 'outputs'"),
    "binary_data": (
        {**data("FP32", [0], []), "outputs": [{"name": "A", "parameters": {"binary_data": 1}}]},
        b"",
        "expected a boolean, got an integer for tensor|expected a boolean, got an integer",
    ),
    "classification": (
        {**data("FP32", [0], []), "outputs": [{"name": "A", "parameters": {"classification": 1_000_001}}]},
        b"",
        "'classification' must be between 0 and 1000000",
    ),
    "data no array": (data("FP32", [1], 1.0), b"", "Unable to parse 'data' of input 'IN': expected an array"),
    "data mixed": (data("FP32", [3], [[1, 2], 3]), b"", "arrays and values are mixed"),
    "data mixed inside": (
        data("FP32", [3], [1, [2, 3]]),
        b"",
        "no value of datatype FP32|Shape does not match|true shape",
    ),
    "data string": (data("FP32", [1], ["1"]), b"", "a string is no value of datatype FP32"),
    "data null": (data("FP32", [1], [None]), b"", "null is no value of datatype FP32"),
    "data boolean": (data("FP32", [1], [True]), b"", "a boolean is no value of datatype FP32"),
    "data fraction": (data("INT32", [1], [1.5]), b"", "a number is no value of datatype INT32"),
    "data range": (data("INT8", [1], [128]), b"", "out of range of INT8"),
    "data negative": (data("UINT64", [1], [-1]), b"", "out of range of UINT64"),
    "data number as BOOL": (data("BOOL", [1], [1]), b"", "an integer is no value of datatype BOOL"),
    "data number as BYTES": (data("BYTES", [1], [1]), b"", "an integer is no value of datatype BYTES"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_understood_is_refused(case):
    document, tensors, message = case
    with pytest.raises(InvalidRequest, match=message.replace("[", r"\[")):
        decode(document, tensors)


def test_a_json_tensor_is_limited_after_expansion():
    with pytest.raises(HttpError, match="Use --http-max-input-size to increase the limit") as refused:
        decode(data("FP64", [1000], [0]), binary=False, limit=4096)
    assert refused.value.status == 400
    letters = b",".join([b'"a"'] * 1000)
    document = b'{"inputs":[{"name":"IN","datatype":"BYTES","shape":[1000],"data":[' + letters + b"]}]}"
    with pytest.raises(HttpError, match="input 'IN' of 5000 bytes"):
        decode(document, binary=False, limit=4999)
    assert decode(document, binary=False, limit=5000).inputs["IN"].shape == (1000,)


def test_a_json_header_is_limited():
    with pytest.raises(HttpError, match="request JSON of"):
        decode({**data("FP32", [0], []), "id": "x" * 5000}, binary=False, limit=4096)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        (b"", "Unable to parse"),
        (b"1.5", "Unable to parse"),
        (b"--1", "Unable to parse"),
        (b"0x10", "Unable to parse"),
        (b"\xb2", "Unable to parse"),
        (b"2147483648", "value is out of range"),
        (b"9" * 5000, "value is out of range"),
        (b"-1", r"inference header size should be in range \(0, 100\), got: -1"),
        (b"101", r"inference header size should be in range \(0, 100\), got: 101"),
    ],
)
def test_rows_30_and_31_the_header_length(value, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_header_length(value, 100)


def test_row_14_outputs_that_json_cannot_carry_are_refused_before_running():
    metadata = models()["echo_fp16"][0]
    common = {"metadata": metadata, "version": "", "batching": False, "regions": FakeRegions(), "limit": LIMIT}
    inputs = [tensor("FP16", [1], parameters={"binary_data_size": 2})]

    def check(**more: object) -> None:
        header = json.dumps({"inputs": inputs, **more}).encode()
        refuse_json_outputs(metadata, decode_request(header + bytes(2), len(header), received_ns=0, **common))

    for more in ({}, {"outputs": [{"name": "IN"}]}):
        with pytest.raises(InvalidRequest, match="sending FP16 data via JSON is not supported"):
            check(**more)
    check(parameters={"binary_data_output": True})
    check(outputs=[{"name": "IN", "parameters": {"binary_data": True}}])
    check(outputs=[{"name": "IN", "parameters": {"classification": 2}}])
    with pytest.raises(InvalidRequest, match="sending FP16 data via JSON is not supported"):
        encode_response(
            InferResponse("m", "1", "", [InferOutput("A", "FP16", (1,), np.ones(1, np.float16))]),
            explicit=False,
            binary=False,
        )


def test_bytes_that_are_no_text_cannot_be_sent_as_json():
    response = InferResponse("m", "1", "", [InferOutput("A", BYTES, (1,), np.array([b"\xff"], object))])
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        encode_response(response, explicit=False, binary=False)


# --- properties


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(sorted(NUMPY_DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if datatype == BYTES:
        items = draw(st.lists(st.binary(max_size=20), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.empty(len(items), object)
        array[:] = items
        return datatype, array.reshape(shape)
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BOOL":
        return datatype, draw(arrays.arrays(np.bool_, shape))
    codes = draw(arrays.arrays(np.dtype(f"u{dtype.itemsize}"), shape))
    return datatype, codes.view(dtype) if shape else codes.reshape(1).view(dtype).reshape(())


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == object:
        return a.shape == b.shape and a.reshape(-1).tolist() == b.reshape(-1).tolist()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(tensors())
def test_binary_tensors_of_every_datatype_survive_the_round_trip(case):
    datatype, array = case
    _, parts = encode_response(
        InferResponse("m", "1", "", [InferOutput("IN", datatype, array.shape, array)]), explicit=False, binary=True
    )
    output = json.loads(parts[0])["outputs"][0]
    body = b"".join(parts[1:])
    assert output["parameters"]["binary_data_size"] == len(body)
    assert same(decode({"inputs": [output]}, body).inputs["IN"].data, array)


@given(tensors().filter(lambda case: case[0] not in {"FP16", "BF16"}))
def test_json_tensors_of_every_datatype_survive_the_round_trip(case):
    datatype, array = case
    if datatype == BYTES:
        array = np.array([item.hex().encode() for item in array.reshape(-1)] or [], object).reshape(array.shape)
    elif datatype.startswith("FP"):
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)  # JSON has one NaN only
    _, parts = encode_response(
        InferResponse("m", "1", "", [InferOutput("IN", datatype, array.shape, array)]), explicit=False, binary=False
    )
    output = json.loads(parts[0])["outputs"][0]
    assert same(decode({"inputs": [output]}, binary=False).inputs["IN"].data, array)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("name", "datatype", "shape", "parameters", "data")
almost_inputs = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("IN") | json_values,
        "datatype": st.sampled_from(sorted(NUMPY_DTYPES)) | json_values,
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=4) | json_values,
        "parameters": st.fixed_dictionaries(
            {},
            optional={
                "binary_data_size": st.integers(-1, 64) | json_values,
                "shared_memory_region": st.text(max_size=3) | json_values,
                "shared_memory_byte_size": json_values,
            },
        )
        | json_values,
        "data": st.lists(st.integers(), max_size=8) | json_values,
    },
)
almost_requests = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=3) | json_values,
        "inputs": st.lists(almost_inputs, max_size=3) | json_values,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.text(max_size=3)}) | json_values, max_size=3),
        "parameters": st.dictionaries(st.text(max_size=5), json_values, max_size=3) | json_values,
    },
)


def refused_or_decoded(header: bytes, tensors: bytes, *, as_binary: bool) -> None:
    """Whatever arrives, the codec answers with a request or with an error that is the client's own."""
    try:
        request = decode(header, tensors, binary=as_binary)
    except HttpError as error:
        assert error.status == 400
    except HoneError as error:
        assert error.kind in {ErrorKind.INVALID_ARGUMENT, ErrorKind.NOT_FOUND}
    else:
        for entry in request.inputs.values():
            assert entry.data.shape == entry.shape
            assert entry.data.dtype == NUMPY_DTYPES[entry.datatype]
            assert entry.data.flags.aligned


@settings(max_examples=300)
@given(almost_requests, st.binary(max_size=64), st.booleans())
def test_any_json_is_decoded_or_refused(document, tensors, as_binary):
    refused_or_decoded(json.dumps(document).encode(), tensors, as_binary=as_binary)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.binary(max_size=64), st.booleans())
def test_any_bytes_are_decoded_or_refused(header, tensors, as_binary):
    refused_or_decoded(header, tensors, as_binary=as_binary)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_as_strings_are_decoded_or_refused(tensors, count):
    refused_or_decoded(json.dumps(binary(BYTES, [count], len(tensors))).encode(), tensors, as_binary=True)


@given(st.binary(max_size=12))
def test_any_header_length_is_parsed_or_refused(value):
    with contextlib.suppress(InvalidRequest):
        assert 0 <= parse_header_length(value, 100) <= 100
