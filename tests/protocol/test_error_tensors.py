"""Tensors that do not fit the model, or their own shape."""

import struct

import numpy as np
import pytest

from tests.protocol.grpc_client import infer_request
from tests.protocol.wire import FORMS, RAW_ONLY, Input, Output, invalid, raw_input, typed_input

FOUR = np.zeros((1, 4), np.float32)
A, B = raw_input("A", "FP32", FOUR), raw_input("B", "FP32", FOUR)


@pytest.fixture(params=list(FORMS))
def form(request):
    return FORMS[request.param]


def strings(shape, raw):
    return [Input("IN", "BYTES", shape, raw=raw)]


def packed(*items):
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


# --- which tensors


@pytest.mark.row(15)
def test_missing_required_input(client):
    answer = client.infer("add_sub", [A])
    invalid(
        answer,
        "expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['A'], but missing required input(s)"
        " ['B']. Please provide all required input(s).",
    )


@pytest.mark.row(15)
def test_no_input_at_all(client):
    invalid(client.infer("add_sub", []), "expected 2 inputs but got 0 inputs for model 'add_sub'")


@pytest.mark.row(16)
def test_too_few_with_optional_inputs(client):
    invalid(client.infer("optional", []), "expected number of inputs between 3 and 4 but got 0 inputs")
    given = [raw_input(name, "FP32", np.zeros(4)) for name in "AB"]
    invalid(client.infer("optional", given), "between 3 and 4 but got 2 inputs", "['C']")


@pytest.mark.row(16)
def test_optional_input_does_not_stand_for_a_required_one(client):
    given = [raw_input(name, "FP32", np.zeros(4)) for name in "ABD"]
    invalid(client.infer("optional", given), "missing required input(s) ['C']")


@pytest.mark.row(16, 17)
def test_too_many_with_optional_inputs(client):
    given = [raw_input(name, "FP32", np.zeros(4)) for name in "ABCDE"]
    invalid(client.infer("optional", given), "'E'", "'optional'")


@pytest.mark.row(17)
@pytest.mark.parametrize("name", ["I", "", "a", "A ", "SUM", "Grüße"])
def test_unknown_input(client, name):
    invalid(client.infer("add_sub", [A, raw_input(name, "FP32", FOUR)]), f"unexpected inference input '{name}'")


@pytest.mark.row(18)
@pytest.mark.parametrize("name", ["O", "", "A", "sum"])
def test_unknown_output(client, name):
    answer = client.infer("add_sub", [A, B], [Output("SUM"), Output(name)])
    invalid(answer, f"unexpected inference output '{name}' for model 'add_sub'")


@pytest.mark.row(19)
def test_duplicate_input(client, form):
    given = [form("A", "FP32", FOUR), form("B", "FP32", FOUR), form("A", "FP32", FOUR)]
    invalid(client.infer("add_sub", given), "input 'A' already exists in request")


@pytest.mark.row(19)
def test_duplicate_output(client):
    answer = client.infer("add_sub", [A, B], [Output("SUM"), Output("DIFFERENCE"), Output("SUM")])
    invalid(answer, "output 'SUM' already exists in request")


# --- datatype and shape


@pytest.mark.row(20)
@pytest.mark.parametrize(("datatype", "size"), [("INT32", 4), ("FP64", 8), ("FP16", 2), ("UINT8", 1)])
def test_wrong_datatype(client, datatype, size):
    given = [A, Input("B", datatype, (1, 4), raw=bytes(4 * size))]
    invalid(
        client.infer("add_sub", given),
        f"inference input 'B' data-type is '{datatype}', but model 'add_sub' expects 'FP32'",
    )


@pytest.mark.row(20)
@pytest.mark.parametrize("datatype", ["", "float", "fp32", "FP8", "TYPE_FP32", "STRING", "INVALID"])
def test_datatype_that_does_not_exist(client, datatype):
    given = [A, Input("B", datatype, (1, 4), raw=bytes(16))]
    invalid(client.infer("add_sub", given), f"inference input 'B' data-type is '{datatype}'", "expects")


