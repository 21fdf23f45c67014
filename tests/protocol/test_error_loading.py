"""A server whose only model takes long to come up: its warm-up runs a slow loop."""

import threading

import numpy as np
import pytest

from tests import models
from tests.protocol.wire import accepted, raw_input, refused
from tests.running import run_server, wait_until

GIVEN = [raw_input("IN", "FP32", np.zeros((1, 4)))]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    warmup = """
    max_batch_size: 1
    model_warmup {
      name: "long" batch_size: 1 count: 2
      inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
    }
    """
    models.write_model(root, "loading", models.slow(1_000_000), config=warmup)
    with run_server(root, "--model-control-mode=explicit") as running:
        load = threading.Thread(target=running.post, args=("/v2/repository/models/loading/load",))
        load.start()
        wait_until(lambda: running.index().get(("loading", "1"), ("",))[0] == "LOADING", "loading begins")
        yield running
        load.join()
        assert running.index()["loading", "1"][0] == "READY"


@pytest.mark.row(4)
@pytest.mark.parametrize("version", ["", "1"])
def test_inference(client, version):
    answer = client.infer("loading", GIVEN, version=version)
    refused(answer, 503, "UNAVAILABLE", "Request for unknown model: 'loading' version 1 is not at ready state")


@pytest.mark.row(6)
def test_readiness(client):
    answer = client.model_ready("loading")
    if client.protocol == "http":
        assert (answer.status, answer.error) == (400, "Model version not ready")
        assert answer.document["ready"] is False and answer.document["name"] == "loading"
    else:
        assert accepted(answer) == {"ready": False}


def test_the_server_is_live_and_ready_all_the_while(client):
    accepted(client.live())
    accepted(client.ready())
