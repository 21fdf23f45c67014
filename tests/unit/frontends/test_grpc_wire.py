"""The hand-written scanner never disagrees with the generated parser."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.frontends.grpc_wire import append_raw_output, split_raw_inputs, stream_response
from hone.protos import service_pb

names = st.text(max_size=12)
parameters = st.dictionaries(names, st.builds(service_pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)))
inputs = st.builds(
    service_pb.ModelInferRequest.InferInputTensor,
    name=names,
    datatype=names,
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    parameters=parameters,
)
requests = st.builds(
    service_pb.ModelInferRequest,
    model_name=names,
    model_version=names,
    id=names,
    parameters=parameters,
    inputs=st.lists(inputs, max_size=3),
    outputs=st.lists(st.builds(service_pb.ModelInferRequest.InferRequestedOutputTensor, name=names), max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=4),
)


def assert_agrees(message: bytes) -> None:
    """What the scanner takes out, and what it leaves, are what the generated parser finds in the whole."""
    parts = split_raw_inputs(message)
    assert parts is not None
    rest, raw = parts
    whole = service_pb.ModelInferRequest.FromString(message)
    assert [bytes(view) for view in raw] == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert service_pb.ModelInferRequest.FromString(rest) == whole


@given(requests)
def test_scanner_agrees_with_the_generated_parser(request_):
    assert_agrees(request_.SerializeToString())


@given(requests, requests)
def test_scanner_agrees_when_fields_come_in_any_order(first, second):
    assert_agrees(first.SerializeToString() + second.SerializeToString())


@given(st.binary(max_size=60))
@settings(max_examples=500)
def test_any_bytes_are_split_as_the_parser_would_or_left_to_it(message):
    check_any(message)


@given(requests, st.data())
@settings(max_examples=300)
def test_a_damaged_message_is_split_as_the_parser_would_or_left_to_it(request_, data):
    message = bytearray(request_.SerializeToString() or b"\0")
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    check_any(bytes(message[: data.draw(st.integers(0, len(message)))]))


def check_any(message: bytes) -> None:
    parts = split_raw_inputs(message)
    if parts is None:
        return
    try:
        whole = service_pb.ModelInferRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            service_pb.ModelInferRequest.FromString(parts[0])
        return
    rest, raw = parts
    assert [bytes(view) for view in raw] == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert service_pb.ModelInferRequest.FromString(rest) == whole


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x3a", "no length"),
        (b"\x3a\x05abcd", "length beyond the end"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "length of 64 bits"),
        (b"\x38\x01", "a varint where bytes belong"),
        (b"\xba\x00\x01x", "a tag of two bytes"),
        (b"\x42\x01x", "a field of a later protocol"),
        (b"\x3b\x3c", "a group"),
    ],
)
def test_what_is_not_plain_is_left_to_the_generated_parser(message, why):
    assert split_raw_inputs(message) is None, why


def test_raw_inputs_are_views_not_copies():
    request = service_pb.ModelInferRequest(model_name="m", raw_input_contents=[b"abc", b"", b"defg"])
    message = request.SerializeToString()
    _, raw = split_raw_inputs(message)
    assert [bytes(view) for view in raw] == [b"abc", b"", b"defg"]
    assert all(isinstance(view, memoryview) and view.obj is message for view in raw)


@given(st.lists(st.integers(0, 70_000).map(bytes), max_size=3))
@settings(max_examples=50)
def test_responses_are_what_the_generated_serializer_writes(contents):
    response = service_pb.ModelInferResponse(model_name="m", id="7")
    parts = [response.SerializeToString()]
    for content in contents:
        append_raw_output(parts, content)
    response.raw_output_contents.extend(contents)
    assert b"".join(parts) == response.SerializeToString()
    stream = service_pb.ModelStreamInferResponse(infer_response=response)
    assert stream_response(parts) == stream.SerializeToString()