@pytest.mark.row(21)
@pytest.mark.parametrize("shape", [(1, 5), (1, 4, 1), (1,), (1, 1, 4), (1, 2), (1, 0)])
def test_wrong_shape(client, form, shape):
    given = [form("A", "FP32", FOUR), form("B", "FP32", np.zeros(shape))]
    shown = f"[{','.join(map(str, shape))}]"
    invalid(
        client.infer("add_sub", given),
        f"unexpected shape for input 'B' for model 'add_sub'. Expected [-1,4], got {shown}.",
        "NOTE: Setting a non-zero max_batch_size",
    )


@pytest.mark.row(21)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 2, 4), (2, 4, 1)])
def test_wrong_shape_without_batching(client, shape):
    given = [raw_input("A", "FP32", np.zeros(shape)), raw_input("B", "FP32", np.zeros((2, 4)))]
    message = invalid(client.infer("plain", given), "unexpected shape for input 'A'", "Expected [2,4], got [")
    assert "NOTE" not in message


@pytest.mark.row(11)
@pytest.mark.parametrize("shape", [(-1, 4), (1, -4), (-1, -4), (-(2**63), 4)])
def test_negative_dimension(client, shape):
    says = "attempt to access JSON non-unsigned-integer" if client.protocol == "http" else "dimensions should be"
    invalid(client.infer("add_sub", [A, Input("B", "FP32", shape, raw=bytes(16))]), says, "'B'")


@pytest.mark.row(22)
def test_shape_without_batch_dimension(client):
    given = [Input("IN", "FP32", (), raw=bytes(4))]
    invalid(client.infer("identity_fp32", given), "input 'IN' has no shape but model requires batch dimension")


@pytest.mark.row(23)
def test_different_batch_sizes(client, form):
    given = [form("A", "FP32", np.zeros((2, 4))), form("B", "FP32", np.zeros((3, 4)))]
    answer = client.infer("add_sub", given)
    invalid(answer, "input 'B' batch size does not match other inputs for 'add_sub'")


@pytest.mark.row(24)
def test_batch_too_large(client, form):
    given = [form(name, "FP32", np.zeros((9, 4))) for name in "AB"]
    invalid(client.infer("add_sub", given), "inference request batch-size must be <= 8 for 'add_sub'")


@pytest.mark.row(24)
def test_empty_batch(client):
    given = [raw_input(name, "FP32", np.zeros((0, 4))) for name in "AB"]
    invalid(client.infer("add_sub", given), "batch-size", "'add_sub'")


@pytest.mark.row(25)
@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_byte_size_that_is_not_that_of_the_shape(client, size):
    given = [A, Input("B", "FP32", (1, 4), raw=bytes(size))]
    answer = client.infer("add_sub", given)
    invalid(answer, "input byte size mismatch for input 'B' for model 'add_sub'", f"Expected 16, got {size}")


@pytest.mark.row(38)
@pytest.mark.parametrize(
    "shape",
    [
        (2**62, 4),
        (2**63 - 1, 2),
        (2**32, 2**32),
        (2**21,) * 4,
        (2**61, 1),
        (3, 2**62),
        (1,) * 500 + (2**63 - 1, 9),
    ],
    ids=lambda shape: f"{len(shape)}d",
)
@pytest.mark.parametrize("source", ["raw", "data"])
def test_shape_product_overflows(client, shape, source):
    given = Input("IN", "FP64", shape, raw=bytes(16)) if source == "raw" else Input("IN", "FP64", shape, data=[1, 2])
    invalid(client.infer("identity_fp64", [given]), "causes total element count to exceed maximum size", "'IN'")


