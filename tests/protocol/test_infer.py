"""Requests that must be answered, in every datatype and form."""

import numpy as np
import pytest

from tests.protocol.wire import (
    DATATYPES,
    FORMS,
    RAW_ONLY,
    Input,
    Output,
    Typed,
    accepted,
    invalid,
    raw_bytes,
    raw_input,
    sample,
    typed_input,
)

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(params=list(FORMS))
def form(request):
    return FORMS[request.param]


def equal(given, array):
    assert array.dtype == given.dtype and array.shape == given.shape
    if array.dtype == np.object_:
        assert array.tolist() == given.tolist()
    else:
        assert array.tobytes() == given.tobytes()


# --- datatypes and shapes


@pytest.mark.parametrize("binary", [True, False], ids=["binary-out", "json-out"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_identity_gives_back_every_bit(client, form, datatype, binary):
    given = sample(datatype, (3, 6))
    answer = client.infer(f"identity_{datatype.lower()}", [form("IN", datatype, given)], binary=binary)
    json_output = not binary and client.protocol == "http"
    if datatype in RAW_ONLY and (form is typed_input or json_output):
        invalid(answer, f"{datatype} data via", "not supported")  # row 14
        return
    assert answer["OUT"].datatype == datatype
    equal(given, answer["OUT"].array)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_zero_size_tensors(client, datatype):
    given = sample(datatype, (2, 0))
    answer = client.infer(f"identity_{datatype.lower()}", [raw_input("IN", datatype, given)])
    assert answer["OUT"].shape == (2, 0) and answer["OUT"].array.size == 0


def test_zero_size_tensor_in_typed_form(client):
    answer = client.infer("identity_fp32", [typed_input("IN", "FP32", np.empty((1, 0)))], binary=False)
    assert answer["OUT"].shape == (1, 0)


def test_scalar(client, form):
    answer = client.infer("scalar", [form("IN", "FP32", np.array([2.5]))])
    assert answer["OUT"].shape == (1,) and answer["OUT"].tolist() == [2.5]


def test_vector_model_takes_a_column(client, form):
    """A graph of rank one batches as dims [1] with reshape []."""
    given = np.array([[5], [-6], [7]], np.int64)
    equal(given, client.infer("number", [form("IN", "INT64", given)])["OUT"].array)


def test_several_free_dimensions(client, form):
    given = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    equal(given, client.infer("grid", [form("IN", "FP32", given)])["OUT"].array)


def test_nested_and_flat_json_mean_the_same(http):
    for data in ([[0, 1, 2, 3], [4, 5, 6, 7]], list(range(8)), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]):
        answer = http.infer("identity_fp32", [Input("IN", "FP32", (2, 4), data=data)], binary=False)
        assert answer["OUT"].array.tolist() == ROWS.tolist()
        # As Triton does, outputs are flat lists.
        assert answer.document["outputs"][0]["data"] == list(range(8))


def test_nan_and_infinity(client, form):
    given = np.array([[np.nan, np.inf, -np.inf, 1]], np.float32)
    for binary in (True, False):
        np.testing.assert_array_equal(
            client.infer("identity_fp32", [form("IN", "FP32", given)], binary=binary)["OUT"].array, given
        )


def test_non_finite_literals_in_json(http):
    body = b'{"inputs":[{"name":"IN","datatype":"FP64","shape":[1,4],"data":[NaN,Infinity,-Infinity,Inf]}]}'
    answer = http.infer_bytes("identity_fp64", body)
    np.testing.assert_array_equal(answer["OUT"].array, [[np.nan, np.inf, -np.inf, np.inf]])


def test_integers_keep_64_bits_in_json(http):
    top = 2**64 - 1
    answer = http.infer("identity_uint64", [Input("IN", "UINT64", (1, 2), data=[top, 2**53 + 1])], binary=False)
    assert answer.document["outputs"][0]["data"] == [top, 2**53 + 1]


def test_large_tensors(client):
    """Past gRPC's usual limit of 4 MiB, both ways, and past what is received in one piece."""
    given = np.random.default_rng(0).random((2, 1_000_000), np.float32)
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", given)])
    equal(given, answer["OUT"].array)


def test_large_strings(client, form):
    given = np.array([[b"x" * 300_000, b"", b"y"]], np.object_)
    equal(given, client.infer("identity_bytes", [form("IN", "BYTES", given)])["OUT"].array)


# --- several inputs and outputs


@pytest.mark.parametrize("model", ["add_sub", "plain"])
def test_all_outputs_by_default_in_the_order_of_the_model(client, form, model):
    answer = client.infer(model, [form("B", "FP32", ROWS * 2), form("A", "FP32", ROWS)])
    accepted(answer)
    assert list(answer.outputs) == ["SUM", "DIFFERENCE"]
    np.testing.assert_array_equal(answer["SUM"].array, ROWS * 3)
    np.testing.assert_array_equal(answer["DIFFERENCE"].array, -ROWS)


def test_requested_outputs_in_the_order_of_the_request(client, form):
    inputs = [form("A", "FP32", ROWS), form("B", "FP32", ROWS)]
    answer = client.infer("add_sub", inputs, [Output("DIFFERENCE"), Output("SUM")])
    accepted(answer)
    assert list(answer.outputs) == ["DIFFERENCE", "SUM"]
    answer = client.infer("add_sub", inputs, [Output("DIFFERENCE")])
    assert list(answer.outputs) == ["DIFFERENCE"] and not answer["DIFFERENCE"].array.any()


def test_forms_may_be_mixed_over_http(http):
    """Binary inputs take their bytes in order, skipping those in JSON; each output chooses its own form."""
    answer = http.infer(
        "mixed",
        [
            typed_input("A", "FP32", [[1, 2]]),
            raw_input("B", "BYTES", np.array([[b"zwei"]], np.object_)),
        ],
        [Output("C", binary=False), Output("D", binary=True)],
    )
    assert answer["C"].tolist() == [[1, 2]] and answer["D"].tolist() == [[b"zwei"]]
    assert "data" in answer.document["outputs"][0] and "data" not in answer.document["outputs"][1]


def test_form_of_an_output_beats_that_of_the_request(http):
    given = [raw_input("IN", "FP32", ROWS)]
    request_binary = {"binary_data_output": True}
    answer = http.infer("identity_fp32", given, [Output("OUT", binary=False)], parameters=request_binary)
    assert answer.headers["content-type"] == "application/json"
    document = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
        "outputs": [{"name": "OUT"}],
        "parameters": request_binary,
    }
    answer = http.infer_document("identity_fp32", document)
    assert answer.headers["content-type"] == "application/octet-stream" and answer["OUT"].tolist() == [[1]]


