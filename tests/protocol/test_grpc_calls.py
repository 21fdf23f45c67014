"""What only gRPC has: the list of its methods, the standard health service, malformed messages, details' length."""

import grpc as grpc_library
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from tests.protocol.grpc_client import error_answer, infer_request
from tests.protocol.wire import raw_input, refused
from tests.running import DEADLINE_SECONDS

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
UNARY = [method.name for method in SERVICE.methods if not method.client_streaming]


def raw_call(grpc, method, message):
    """The bytes of the response, or the answer that tells the error."""
    try:
        return grpc.channel.unary_unary(f"/{SERVICE.full_name}/{method}")(message, timeout=DEADLINE_SECONDS)
    except grpc_library.RpcError as problem:
        return error_answer(problem)


def test_a_method_that_is_not_in_the_protocol(grpc):
    refused(raw_call(grpc, "ModelTrain", b""), 404, "UNIMPLEMENTED")


@pytest.mark.parametrize("method", UNARY)
def test_every_method_knows_a_malformed_message(grpc, method):
    refused(raw_call(grpc, method, b"\xff"), 400, "INVALID_ARGUMENT", f"malformed {method}Request message")


@pytest.mark.parametrize("method", ["", SERVICE.full_name])
def test_standard_health_check(grpc, method):
    health = health_pb2_grpc.HealthStub(grpc.channel)
    request = health_pb2.HealthCheckRequest(service=method)
    assert health.Check(request, timeout=DEADLINE_SECONDS).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(request, timeout=DEADLINE_SECONDS)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_never_a_fault(grpc, message):
    answer = raw_call(grpc, "ModelInfer", message)
    assert answer.status in ("INVALID_ARGUMENT", "NOT_FOUND")


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_request_is_answered_or_refused_never_a_fault(grpc, data):
    request = infer_request("identity_fp32", [raw_input("IN", "FP32", np.ones((2, 4)))], id="7")
    message = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    answer = raw_call(grpc, "ModelInfer", bytes(message))
    assert isinstance(answer, bytes) or answer.status in ("INVALID_ARGUMENT", "NOT_FOUND")


def test_a_name_too_long_for_the_trailers_does_not_hide_the_status(grpc):
    answer = grpc.infer_message(infer_request("x" * 1_000_000, []))
    refused(answer, 404, "NOT_FOUND", "Request for unknown model: 'xxx")
    assert len(answer.error) < 8192
