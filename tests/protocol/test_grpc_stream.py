"""ModelStreamInfer on the real server: what unit tests hold against a fake, with queue, executor and engine behind."""

import queue
import threading

import grpc as grpc_library
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.protocol.grpc_client import infer_request
from tests.protocol.wire import Typed, raw_input
from tests.running import DEADLINE_SECONDS


def numbered(number, model="identity_fp32", size=4, **fields):
    data = np.full((1, size), number, np.float32)
    return infer_request(model, [raw_input("IN", "FP32", data)], id=str(number), **fields)


def bad(number):
    request = numbered(number)
    request.inputs[0].datatype = "INT32"
    return request


@pytest.fixture
def open_stream(grpc):
    """Opens streams to which a test sends one message at a time; ends them after."""
    streams = []

    def open_(metadata=()):
        requests = queue.SimpleQueue()
        call = grpc.stub.ModelStreamInfer(iter(requests.get, None), metadata=metadata, timeout=DEADLINE_SECONDS)
        streams.append((requests, call))
        return requests.put, call

    yield open_
    for requests, call in streams:
        call.cancel()
        requests.put(None)


def test_five_hundred_requests_in_order(grpc):
    responses = grpc.stub.ModelStreamInfer((numbered(n) for n in range(500)), timeout=DEADLINE_SECONDS)
    for number, response in enumerate(responses):
        assert not response.error_message
        assert response.infer_response.id == str(number)
        values = np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)
        assert values.tolist() == [number] * 4
        assert response.infer_response.parameters["triton_final_response"].bool_param
    assert number == 499


def test_large_tensors_pass(grpc):
    (response,) = grpc.stub.ModelStreamInfer(iter([numbered(3, size=2_000_000)]), timeout=DEADLINE_SECONDS)
    assert response.infer_response.raw_output_contents[0] == np.full(2_000_000, 3, np.float32).tobytes()


def test_errors_come_in_their_place_and_the_stream_goes_on(grpc):
    requests = [numbered(0), bad(1), numbered(2, model="no_such_model"), numbered(3)]
    responses = list(grpc.stub.ModelStreamInfer(iter(requests), timeout=DEADLINE_SECONDS))
    assert [response.infer_response.id for response in responses] == ["0", "1", "2", "3"]
    assert [bool(response.error_message) for response in responses] == [False, True, True, False]
    assert "data-type is 'INT32'" in responses[1].error_message
    assert "unknown model: 'no_such_model'" in responses[2].error_message


def test_the_first_error_is_the_status_where_the_client_asks(grpc, open_stream):
    send, call = open_stream((("triton_grpc_error", "true"),))
    send(numbered(0))
    assert next(call).infer_response.id == "0"
    send(bad(1))
    with pytest.raises(grpc_library.RpcError) as caught:
        next(call)
    assert caught.value.code() == grpc_library.StatusCode.INVALID_ARGUMENT
    assert "data-type is 'INT32'" in caught.value.details()


def test_empty_final_responses_may_be_asked_for_and_other_reserved_keys_not(grpc):
    requests = [
        numbered(0, parameters={"triton_enable_empty_final_response": True}),
        numbered(1, parameters={"triton_other": True}),
        numbered(2, parameters={"priority": Typed("string_param", "high")}),
    ]
    fine, reserved, mistyped = grpc.stub.ModelStreamInfer(iter(requests), timeout=DEADLINE_SECONDS)
    assert not fine.error_message
    assert "reserved" in reserved.error_message
    assert "'priority'" in mistyped.error_message


def test_a_stream_that_reads_nothing_keeps_no_other_waiting(grpc, open_stream):
    """Its answers are too large for the sockets' buffers; what it may have in flight is bounded."""
    send, _ = open_stream()
    for number in range(200):
        send(numbered(number, size=500_000))
    send_other, other = open_stream()
    for number in range(20):
        send_other(numbered(number))
        assert next(other).infer_response.id == str(number)


def test_many_streams_at_once(grpc):
    def run(start, failures):
        numbers = range(start, start + 50)
        responses = grpc.stub.ModelStreamInfer(map(numbered, numbers), timeout=DEADLINE_SECONDS)
        ids = [response.infer_response.id for response in responses]
        if ids != [str(number) for number in numbers]:
            failures.append(ids)

    failures: list = []
    threads = [threading.Thread(target=run, args=(index * 1000, failures)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_cancelled_stream_leaves_the_server_as_it_was(grpc, open_stream):
    for _ in range(20):
        send, call = open_stream()
        for number in range(5):
            send(numbered(number, size=50_000))
        next(call)
        call.cancel()
    assert grpc.infer_message(numbered(1)).ok
    assert grpc.stub.ServerLive(pb.ServerLiveRequest(), timeout=DEADLINE_SECONDS).live
