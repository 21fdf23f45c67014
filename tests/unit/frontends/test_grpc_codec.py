"""ModelInferRequest to arrays, and answers to ModelInferResponse; each refusal in the words of the error table."""

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import HoneError, InvalidRequest, NotFound
from hone.frontends.grpc_codec import SPLIT_BYTES, decode_infer_request, encode_infer_response, parse_infer_request
from hone.protos import service_pb
from hone.types import BYTES, NUMPY_DTYPES, InferOutput, InferResponse, RegionSlice
from tests.unit.frontends.grpc_fakes import FakeRegions

FIXED = sorted(set(NUMPY_DTYPES) - {BYTES})
TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [1.5, float("-inf")]),
    "FP64": ("fp64_contents", [1e300, -2.5]),
    "BYTES": ("bytes_contents", [b"", b"\xff\0x"]),
}


def decode(request, regions=None, **options):
    proto, raw = parse_infer_request(request.SerializeToString())
    return decode_infer_request(proto, raw, regions or FakeRegions(), received_ns=5, **options)


def request_of(datatype, shape, raw=None, **fields):
    request = service_pb.ModelInferRequest(model_name="M", **fields)
    request.inputs.add(name="I", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def refusal(request, **options) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(request, **options)
    return str(caught.value)


def prefixed(*strings: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


# --- tensors


@pytest.mark.parametrize("datatype", FIXED)
@pytest.mark.parametrize("large", [False, True])
def test_raw_tensors_of_every_datatype_come_and_go_unchanged(datatype, large):
    dtype = NUMPY_DTYPES[datatype]
    num_rows = SPLIT_BYTES if large else 3
    data = np.random.default_rng(0).integers(0, 2, (num_rows, 5)).astype(dtype)
    decoded = decode(request_of(datatype, data.shape, data.tobytes(), id="7", model_version="3"))
    assert (decoded.model_name, decoded.model_version, decoded.id, decoded.protocol) == ("M", "3", "7", "grpc")
    assert decoded.received_ns == 5
    tensor = decoded.inputs["I"]
    assert (tensor.datatype, tensor.shape, tensor.data.shape, tensor.data.dtype) == (
        datatype,
        data.shape,
        data.shape,
        dtype,
    )
    assert tensor.data.flags.aligned
    np.testing.assert_array_equal(tensor.data, data)

    answer = InferResponse("M", "3", "7", [InferOutput("O", datatype, data.shape, tensor.data)])
    response = service_pb.ModelInferResponse.FromString(b"".join(encode_infer_response(answer)))
    assert (response.model_name, response.model_version, response.id) == ("M", "3", "7")
    assert [(o.name, o.datatype, tuple(o.shape)) for o in response.outputs] == [("O", datatype, data.shape)]
    assert list(response.raw_output_contents) == [data.tobytes()]


def test_large_tensors_are_views_of_the_message_where_aligned():
    request = request_of("UINT8", (SPLIT_BYTES,), bytes(SPLIT_BYTES))
    message = request.SerializeToString()
    proto, raw = parse_infer_request(message)
    data = decode_infer_request(proto, raw, FakeRegions(), received_ns=0).inputs["I"].data
    assert np.shares_memory(data, np.frombuffer(message, np.uint8))
    assert not data.flags.writeable


@pytest.mark.parametrize("shift", range(4))
def test_large_tensors_are_aligned_wherever_they_lie_in_the_message(shift):
    values = np.arange(SPLIT_BYTES, dtype=np.float32)
    tensor = decode(request_of("FP32", values.shape, values.tobytes(), id="x" * shift)).inputs["I"]
    assert tensor.data.flags.aligned
    np.testing.assert_array_equal(tensor.data, values)


@pytest.mark.parametrize("datatype", sorted(TYPED))
def test_typed_contents_of_every_datatype(datatype):
    field, values = TYPED[datatype]
    request = request_of(datatype, (2, 1))
    getattr(request.inputs[0].contents, field).extend(values)
    data = decode(request).inputs["I"].data
    assert data.shape == (2, 1)
    assert data.dtype == NUMPY_DTYPES[datatype]
    assert data.reshape(-1).tolist() == values


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_typed_contents_cannot_carry_halves(datatype):
    request = request_of(datatype, (1,))
    request.inputs[0].contents.fp32_contents.append(1)
    assert f"receiving {datatype} data via typed contents is not supported" in refusal(request)


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 128),
        ("INT16", "int_contents", -40_000),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 65_536),
    ],
)
def test_typed_contents_out_of_range_are_refused_not_wrapped(datatype, field, value):
    request = request_of(datatype, (1,))
    getattr(request.inputs[0].contents, field).append(value)
    assert f"out of range of {datatype}" in refusal(request)


