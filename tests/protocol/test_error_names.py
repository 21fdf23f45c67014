"""Models, versions and paths that are not there, or not there yet."""

import grpc as grpc_library
import numpy as np
import pytest

from tests.protocol.wire import raw_input, refused

GIVEN = [raw_input("IN", "FP32", np.zeros((1, 4)))]
QUESTIONS = ["infer", "metadata", "config", "model_ready"]


def ask(client, question, model, version=""):
    if question == "infer":
        return client.infer(model, GIVEN, version=version)
    return getattr(client, question)(model, version)


@pytest.mark.row(1)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("model", ["nothing", "ADD_SUB", "add_sub ", "Grüße", "..", "a%2Fb"])
def test_unknown_model(client, question, model):
    refused(ask(client, question, model), 404, "NOT_FOUND", f"Request for unknown model: '{model}' is not found")


@pytest.mark.row(2)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("version", ["99", "2", "0", "18446744073709551617", "9" * 100])
def test_unknown_version(client, question, version):
    answer = ask(client, question, "versions", version)
    refused(answer, 404, "NOT_FOUND", "Request for unknown model: 'versions' version", "is not found")
    if len(version) < 20:
        assert f"version {version} is" in answer.error


@pytest.mark.row(3)
@pytest.mark.parametrize("question", ["infer", "metadata", "config"])
@pytest.mark.parametrize("version", ["", "1"])
def test_nothing_ready(client, question, version):
    answer = ask(client, question, "broken", version)
    refused(answer, 404, "NOT_FOUND", "Request for unknown model: 'broken' has no available versions")


@pytest.mark.row(5)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("version", ["v1", "-1", "1.0", "+1", "%20", "0x1", "१"])
def test_version_that_is_no_number(client, question, version):
    if client.protocol == "http":
        version = version.replace("१", "%E0%A5%A7")
    answer = ask(client, question, "versions", version)
    says = "Not Found" if client.protocol == "http" else "failed to get model version from specified version string"
    refused(answer, 404, "INVALID_ARGUMENT", says)


@pytest.mark.row(7)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/dashboard/nothing", 404),
        ("GET", "/v1/models/add_sub", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/add_sub/", 404),
        ("GET", "/v2/models/add_sub/nothing", 404),
        ("GET", "/v2/models/add_sub/versions", 404),
        ("POST", "/v2/models/add_sub/versions/1/trace/setting", 404),
        ("GET", "/v2/models/a%2Fb/config", 404),
        ("GET", "/docs", 404),
        ("GET", "/v2/models/add_sub/infer", 405),
        ("PUT", "/v2/models/add_sub/infer", 405),
        ("POST", "/v2", 405),
        ("POST", "/", 405),
        ("DELETE", "/v2/models/add_sub", 405),
        ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/repository/models/add_sub/load", 405),
        ("DELETE", "/v2/logging", 405),
        ("POST", "/v2/health/live", 405),
    ],
)
def test_unknown_path_or_method_over_http(http, method, path, status):
    answer = http.call(method, path)
    assert (answer.status, answer.error) == (status, "Not Found" if status == 404 else "Method Not Allowed")
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.row(7)
@pytest.mark.parametrize(
    "path",
    ["/inference.GRPCInferenceService/NoSuchMethod", "/inference.NoSuchService/ModelInfer", "/", "/v2/health/live"],
)
def test_unknown_method_over_grpc(grpc, path):
    with pytest.raises(grpc_library.RpcError) as caught:
        grpc.channel.unary_unary(path)(b"", timeout=30)
    assert caught.value.code() is grpc_library.StatusCode.UNIMPLEMENTED