@pytest.mark.row(38)
@pytest.mark.parametrize("shape", [(2**63 - 1, 0), (0, 2**40, 2**40), (1,) * 200, (2**40, 1)])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_shapes_beyond_memory(client, shape, datatype):
    """Within 64 bits, and nothing that could be allocated."""
    invalid(client.infer(f"identity_{datatype.lower()}", [Input("IN", datatype, shape, raw=b"")]))


# --- strings


@pytest.mark.row(26)
@pytest.mark.parametrize("tail", [b"\0", b"\1\0\0"])
def test_string_length_cut_short(client, tail):
    answer = client.infer("identity_bytes", strings((1, 2), packed(b"one") + tail))
    says = "incomplete string length indicator for inference input"
    invalid(answer, says, f"expecting 4 bytes but only {len(tail)} bytes available")


@pytest.mark.row(27)
def test_too_many_strings(client):
    answer = client.infer("identity_bytes", strings((1, 8), packed(*[b"x"] * 9)))
    invalid(answer, "unexpected number of string elements 9 for inference input", "expecting 8")


@pytest.mark.row(28)
@pytest.mark.parametrize(("raw", "found"), [(packed(*[b"x"] * 6), 6), (b"", 0), (packed(b"a" * 100), 1)])
def test_too_few_strings(client, raw, found):
    answer = client.infer("identity_bytes", strings((1, 8), raw))
    invalid(answer, "expected 8 string elements for inference input", f"got {found}")


