"""tritonclient.grpc: blocking, asynchronous with callbacks, and streams."""

import queue
import sys
from functools import partial

import numpy as np
import tritonclient.grpc as tc

from tests.protocol.clients.steps import COMMON, ROWS, Kit, run


def connect(port, **options):
    return tc.InferenceServerClient(f"127.0.0.1:{port}", **options)


def put(answers, result, error):
    answers.put((result, error))


def async_infer(kit):
    answers = queue.Queue()
    for i in range(40):
        kit.client.async_infer("identity_fp32", [kit.input("IN", ROWS * i)], partial(put, answers), request_id=str(i))
    seen = {}
    for _ in range(40):
        result, error = answers.get(timeout=30)
        assert error is None
        seen[result.get_response().id] = result.as_numpy("OUT")
    for i in range(40):
        np.testing.assert_array_equal(seen[str(i)], ROWS * i)


def cancellation(kit):
    answers = queue.Queue()
    call = kit.client.async_infer("slow", [kit.input("IN", np.array([[1_000_000]], np.float32))], partial(put, answers))
    call.cancel()
    result, error = answers.get(timeout=30)
    assert result is None and "CANCELLED" in error.status()


def client_timeout(kit):
    problem = kit.refused(
        kit.client.infer, "slow", [kit.input("IN", np.array([[1_000_000]], np.float32))], client_timeout=0.2
    )
    assert "DEADLINE_EXCEEDED" in problem.status()


def stream(kit):
    answers = queue.Queue()
    client = kit.connect()
    client.start_stream(partial(put, answers))
    for i in range(20):
        client.async_stream_infer("identity_fp32", [kit.input("IN", ROWS * i)], request_id=str(i))
    client.async_stream_infer("nothing", [kit.input("IN", ROWS)], request_id="bad")
    client.async_stream_infer(
        "identity_fp32", [kit.input("IN", ROWS)], request_id="last", enable_empty_final_response=True
    )
    for i in range(20):
        result, error = answers.get(timeout=30)
        assert error is None and result.get_response().id == str(i)
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * i)
    result, error = answers.get(timeout=30)
    assert "unknown model: 'nothing'" in error.message()
    result, error = answers.get(timeout=30)
    assert error is None and result.get_response().id == "last"
    assert result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.close()


def stream_errors_as_status(kit):
    answers = queue.Queue()
    client = kit.connect()
    client.start_stream(partial(put, answers), headers={"triton_grpc_error": "true"})
    client.async_stream_infer("nothing", [kit.input("IN", ROWS)])
    result, error = answers.get(timeout=30)
    assert result is None and "NOT_FOUND" in error.status()
    client.stop_stream()
    client.close()


if __name__ == "__main__":
    port = int(sys.argv[1])
    with connect(port) as client:
        kit = Kit(tc, client, http=False, connect=lambda **options: connect(port, **options))
        steps = (async_infer, cancellation, client_timeout, stream, stream_errors_as_status)
        sys.exit(run(kit, (*COMMON, *steps)))
