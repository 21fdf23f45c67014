"""Any JSON as the body of an inference: an answer of 200, 400 or 404, never another, and the server lives."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.http_client import HttpClient
from tests.protocol.raw_socket import still_serves
from tests.protocol.wire import DATATYPES

EXAMPLES = settings(
    max_examples=6000,
    deadline=None,
    derandomize=False, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEYS = st.sampled_from(
    ["inputs", "outputs", "id", "parameters", "name", "datatype", "shape", "data", "binary_data_size", "classification"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["IN", "OUT", "FP32"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def or_anything(strategy):
    """Mostly right, so that what is wrong is reached in every depth of the decoder."""
    return st.one_of(strategy, strategy, strategy, ANYTHING)


DIMENSIONS = st.integers(-2, 5) | st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 0, 1])
NUMBERS = st.integers(-300, 300) | st.floats() | st.sampled_from([2**63, 2**64 - 1])
TENSOR_PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "binary_data_size",
            "shared_memory_region",
            "shared_memory_byte_size",
            "shared_memory_offset",
            "classification",
            "binary_data",
        ]
    ),
    or_anything(st.integers(0, 20)),
    max_size=2,
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": or_anything(st.sampled_from(["IN", "A"])),
        "datatype": or_anything(st.sampled_from(DATATYPES)),
        "shape": or_anything(st.lists(or_anything(DIMENSIONS), max_size=3)),
        "data": or_anything(st.lists(or_anything(NUMBERS), max_size=6)),
        "parameters": or_anything(TENSOR_PARAMETERS),
    },
)
OUTPUT = st.fixed_dictionaries(
    {}, optional={"name": or_anything(st.just("OUT")), "parameters": or_anything(TENSOR_PARAMETERS)}
)
REQUEST = st.fixed_dictionaries(
    {"inputs": or_anything(st.lists(or_anything(INPUT), max_size=3))},
    optional={
        "outputs": or_anything(st.lists(or_anything(OUTPUT), max_size=2)),
        "id": or_anything(st.text(max_size=5)),
        "parameters": or_anything(
            st.dictionaries(st.sampled_from(["priority", "timeout", "binary_data_output", "x"]), ANYTHING, max_size=2)
        ),
    },
)


@pytest.fixture(scope="module")
def port(main_server):
    yield main_server.http_port
    assert main_server.process.poll() is None
    assert "Traceback" not in main_server.log, main_server.log[-4000:]
    still_serves(main_server.http_port)


def check(port, model, body, headers=None):
    client = HttpClient(port)
    try:
        answer = client.infer_bytes(model, body, headers)
    finally:
        client.close()
    # Shared memory is off, which has a status of its own.
    off = "--allow-client-shm" in answer.error
    assert answer.status in (200, 400, 404) or (answer.status == 501 and off), answer


@EXAMPLES
@given(document=ANYTHING)
def test_any_json(port, document):
    check(port, "identity_fp32", json.dumps(document).encode())


@EXAMPLES
@given(document=REQUEST, model=st.sampled_from(DATATYPES), tail=st.binary(max_size=40))
def test_almost_a_request(port, document, model, tail):
    text = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if tail else {}
    check(port, f"identity_{model.lower()}", text + tail, headers)


@EXAMPLES
@given(document=ANYTHING, path=st.sampled_from(["repository/index", "trace/setting", "repository/models/x/load"]))
def test_any_json_for_control_calls(port, document, path):
    client = HttpClient(port)
    try:
        answer = client.call("POST", f"/v2/{path}", body=json.dumps(document).encode())
        assert answer.status in (200, 400, 404, 501, 503), answer
    finally:
        client.call("POST", "/v2/trace/setting", dict.fromkeys(("trace_level", "trace_rate", "trace_count")))
        client.close()
