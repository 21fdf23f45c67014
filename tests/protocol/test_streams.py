"""ModelStreamInfer, and the standard health service."""

import grpc as grpc_library
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.protocol.grpc_client import infer_request
from tests.protocol.wire import Answer, raw_input


def request(number, model="identity_fp32", rows=1, **options):
    return infer_request(model, [raw_input("IN", "FP32", np.full((rows, 4), number))], id=str(number), **options)


def answers(grpc, requests, **options):
    return list(grpc.stub.ModelStreamInfer(iter(requests), **options))


def test_many_requests_in_order(grpc):
    responses = answers(grpc, [request(i) for i in range(300)])
    assert [r.infer_response.id for r in responses] == [str(i) for i in range(300)]
    for i, response in enumerate(responses):
        assert not response.error_message
        values = np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)
        assert (values == i).all() and values.size == 4
        assert response.infer_response.parameters["triton_final_response"].bool_param is True


def test_models_may_differ_on_one_stream(grpc):
    requests = [request(0), infer_request("versions", [raw_input("IN", "FP32", np.ones((1, 4)))], version="1")]
    names = [(r.infer_response.model_name, r.infer_response.model_version) for r in answers(grpc, requests)]
    assert names == [("identity_fp32", "1"), ("versions", "1")]


@pytest.mark.row(1, 17)
def test_errors_leave_the_stream_open(grpc):
    bad = infer_request("identity_fp32", [raw_input("WRONG", "FP32", np.zeros((1, 4)))], id="bad")
    responses = answers(grpc, [request(0), request(1, "nothing"), bad, request(2)])
    assert [r.infer_response.id for r in responses] == ["0", "1", "bad", "2"]
    assert "unknown model: 'nothing'" in responses[1].error_message
    assert "unexpected inference input 'WRONG'" in responses[2].error_message
    assert not responses[0].error_message and not responses[3].error_message
    assert responses[1].infer_response.parameters["triton_final_response"].bool_param is True


@pytest.mark.row(1)
def test_errors_end_the_stream_where_asked(grpc):
    stream = grpc.stub.ModelStreamInfer(
        iter([request(0), request(1, "nothing"), request(2)]), metadata=[("triton_grpc_error", "true")]
    )
    assert next(stream).infer_response.id == "0"
    with pytest.raises(grpc_library.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc_library.StatusCode.NOT_FOUND
    assert "unknown model: 'nothing'" in caught.value.details()


def test_empty_final_response_may_be_asked_for(grpc):
    wanted = request(5, parameters={"triton_enable_empty_final_response": True})
    (response,) = answers(grpc, [wanted])
    assert response.infer_response.id == "5"


def test_empty_stream(grpc):
    assert answers(grpc, []) == []


def test_large_messages_on_a_stream(grpc):
    given = np.ones((2, 1_500_000), np.float32)
    responses = answers(grpc, [infer_request("identity_fp32", [raw_input("IN", "FP32", given)])] * 3)
    assert [len(r.infer_response.raw_output_contents[0]) for r in responses] == [given.nbytes] * 3


def test_client_that_leaves_in_the_middle(grpc):
    stream = grpc.stub.ModelStreamInfer(iter([request(i) for i in range(100)]))
    next(stream)
    stream.cancel()
    assert [r.infer_response.id for r in answers(grpc, [request(7)])] == ["7"]


@pytest.mark.row(7)
def test_standard_health_service(grpc):
    stub = health_pb2_grpc.HealthStub(grpc.channel)
    for service in ("", "inference.GRPCInferenceService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc_library.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=30)
    assert caught.value.code() is grpc_library.StatusCode.NOT_FOUND


def test_status_of_answers_is_told(grpc):
    assert isinstance(grpc.infer("nothing", []), Answer)