def test_json_is_the_default_over_http(http):
    answer = http.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], binary=False)
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers


def test_empty_binary_outputs_are_sent_as_json(http):
    answer = http.infer("identity_fp32", [raw_input("IN", "FP32", np.empty((1, 0)))])
    assert answer.headers["content-type"] == "application/json"
    assert answer["OUT"].parameters == {"binary_data_size": 0}


def test_optional_input(client, form):
    inputs = [form(name, "FP32", np.full(4, value)) for name, value in (("A", 1), ("B", 2), ("C", 3))]
    assert client.infer("optional", inputs)["OUT"].tolist() == [106.0] * 4
    inputs.append(form("D", "FP32", np.full(4, 4)))
    assert client.infer("optional", inputs)["OUT"].tolist() == [10.0] * 4


# --- versions, ids, parameters


@pytest.mark.parametrize(("version", "answering", "factor"), [("", "3", 3), ("1", "1", 2), ("3", "3", 3)])
def test_versions(client, form, version, answering, factor):
    answer = client.infer("versions", [form("IN", "FP32", ROWS)], version=version)
    np.testing.assert_array_equal(answer["OUT"].array, ROWS * factor)
    assert (answer.document["model_name"], answer.document["model_version"]) == ("versions", answering)


@pytest.mark.parametrize("id", ["", "7", 'Grüße "quoted" 世界', "x" * 2000])
def test_id_is_echoed(client, id):
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], id=id)
    assert accepted(answer).get("id", "") == id
    assert ("id" in answer.document) == bool(id)


def test_request_parameters_of_every_type(client):
    parameters = {"flag": True, "number": -5, "big": 2**64 - 1, "ratio": 0.5, "text": "Grüße"}
    accepted(client.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], parameters=parameters))


@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": 0},
        {"priority": 3},
        {"timeout": 60_000_000},
        {"priority": 1, "timeout": 0},
        {"sequence_id": 5, "sequence_start": True, "sequence_end": True},
        {"sequence_id": "five"},
    ],
    ids=str,
)
def test_parameters_with_a_meaning(client, parameters):
    """A model without priorities or sequences ignores them, as in Triton."""
    accepted(client.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], parameters=parameters))


def test_unsigned_parameters_over_grpc(grpc):
    parameters = {"priority": Typed("uint64_param", 1), "timeout": Typed("uint64_param", 60_000_000)}
    accepted(grpc.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], parameters=parameters))