def test_typed_contents_in_the_wrong_field():
    request = request_of("FP32", (1,))
    request.inputs[0].contents.int_contents.append(1)
    assert refusal(request).startswith(
        "unexpected explicit tensor data for input tensor 'I' for model 'M' of type 'FP32'"
    )


@pytest.mark.parametrize("count", [1, 3])
def test_typed_contents_of_another_count(count):
    request = request_of("FP32", (2,))
    request.inputs[0].contents.fp32_contents.extend([0] * count)
    assert refusal(request) == (
        f"unexpected number of elements {count} in fp32_contents for input tensor 'I' for model 'M', expecting 2"
    )


def test_typed_contents_beside_raw_contents():
    request = request_of("FP32", (1,), bytes(4))
    request.inputs[0].contents.fp32_contents.append(1)
    assert refusal(request).startswith("contents field must not be specified when using raw_input_contents for 'I'")


def test_fewer_raw_contents_than_inputs():
    request = request_of("FP32", (1,), bytes(4))
    request.inputs.add(name="J", datatype="FP32", shape=(1,))
    assert refusal(request) == "unable to find data for input tensor 'J' for model 'M' in request."


def test_no_data_at_all():
    assert refusal(request_of("FP32", (1,))) == "unable to find data for input tensor 'I' for model 'M' in request."


def test_more_raw_contents_than_inputs():
    request = request_of("FP32", (1,), bytes(4))
    request.raw_input_contents.append(b"")
    assert refusal(request).startswith("unexpected additional input data for model 'M'")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("difference", [-1, 1])