@pytest.mark.row(29)
@pytest.mark.parametrize("length", [4, 5, 1_150_092_984, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("before", [0, 1])
def test_string_runs_past_the_end(client, length, before):
    """Also where it is the last element, which Triton lets pass cut short."""
    raw = packed(*[b"first"] * before) + struct.pack("<I", length) + b"abc"
    answer = client.infer("identity_bytes", strings((1, before + 1), raw))
    invalid(answer, "incomplete string data", f"length {length}", "only 3 bytes")


def test_strings_that_are_not_text(client):
    """ONNX strings are UTF-8: what is not is the request's fault."""
    invalid(client.infer("identity_bytes", strings((1, 1), packed(b"\xff\xfe"))), "UTF-8", "'IN'")


def test_bad_strings_do_not_spoil_the_batch_of_others(client):
    for _ in range(3):
        invalid(client.infer("identity_bytes", strings((1, 1), packed(b"\xff"))))
        assert client.infer("identity_bytes", strings((1, 1), packed(b"good")))["OUT"].tolist() == [[b"good"]]


# --- sources and forms


@pytest.mark.row(14)
@pytest.mark.parametrize("datatype", RAW_ONLY)
def test_half_floats_as_typed_input(client, datatype):
    answer = client.infer(f"identity_{datatype.lower()}", [typed_input("IN", datatype, np.zeros((1, 2)))])
    invalid(answer, f"receiving {datatype} data via", "is not supported", "'IN'")


@pytest.mark.row(14)
@pytest.mark.parametrize("datatype", RAW_ONLY)
@pytest.mark.parametrize("outputs", [None, [Output("OUT", binary=False)]])
def test_half_floats_as_json_output(http, datatype, outputs):
    given = [raw_input("IN", datatype, np.zeros((1, 2)))]
    answer = http.infer(f"identity_{datatype.lower()}", given, outputs, binary=False)
    invalid(answer, f"sending {datatype} data via JSON is not supported", "'OUT'")


@pytest.mark.row(34)
def test_two_sources(client):
    both = Input("A", "FP32", (1, 4), data=[0, 0, 0, 0], raw=bytes(16))
    says = (
        "Input must set only one of the following fields"
        if client.protocol == "http"
        else "contents field must not be specified when using raw_input_contents"
    )
    invalid(client.infer("add_sub", [both, B]), says, "'A'")


@pytest.mark.row(34)
@pytest.mark.parametrize("source", ["data", "raw"])
def test_shared_memory_beside_another_source(client, source):
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    given = Input("A", "FP32", (1, 4), parameters=region)
    if source == "data":
        given.data = [0, 0, 0, 0]
    else:
        given.raw = bytes(16)
    # Over gRPC raw contents name no input: what is left over is refused; a region has to be looked up first.
    assert client.infer("add_sub", [given, typed_input("B", "FP32", FOUR)]).status in (
        400,
        501,
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
    )
    if source == "data" or client.protocol == "http":
        says = "only one of" if client.protocol == "http" else "unexpected 'contents'"
        invalid(client.infer("add_sub", [given, B]), says)


@pytest.mark.row(34)
def test_no_source(client):
    answer = client.infer("add_sub", [Input("A", "FP32", (1, 4)), typed_input("B", "FP32", FOUR)])
    says = "only one of" if client.protocol == "http" else "unable to find data for input tensor 'A'"
    invalid(answer, says)


@pytest.mark.row(35)
def test_fewer_raw_contents_than_inputs(grpc):
    given = [A, Input("B", "FP32", (1, 4))]
    says = "unable to find data for input tensor 'B' for model 'add_sub' in request."
    invalid(grpc.infer("add_sub", given), says)


@pytest.mark.row(35)
def test_more_raw_contents_than_inputs(grpc):
    request = infer_request("identity_fp32", [Input("IN", "FP32", (1, 1), raw=bytes(4))])
    request.raw_input_contents.append(bytes(4))
    invalid(grpc.infer_message(request), "unexpected additional input data", "2 raw_input_contents for 1")


@pytest.mark.row(36)
@pytest.mark.parametrize(
    ("datatype", "field", "data"),
    [
        ("FP32", "int_contents", [1, 2]),
        ("FP32", "fp64_contents", [1, 2]),
        ("INT32", "int64_contents", [1, 2]),
        ("INT64", "int_contents", [1, 2]),
        ("UINT8", "int_contents", [1, 2]),
        ("INT8", "bytes_contents", [b"\1", b"\2"]),
        ("BOOL", "uint_contents", [0, 1]),
        ("BYTES", "bool_contents", [False, True]),
    ],
)
def test_contents_of_another_datatype(grpc, datatype, field, data):
    given = [Input("IN", datatype, (1, 2), data=data, field=field)]
    answer = grpc.infer(f"identity_{datatype.lower()}", given)
    invalid(answer, "unexpected explicit tensor data for input tensor 'IN'", datatype)


@pytest.mark.row(36)
def test_two_kinds_of_contents(grpc):
    request = infer_request("identity_fp32", [Input("IN", "FP32", (1, 2), data=[1, 2])])
    request.inputs[0].contents.int_contents.append(1)
    invalid(grpc.infer_message(request), "unexpected explicit tensor data for input tensor 'IN'")


@pytest.mark.row(12, 13)
@pytest.mark.parametrize(("number", "http_says"), [(9, "does not match true shape"), (7, "does not match true shape")])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL", "INT8"])
def test_number_of_typed_elements(client, number, http_says, datatype):
    item = {"FP32": 1.0, "BYTES": "x", "BOOL": True, "INT8": 1}[datatype]
    answer = client.infer(f"identity_{datatype.lower()}", [Input("IN", datatype, (2, 4), data=[item] * number)])
    if client.protocol == "http":
        invalid(answer, "Unable to parse" if number > 8 else "Failed to parse", "'data'", http_says)
    else:
        invalid(answer, f"unexpected number of elements {number}", "expecting 8")


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("INT8", [128]), ("INT8", [-129]), ("UINT8", [256]), ("INT16", [40_000]), ("UINT16", [2**16])],
)
def test_values_out_of_range(client, datatype, values):
    answer = client.infer(f"identity_{datatype.lower()}", [Input("IN", datatype, (1, 1), data=values)])
    invalid(answer, f"out of range of {datatype}", "'IN'")