def test_empty_final_response_may_be_asked_for(grpc):
    """perf_analyzer asks on every request: the one reserved key that clients send."""
    parameters = {"triton_enable_empty_final_response": False}
    accepted(grpc.infer("identity_fp32", [raw_input("IN", "FP32", ROWS)], parameters=parameters))


# --- classification


def classes(answer, output="OUT"):
    assert answer[output].datatype == "BYTES"
    return [[item.decode() for item in row] for row in answer[output].tolist()]


@pytest.mark.parametrize("binary", [True, False])
def test_classification_with_labels(client, binary):
    given = [raw_input("IN", "FP32", [[0.1, 0.9, 0.5, 0.2], [4, 3, 2, 1]])]
    answer = client.infer("labelled", given, [Output("OUT", binary=binary, parameters={"classification": 2})])
    assert classes(answer) == [
        ["0.900000:1:dog", "0.500000:2:bird"],
        ["4.000000:0:cat", "3.000000:1:dog"],
    ]


def test_classification_of_more_classes_than_there_are(client):
    given = [raw_input("IN", "FP32", [[0.25, 0.5, -1, 0]])]
    answer = client.infer("labelled", given, [Output("OUT", parameters={"classification": 100})])
    assert classes(answer) == [["0.500000:1:dog", "0.250000:0:cat", "0.000000:3:fish", "-1.000000:2:bird"]]


def test_classification_without_labels(client):
    given = [raw_input("IN", "INT32", [[3, 9]])]
    answer = client.infer("identity_int32", given, [Output("OUT", parameters={"classification": 1})])
    assert classes(answer) == [["9:1"]]


def test_classification_of_strings_is_refused(client):
    given = [raw_input("IN", "BYTES", np.array([[b"a"]], np.object_))]
    answer = client.infer("identity_bytes", given, [Output("OUT", parameters={"classification": 1})])
    assert answer.status in (400, "INVALID_ARGUMENT") and "classif" in answer.error


# --- the raw binary request of HTTP

RAW = {"Inference-Header-Content-Length": "0"}


def test_raw_binary_request(http):
    given = np.arange(5, dtype=np.float32)
    answer = http.infer_bytes("identity_fp32", given.tobytes(), RAW)
    equal(given.reshape(1, 5), answer["OUT"].array)
    assert answer.headers["content-type"] == "application/octet-stream"


def test_raw_binary_request_of_fixed_shape(http):
    given = np.arange(4, dtype=np.int32).reshape(2, 2)
    equal(given, http.infer_bytes("square", given.tobytes(), RAW)["OUT"].array)


def test_raw_binary_request_of_bytes(http):
    """The server adds the four-byte length."""
    answer = http.infer_bytes("word", "Grüße".encode(), RAW)
    assert answer["OUT"].tolist() == [["Grüße".encode()]]


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        ("add_sub", b"\0" * 32, "1 input"),
        ("grid", b"\0" * 24, "variable dimension"),
        ("identity_fp32", b"\0" * 7, "7 bytes"),
        ("square", b"\0" * 15, "Expected 16, got 15"),
    ],
)
def test_raw_binary_request_that_does_not_fit(http, model, body, says):
    answer = http.infer_bytes(model, body, RAW)
    assert answer.status == 400 and says in answer.error


# --- transport


def test_expect_continue(http):
    body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    answer = http.infer_bytes("identity_fp32", body, {"Expect": "100-continue"})
    assert answer["OUT"].tolist() == [[1]]


def test_unaligned_tensors(http):
    """Whatever the length of the JSON before them, tensors come out right."""
    for padding in range(9):
        answer = http.infer("identity_fp64", [raw_input("IN", "FP64", [[1.5, -2.5]])], id="x" * (padding + 1))
        assert answer["OUT"].tolist() == [[1.5, -2.5]]


def test_many_raw_inputs_are_told_apart(grpc):
    inputs = [raw_input("A", "FP32", [[1, 2]]), raw_input("B", "BYTES", np.array([[b"two"]], np.object_))]
    answer = grpc.infer("mixed", inputs)
    assert answer["C"].tolist() == [[1, 2]] and answer["D"].tolist() == [[b"two"]]


def test_boolean_bytes_above_one_are_true(client):
    answer = client.infer("identity_bool", [Input("IN", "BOOL", (1, 3), raw=b"\x00\x01\x07")])
    assert raw_bytes("BOOL", answer["OUT"].array) == b"\x00\x01\x01"