def test_raw_contents_of_another_size(large, difference):
    size = 4 * (SPLIT_BYTES if large else 4)
    request = request_of("FP32", (size // 4,), bytes(size + difference))
    assert refusal(request) == (
        f"input byte size mismatch for input 'I' for model 'M'. Expected {size}, got {size + difference}"
    )


def test_unknown_datatype():
    assert refusal(request_of("FLOAT", (1,), bytes(4))).startswith(
        "inference input 'I' data-type is 'FLOAT', but model 'M' expects"
    )


@pytest.mark.parametrize(("shape", "raw"), [((2, -1), bytes(4)), ((-2, -1), bytes(8)), ((-1,), b"")])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_negative_dimensions(shape, raw, datatype):
    assert refusal(request_of(datatype, shape, raw)) == (
        f"All input dimensions should be specified for input 'I' for model 'M', got {list(shape)}"
    )


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [("FP32", (2**62, 2)), ("FP32", (2**61,)), ("BYTES", (2**61,)), ("UINT8", (2**32, 2**32, 2**32))],
)
def test_shape_beyond_all_sizes(datatype, shape):
    assert "causes total element count to exceed maximum size" in refusal(request_of(datatype, shape, b""))


@pytest.mark.parametrize("shape", [(1,) * 70, (0, 2**62, 2**62)])
def test_shape_that_numpy_cannot_hold(shape):
    assert "unusable shape" in refusal(request_of("UINT8", shape, b"\0" if 0 not in shape else b""))


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
@pytest.mark.parametrize("raw", [None, b""])
def test_empty_tensors_are_tensors(datatype, raw):
    data = decode(request_of(datatype, (0, 4), raw)).inputs["I"].data
    assert data.shape == (0, 4)


def test_any_nonzero_byte_is_true():
    data = decode(request_of("BOOL", (4,), b"\0\1\2\xff")).inputs["I"].data
    assert data.dtype == np.bool_
    assert data.view(np.uint8).tolist() == [0, 1, 1, 1]


def test_scalars():
    assert decode(request_of("FP32", (), struct.pack("<f", 2.5))).inputs["I"].data[()] == 2.5


def test_duplicate_input_and_output():
    request = request_of("FP32", (1,), bytes(4))
    request.inputs.add(name="I", datatype="FP32", shape=(1,))
    request.raw_input_contents.append(bytes(4))
    assert refusal(request) == "input 'I' already exists in request"
    request = request_of("FP32", (1,), bytes(4))
    request.outputs.add(name="O")
    request.outputs.add(name="O")
    assert refusal(request) == "output 'O' already exists in request"


# --- BYTES


def test_bytes_come_and_go_unchanged():
    strings = [b"", b"\xff\0", "größer".encode(), b"x" * 70_000]
    data = decode(request_of("BYTES", (2, 2), prefixed(*strings))).inputs["I"].data
    assert data.dtype == np.object_
    assert data.shape == (2, 2)
    assert data.reshape(-1).tolist() == strings
    assert all(type(item) is bytes for item in data.reshape(-1))
    answer = InferResponse("M", "1", "", [InferOutput("O", "BYTES", data.shape, data)])
    response = service_pb.ModelInferResponse.FromString(b"".join(encode_infer_response(answer)))
    assert list(response.raw_output_contents) == [prefixed(*strings)]


@pytest.mark.parametrize(
    ("raw", "count", "message"),
    [
        (
            prefixed(b"a", b"b") + b"\1\0\0",
            2,
            "incomplete string length indicator for inference input 'I', expecting 4 bytes but only 3 bytes available",
        ),
        (
            b"\1\0",
            1,
            "incomplete string length indicator for inference input 'I', expecting 4 bytes but only 2 bytes available",
        ),
        (prefixed(*[b"s"] * 9), 8, "unexpected number of string elements 9 for inference input 'I', expecting 8"),
        (prefixed(*[b""] * 6), 8, "expected 8 string elements for inference input 'I', got 6"),
        (prefixed(*[b"long enough"] * 6), 8, "expected 8 string elements for inference input 'I', got 6"),
        (
            prefixed(b"abc")[:-1],
            1,
            "incomplete string data for inference input 'I', expecting string of length 3 but only 2 bytes available",
        ),
        (
            b"\xff\xff\xff\xff",
            1,
            "incomplete string data for inference input 'I', expecting string of length 4294967295"
            " but only 0 bytes available",
        ),
        (b"", 1, "expected 1 string elements for inference input 'I', got 0"),
        (prefixed(b"a"), 0, "unexpected number of string elements 1 for inference input 'I', expecting 0"),
    ],
)
def test_bytes_that_do_not_fill_their_shape_exactly(raw, count, message):
    assert refusal(request_of("BYTES", (count,), raw)) == message


def test_a_shape_that_claims_more_strings_than_memory_holds():
    assert refusal(request_of("BYTES", (2**59,), prefixed(b"a"))) == (
        f"expected {2**59} string elements for inference input 'I', got 1"
    )


# --- parameters


def test_parameters_both_ways():
    request = request_of("FP32", (1,), bytes(4))
    request.parameters["b"].bool_param = True
    request.parameters["i"].int64_param = -(2**63)
    request.parameters["s"].string_param = "text"
    request.parameters["d"].double_param = 0.25
    request.parameters["u"].uint64_param = 2**64 - 1
    request.parameters["sequence_id"].string_param = "seq"
    request.parameters["sequence_start"].bool_param = True
    parameters = decode(request).parameters
    assert parameters == {
        "b": True,
        "i": -(2**63),
        "s": "text",
        "d": 0.25,
        "u": 2**64 - 1,
        "sequence_id": "seq",
        "sequence_start": True,
    }
    data = np.zeros(1, np.float32)
    answer = InferResponse("M", "1", "", [InferOutput("O", "FP32", (1,), data, parameters={"k": 1})], parameters)
    response = service_pb.ModelInferResponse.FromString(b"".join(encode_infer_response(answer)))
    for key in request.parameters:
        assert response.parameters[key] == request.parameters[key]
    assert response.outputs[0].parameters["k"].int64_param == 1


@pytest.mark.parametrize("form", ["int64_param", "uint64_param"])
def test_priority_and_timeout(form):
    request = request_of("FP32", (1,), bytes(4))
    setattr(request.parameters["priority"], form, 3)
    setattr(request.parameters["timeout"], form, 250)
    decoded = decode(request)
    assert (decoded.priority, decoded.timeout_us, decoded.parameters) == (3, 250, {})


@pytest.mark.parametrize(
    ("key", "form", "value"),
    [
        ("priority", "string_param", "1"),
        ("priority", "int64_param", -1),
        ("timeout", "bool_param", True),
        ("timeout", "int64_param", -5),
        ("sequence_id", "double_param", 1.0),
        ("sequence_start", "int64_param", 1),
        ("sequence_end", "string_param", "yes"),
    ],
)
def test_parameters_of_the_wrong_type_or_sign(key, form, value):
    request = request_of("FP32", (1,), bytes(4))
    setattr(request.parameters[key], form, value)
    assert f"'{key}' parameter" in refusal(request)


def test_a_parameter_without_a_value():
    request = request_of("FP32", (1,), bytes(4))
    request.parameters["empty"].SetInParent()
    assert "invalid value type for 'empty' parameter" in refusal(request)


def test_reserved_parameters():
    request = request_of("FP32", (1,), bytes(4))
    request.parameters["triton_anything"].bool_param = True
    assert refusal(request).startswith("parameter keys starting with 'triton_' are reserved")


def test_empty_final_responses_may_be_asked_for():
    """perf_analyzer does, with every ModelInfer; there is never one to send."""
    request = request_of("FP32", (1,), bytes(4))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert decode(request).parameters == {}
    request.parameters["triton_enable_empty_final_response"].int64_param = 1
    assert "expected bool_param" in refusal(request)


def test_forwarded_headers_win_over_parameters():
    request = request_of("FP32", (1,), bytes(4))
    request.parameters["user"].string_param = "forged"
    decoded = decode(request, forwarded={"user": "real"}, traceparent="00-1-2-01")
    assert decoded.parameters == {"user": "real"}
    assert decoded.traceparent == "00-1-2-01"


# --- outputs, classification, shared memory


def test_requested_outputs():
    request = request_of("FP32", (1,), bytes(4))
    request.outputs.add(name="A")
    request.outputs.add(name="B").parameters["classification"].int64_param = 3
    placed = request.outputs.add(name="C")
    placed.parameters["shared_memory_region"].string_param = "r"
    placed.parameters["shared_memory_byte_size"].int64_param = 64
    placed.parameters["shared_memory_offset"].int64_param = 8
    first, second, third = decode(request).outputs
    assert (first.name, first.classification, first.region) == ("A", 0, None)
    assert (second.name, second.classification, second.region) == ("B", 3, None)
    assert (third.name, third.classification, third.region) == ("C", 0, RegionSlice("r", 8, 64))


@pytest.mark.parametrize("count", [-1, 1_000_001])
def test_classification_count_out_of_range(count):
    request = request_of("FP32", (1,), bytes(4))
    request.outputs.add(name="B").parameters["classification"].int64_param = count
    assert "'classification' must be between 0 and 1000000" in refusal(request)


def test_classification_of_the_wrong_type():
    request = request_of("FP32", (1,), bytes(4))
    request.outputs.add(name="B").parameters["classification"].string_param = "3"
    assert "invalid value type for 'classification' parameter" in refusal(request)


def with_region(byte_size=8, offset=None, region="r"):
    request = request_of("FP32", (2,))
    parameters = request.inputs[0].parameters
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = byte_size
    if offset is not None:
        parameters["shared_memory_offset"].int64_param = offset
    return request


def test_inputs_in_shared_memory_take_no_raw_content():
    regions = FakeRegions()
    regions.memory["r"] = bytearray(struct.pack("<4f", 1, 2, 3, 4))
    request = with_region(offset=8)
    request.inputs.add(name="J", datatype="FP32", shape=(1,))
    request.raw_input_contents.append(struct.pack("<f", 9))
    inputs = decode(request, regions).inputs
    assert inputs["I"].data.tolist() == [3, 4]
    assert inputs["J"].data.tolist() == [9]


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_places_in_shared_memory_are_copied(offset):
    regions = FakeRegions()
    regions.memory["r"] = bytearray(bytes(offset) + struct.pack("<2f", 1, 2))
    data = decode(with_region(offset=offset), regions).inputs["I"].data
    assert data.flags.aligned
    assert data.tolist() == [1, 2]


def test_shared_memory_of_another_size_than_the_tensor():
    regions = FakeRegions()
    regions.memory["r"] = bytearray(64)
    with pytest.raises(
        InvalidRequest, match=r"input byte size mismatch for input 'I' for model 'M'\. Expected 8, got 12"
    ):
        decode(with_region(byte_size=12), regions)


def test_unknown_region_and_range():
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        decode(with_region())
    regions = FakeRegions()
    regions.memory["r"] = bytearray(8)
    with pytest.raises(InvalidRequest, match="Invalid offset"):
        decode(with_region(offset=4), regions)


@pytest.mark.parametrize("key", ["shared_memory_byte_size", "shared_memory_offset"])
def test_negative_places_in_shared_memory(key):
    request = with_region()
    request.inputs[0].parameters[key].int64_param = -1
    assert f"'{key}' must not be negative" in refusal(request)


def test_half_a_place_in_shared_memory():
    request = with_region()
    del request.inputs[0].parameters["shared_memory_byte_size"]
    assert "'shared_memory_byte_size' must be specified along with 'shared_memory_region'" in refusal(request)
    request = with_region()
    del request.inputs[0].parameters["shared_memory_region"]
    assert "without 'shared_memory_region'" in refusal(request)
    request = with_region()
    request.inputs[0].parameters["shared_memory_region"].int64_param = 3
    assert "invalid value type for 'shared_memory_region' parameter" in refusal(request)


def test_contents_beside_shared_memory():
    request = with_region()
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    assert "when using shared memory for input tensor 'I'" in refusal(request)


def test_outputs_in_shared_memory_keep_their_place_among_the_contents():
    data = np.ones(2, np.float32)
    answer = InferResponse(
        "M",
        "1",
        "",
        [
            InferOutput("A", "FP32", (2,), data, region=RegionSlice("r", 8, 8)),
            InferOutput("B", "FP32", (2,), data),
        ],
    )
    response = service_pb.ModelInferResponse.FromString(b"".join(encode_infer_response(answer)))
    assert list(response.raw_output_contents) == [b"", data.tobytes()]
    parameters = response.outputs[0].parameters
    assert parameters["shared_memory_region"].string_param == "r"
    assert parameters["shared_memory_byte_size"].int64_param == 8
    assert parameters["shared_memory_offset"].int64_param == 8


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3).reshape(()),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(60_000, dtype=np.float64).reshape(200, 300).T,
        np.arange(60_000, dtype=np.float64)[::2],
        np.arange(60_000).astype(ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float32),
    ],
    ids=["scalar", "transposed", "large-transposed", "large-strided", "large-bf16", "empty"],
)
def test_outputs_of_any_layout_are_written_row_by_row(array):
    answer = InferResponse("M", "1", "", [InferOutput("O", "FP32", array.shape, array)])
    response = service_pb.ModelInferResponse.FromString(b"".join(encode_infer_response(answer)))
    assert list(response.raw_output_contents) == [array.tobytes()]
    assert tuple(response.outputs[0].shape) == array.shape


