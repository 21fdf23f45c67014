"""What other modes of model control and their defaults do not allow."""

import pytest

from tests import models
from tests.protocol.grpc_client import GrpcClient
from tests.protocol.http_client import HttpClient
from tests.protocol.wire import accepted, refused
from tests.running import run_server


@pytest.fixture(scope="module", params=["none", "poll"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def server(mode, tmp_path_factory):
    root = tmp_path_factory.mktemp(mode)
    models.write_model(root, "good", models.identity())
    with run_server(root, f"--model-control-mode={mode}") as running:
        yield running


@pytest.mark.row(50)
@pytest.mark.parametrize("call", ["load", "unload"])
@pytest.mark.parametrize("name", ["good", "nothing"])
def test_no_control_by_request(client, mode, call, name):
    says = "explicit model load / unload is not allowed"
    refused(getattr(client, call)(name), 503, "UNAVAILABLE", says, "if polling is enabled" if mode == "poll" else mode)
    accepted(client.model_ready("good"))


def test_files_with_a_load_request_are_off_by_default(tmp_path):
    models.write_model(tmp_path, "good", models.identity())
    with run_server(tmp_path, "--model-control-mode=explicit") as explicit:
        for client in (HttpClient(explicit.http_port), GrpcClient(explicit.grpc_port)):
            accepted(client.ready())
            answer = client.load("good", config="{}", files={"1/model.onnx": models.scale(5.0)})
            refused(answer, 501, "UNIMPLEMENTED", "--allow-file-override")
            client.close()
