"""Endpoints behind a key."""

import grpc as grpc_library
import numpy as np
import pytest

from tests import models
from tests.protocol.grpc_client import infer_request
from tests.protocol.wire import accepted, raw_input, refused
from tests.running import run_server

SECRET = "s3cret-Key=with:signs"
KEYS = {"http": "admin-key", "grpc": "triton-grpc-protocol-admin-key"}
FOUR = [raw_input("IN", "FP32", np.ones((1, 4)))]
CALLS = {
    "model-repository": [
        lambda client, headers: client.index(headers=headers),
        lambda client, headers: client.load("good", headers=headers),
        lambda client, headers: client.unload("nothing", headers=headers),
    ],
    "inference": [lambda client, headers: client.infer("good", FOUR, headers=headers)],
    "shared-memory": [
        lambda client, headers: client.regions(headers=headers),
        lambda client, headers: client.register("r", "k", 1, headers=headers),
        lambda client, headers: client.unregister("r", headers=headers),
        lambda client, headers: client.cuda("status", headers=headers),
    ],
    "statistics": [
        lambda client, headers: client.statistics(headers=headers),
        lambda client, headers: client.statistics("good", headers=headers),
    ],
    "trace": [
        lambda client, headers: client.trace(headers=headers),
        lambda client, headers: client.trace("good", {"trace_rate": "5"}, headers=headers),
    ],
    "logging": [lambda client, headers: client.log(headers=headers)],
    "model-config": [lambda client, headers: client.config("good", headers=headers)],
}
OPEN = {
    "health": [
        lambda client, headers: client.live(headers=headers),
        lambda client, headers: client.ready(headers=headers),
        lambda client, headers: client.model_ready("good", headers=headers),
    ],
    "metadata": [
        lambda client, headers: client.server_metadata(headers=headers),
        lambda client, headers: client.metadata("good", headers=headers),
    ],
}
RESTRICTED = [(group, i) for group, calls in CALLS.items() for i in range(len(calls))]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("restricted")
    models.write_model(root, "good", models.identity())
    key = f"{','.join(CALLS)}:admin-key={SECRET}"
    flags = [f"--http-restricted-api={key}", f"--grpc-restricted-protocol={key}", "--allow-client-shm=true"]
    with run_server(root, "--model-control-mode=explicit", "--load-model=*", *flags) as running:
        yield running
        assert SECRET not in running.log


@pytest.mark.row(70)
@pytest.mark.parametrize(("group", "i"), RESTRICTED)
@pytest.mark.parametrize("headers", ["none", "wrong", "empty", "longer", "shorter", "other", "case"])
def test_without_the_key(client, group, i, headers):
    name = KEYS[client.protocol]
    given = {
        "none": None,
        "wrong": {name: "x" * len(SECRET)},
        "empty": {name: ""},
        "longer": {name: SECRET + "x"},
        "shorter": {name: SECRET[:-1]},
        "other": {"admin-key" if client.protocol == "grpc" else "key": SECRET},
        "case": {name: SECRET.upper()},
    }[headers]
    answer = CALLS[group][i](client, given)
    what = "API" if client.protocol == "http" else "protocol"
    message = refused(answer, 403, "UNAVAILABLE", f"This {what} is restricted, expecting header '{name}'")
    assert SECRET not in message


@pytest.mark.parametrize(("group", "i"), RESTRICTED)
def test_with_the_key(client, group, i):
    answer = CALLS[group][i](client, {KEYS[client.protocol]: SECRET})
    assert "restricted" not in answer.error, answer


@pytest.mark.parametrize(("group", "i"), [(group, i) for group, calls in OPEN.items() for i in range(len(calls))])
def test_what_is_not_restricted(client, group, i):
    accepted(OPEN[group][i](client, None))


def test_streams_need_the_key_too(grpc):
    with pytest.raises(grpc_library.RpcError) as caught:
        next(grpc.stub.ModelStreamInfer(iter([infer_request("good", FOUR)])))
    assert caught.value.code() is grpc_library.StatusCode.UNAVAILABLE
    metadata = [(KEYS["grpc"], SECRET)]
    answer = next(grpc.stub.ModelStreamInfer(iter([infer_request("good", FOUR)]), metadata=metadata))
    assert not answer.error_message


@pytest.mark.row(70)
@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2//repository/index", "/v2/models/good/versions/1/infer"])
def test_other_ways_to_the_same_place(http, path):
    answer = http.call("POST", path, {})
    assert answer.status in (403, 404), answer