# --- anything at all


def test_malformed_message():
    with pytest.raises(InvalidRequest, match="malformed ModelInferRequest message"):
        parse_infer_request(b"\xff\xff")
    with pytest.raises(InvalidRequest, match="malformed ModelInferRequest message"):
        parse_infer_request(b"\x0a\x01\xff" + b"\x3a\x80\x80\x08" + bytes(2**17))


shapes = st.lists(st.integers(-1, 5) | st.integers(-(2**63), 2**63 - 1), max_size=4)
anything = st.builds(
    service_pb.ModelInferRequest,
    inputs=st.lists(
        st.builds(
            service_pb.ModelInferRequest.InferInputTensor,
            name=st.sampled_from("IJ"),
            datatype=st.sampled_from([*NUMPY_DTYPES, "", "FP8"]),
            shape=shapes,
            contents=st.none()
            | st.builds(
                service_pb.InferTensorContents,
                int_contents=st.lists(st.integers(-200, 200), max_size=3),
                bytes_contents=st.lists(st.binary(max_size=3), max_size=3),
            ),
        ),
        max_size=3,
    ),
    raw_input_contents=st.lists(st.binary(max_size=40), max_size=3),
)


@given(anything)
@settings(max_examples=500)
def test_any_request_is_decoded_or_refused(request_):
    try:
        decoded = decode(request_)
    except HoneError:
        return
    for tensor in decoded.inputs.values():
        assert tensor.data.shape == tensor.shape
        assert tensor.data.dtype == NUMPY_DTYPES[tensor.datatype]


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_decoded_or_refused(message):
    try:
        proto, raw = parse_infer_request(message)
        decode_infer_request(proto, raw, FakeRegions(), received_ns=0)
    except HoneError:
        return


@given(st.lists(st.binary(max_size=20), max_size=6), st.binary(max_size=8), st.integers(0, 7))
def test_any_bytes_tensor_is_read_exactly_or_refused(strings, tail, count):
    raw = prefixed(*strings) + tail
    try:
        data = decode(request_of("BYTES", (count,), raw)).inputs["I"].data
    except InvalidRequest:
        return
    assert prefixed(*data.tolist()) == raw
