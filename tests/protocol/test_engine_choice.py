"""The parameter `hone_engine`: a request's own engine, told in its response, behind the key of `tuning`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests import models
from tests.running import RunningServer, run_server

KEYS = {"http": "tuner", "grpc": "triton-grpc-protocol-tuner"}
LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("choice")
    models.write_model(root, "good", models.identity())
    flags = ["--http-restricted-api=tuning:tuner=secret", "--grpc-restricted-protocol=tuning:tuner=secret"]
    with run_server(root, "--tuning=off", *flags) as running:
        yield running


def infer(server: RunningServer, protocol: str, parameters: dict[str, object], key: str | None = "secret") -> str:
    """What the response says about its engine; nothing where it says nothing."""
    library = LIBRARIES[protocol]
    client = library.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol + '_port')}")
    tensor = library.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    headers = {} if key is None else {KEYS[protocol]: key}
    response = client.infer("good", [tensor], parameters=parameters, headers=headers)
    assert (response.as_numpy("OUT") == 1).all()
    if protocol == "http":
        return str(response.get_response().get("parameters", {}).get("hone_engine", ""))
    return str(response.get_response().parameters["hone_engine"].string_param)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_gets_the_engine_it_names(server, protocol):
    assert infer(server, protocol, {"hone_engine": "baseline"}) == "onnxruntime"
    assert infer(server, protocol, {}, key=None) == ""
    with pytest.raises(InferenceServerException, match="no tuned engine runs a batch of 1"):
        infer(server, protocol, {"hone_engine": "tuned"})
    with pytest.raises(InferenceServerException, match="must be 'baseline' or 'tuned', got 'best'"):
        infer(server, protocol, {"hone_engine": "best"})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_it_is_behind_the_key_of_tuning(server, protocol, key):
    with pytest.raises(InferenceServerException, match="is restricted, expecting header"):
        infer(server, protocol, {"hone_engine": "baseline"}, key=key)
    assert infer(server, protocol, {"other": "baseline"}, key=key) == ""


@pytest.mark.parametrize("key", ["secret", "wrong"])
def test_streams_are_held_to_it_as_well(server, key):
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    answers: list[tuple[object, object]] = []
    client.start_stream(lambda result, error: answers.append((result, error)), headers={KEYS["grpc"]: key})
    tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    client.async_stream_infer("good", [tensor], parameters={"hone_engine": "baseline"})
    client.stop_stream()  # waits for the answers
    ((result, error),) = answers
    if key == "secret":
        assert error is None
        assert result.get_response().parameters["hone_engine"].string_param == "onnxruntime"
    else:
        assert "is restricted" in str(error)
