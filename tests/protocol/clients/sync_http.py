"""tritonclient.http: blocking and asynchronous (gevent) requests."""

import sys

import numpy as np
import tritonclient.http as tc

from tests.protocol.clients.steps import COMMON, ROWS, Kit, run


def connect(port, **options):
    return tc.InferenceServerClient(f"127.0.0.1:{port}", concurrency=4, **options)


def async_infer(kit):
    given = [[kit.input("IN", ROWS * i)] for i in range(40)]
    pending = [kit.client.async_infer("identity_fp32", one, request_id=str(i)) for i, one in enumerate(given)]
    for i, one in enumerate(pending):
        result = one.get_result()
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * i)
        assert result.get_response()["id"] == str(i)
    failing = kit.client.async_infer("nothing", given[0])
    assert "unknown model" in str(kit.refused(failing.get_result))


def body_made_by_hand(kit):
    body, length = tc.InferenceServerClient.generate_request_body([kit.input("IN", ROWS)])
    assert length and body
    response = kit.client._post(
        "v2/models/identity_fp32/infer", body, {"Inference-Header-Content-Length": length}, None
    )
    result = tc.InferenceServerClient.parse_response_body(
        response.read(), header_length=int(response.get("Inference-Header-Content-Length"))
    )
    np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS)


def network_timeout(kit):
    client = kit.connect(network_timeout=0.2)
    try:
        client.infer("slow", [kit.input("IN", np.array([[1_000_000]], np.float32))])
    except Exception as problem:  # gevent's own
        assert "timed out" in str(problem), problem
    else:
        raise AssertionError("no timeout")
    finally:
        client.close()


if __name__ == "__main__":
    port = int(sys.argv[1])
    with connect(port) as client:
        kit = Kit(tc, client, http=True, connect=lambda **options: connect(port, **options))
        sys.exit(run(kit, (*COMMON, async_infer, body_made_by_hand, network_timeout)))
