"""Load and unload requests that must be refused, and what they leave behind: nothing.

The server is in explicit mode, has two repositories and accepts files with a load request.
"""

import json

import numpy as np
import pytest

from tests import models
from tests.protocol.http_client import HttpClient
from tests.protocol.repository import PATIENT_QUEUE, counting
from tests.protocol.slow_requests import occupy, turns
from tests.protocol.wire import Typed, accepted, invalid, raw_input, refused
from tests.running import run_server, wait_until

FOUR = [raw_input("IN", "FP32", np.ones((1, 4)))]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    models.write_model(first, "good", models.identity())
    for protocol in ("http", "grpc"):
        models.write_model(first, f"held_{protocol}", counting(), config=PATIENT_QUEUE)
        models.write_model(first, f"again_{protocol}", models.scale(2.0))
        models.write_model(first, f"files_{protocol}", models.scale(2.0))
    models.write_model(first, "never", models.identity())
    models.write_model(first, "garbage", b"this is no model")
    models.write_model(first, "unreadable", models.identity(), config="max_batch_size: many }")
    models.write_model(first, "renamed", models.identity(), config='name: "another"')
    models.write_model(
        first, "missing_version", models.identity(), config="version_policy { specific { versions: 7 } }"
    )
    (first / "no_version").mkdir()
    (first / "odd_versions" / "v1").mkdir(parents=True)
    (first / "odd_versions" / "01").mkdir()
    models.write_model(first, "twice", models.identity())
    models.write_model(second, "twice", models.identity())
    for name, text in BAD_CONFIGS.items():
        models.write_model(first, f"bad_{name}", models.identity(), config=text[0])
    return first, second


@pytest.fixture(scope="module")
def server(repositories):
    first, second = repositories
    flags = ["--model-control-mode=explicit", "--load-model=good", f"--model-repository={second}"]
    with run_server(first, *flags, "--allow-file-override=true") as running:
        yield running
        # Whatever was refused, the rest went on serving.
        assert running.infer("good", [[1, 2, 3, 4]])[0] == 200


# --- what cannot be found or read


@pytest.mark.row(51)
@pytest.mark.parametrize("name", ["nothing", ".hidden", "good ", "Good", "x" * 300])
def test_load_of_what_is_in_no_repository(client, name):
    answer = client.load(name)
    refused(answer, 500, "INTERNAL", f"failed to load '{name}', failed to poll from model repository")


@pytest.mark.row(51)
def test_load_of_an_unreadable_config(client):
    refused(client.load("unreadable"), 500, "INTERNAL", "failed to load 'unreadable', failed to poll")


@pytest.mark.row(51)
@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "1/../../outside",
        "/tmp/outside",
        "1//model.onnx",
        "1/./model.onnx",
        "..",
        "",
        "1/mod\0el.onnx",
        "1/" + "x" * 300,
        "1/.hidden",
        "config.pbtxt",
    ],
    ids=repr,
)
def test_file_that_escapes(client, path):
    """Files that come with a load request stay in a folder of their own."""
    files = {path: models.identity(), "1/model.onnx": models.identity()}
    answer = client.load("good", config="{}", files=files)
    says = "failed to load 'good', failed to poll from model repository"
    refused(answer, 500, "INTERNAL", says, "invalid file parameter")


@pytest.mark.row(62)
def test_model_in_two_repositories(server, client):
    answer = client.load("twice")
    refused(answer, 500, "INTERNAL", "failed to load 'twice'", "model appears in two or more repositories")
    assert client.infer("twice", FOUR).status in (404, "NOT_FOUND")
    lines = [line for line in accepted(client.index()) if line["name"] == "twice"]
    assert len(lines) == 1 and lines[0]["state"] == "UNAVAILABLE"
    assert "model appears in two or more repositories" in lines[0]["reason"]


@pytest.mark.row(63)
def test_config_of_another_name(client):
    says = "unexpected directory name 'renamed' for model 'another', directory name must equal model name"
    refused(client.load("renamed"), 500, "INTERNAL", says)


# --- what was found and does not come up


@pytest.mark.row(52)
def test_model_that_fails_to_initialise(client):
    message = invalid(client.load("garbage"), "load failed for model 'garbage': version 1 is at UNAVAILABLE state: ")
    assert "/" not in message.split("state: ")[1], "a path of the server is told"
    lines = {line["name"]: line for line in accepted(client.index())}
    assert lines["garbage"]["state"] == "UNAVAILABLE" and lines["garbage"]["reason"]
    refused(client.infer("garbage", FOUR), 404, "NOT_FOUND", "has no available versions")


@pytest.mark.row(53)
@pytest.mark.parametrize("name", ["missing_version", "no_version", "odd_versions"])
def test_no_version_under_the_policy(client, name):
    says = f"at least one version must be available under the version policy of model '{name}'"
    invalid(client.load(name), says)


#: What is wrong -> config and the field that the refusal must name.
BAD_CONFIGS = {
    "sequence": ("sequence_batching { max_sequence_idle_microseconds: 5 }", "sequence_batching"),
    "ensemble": ('ensemble_scheduling { step { model_name: "good" model_version: -1 } }', "ensemble_scheduling"),
    "cache": ("response_cache { enable: true }", "response_cache"),
    "decoupled": ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled"),
    "rate_limiter": (
        "instance_group { count: 1 rate_limiter { priority: 1 } }",
        "instance_group[0].rate_limiter",
    ),
    "batch_size": ("max_batch_size: -1", "max_batch_size"),
    "backend": ('backend: "tensorrt"', "backend"),
    "platform": ('platform: "tensorflow_graphdef"', "platform"),
    "gpu": ("instance_group { kind: KIND_GPU count: 1 }", "instance_group[0].kind"),
    "count": ("instance_group { count: -2 }", "instance_group[0].count"),
    "preferred": ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }", "preferred_batch_size"),
    "levels": (
        "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
        "default_priority_level",
    ),
    "default_level": ("max_batch_size: 4 dynamic_batching { priority_levels: 2 }", "default_priority_level"),
    "dims": ('max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: [ 0 ] }', "dims"),
    "input_name": (
        'max_batch_size: 4 input { name: "NO" data_type: TYPE_FP32 dims: [ 4 ] }'
        ' output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }',
        "input",
    ),
    "output_type": (
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }'
        ' output { name: "OUT" data_type: TYPE_INT8 dims: [ 4 ] }',
        "output[0].data_type",
    ),
    "label_file": (
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }'
        ' output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "../labels.txt" }',
        "label_filename",
    ),
    "accelerator": (
        "optimization { execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }",
        "execution_accelerators",
    ),
    "policy": ("version_policy { specific { } }", "version_policy"),
    "warmup": (
        'max_batch_size: 4 model_warmup { name: "w" batch_size: 1'
        ' inputs { key: "NO" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }',
        "model_warmup[0]",
    ),
}
#: Later versions will serve these; until then the refusal at load is the answer to their rows.
ROWS_OF_CONFIGS = {"sequence": 46, "decoupled": 47}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.row(ROWS_OF_CONFIGS.get(what, 64))) for what in BAD_CONFIGS]
)
def test_bad_config(client, what):
    answer = client.load(f"bad_{what}")
    invalid(answer, f"bad_{what}", BAD_CONFIGS[what][1])
    lines = {line["name"]: line for line in accepted(client.index())}
    assert lines[f"bad_{what}"]["state"] == "UNAVAILABLE"
    assert BAD_CONFIGS[what][1] in lines[f"bad_{what}"]["reason"]
    assert client.infer(f"bad_{what}", FOUR).status in (404, "NOT_FOUND")


# --- names and parameters


@pytest.mark.row(54)
@pytest.mark.parametrize("name", ["..", " .. ", ".. ", "a/b", "../good", "/etc", "good/", "a/../good"])
@pytest.mark.parametrize("call", ["load", "unload"])
def test_name_that_is_a_path(client, call, name):
    answer = getattr(client, call)(name)
    if client.protocol == "http" and "/" in name:
        assert (answer.status, answer.error) == (404, "Not Found")
    else:
        invalid(answer, f"invalid model name '{name}', model name must not contain path traversal characters")


@pytest.mark.row(55)
@pytest.mark.parametrize("name", ["", " ", "\t "])
@pytest.mark.parametrize("call", ["load", "unload"])
def test_blank_name(client, call, name):
    answer = getattr(client, call)(name)
    if client.protocol == "http" and not name:
        assert (answer.status, answer.error) == (404, "Not Found")
    else:
        invalid(answer, "Model name cannot be empty")


@pytest.mark.row(56)
def test_file_without_config(client):
    answer = client.load("good", files={"1/model.onnx": models.identity()})
    invalid(answer, "Load parameter 'config' must be specified for model file override")


@pytest.mark.row(57)
@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        "[]",
        "null",
        '{"nothing": 1}',
        '{"max_batch_size": "many"}',
        '{"input": {}}',
        '{"input": [{"data_type": "FP32"}]}',
        '{"max_batch_size": 99999999999999}',
    ],
)
def test_bad_override(client, config):
    invalid(client.load("good", config=config), "Invalid config override:")


@pytest.mark.row(57)
def test_override_with_a_bad_value(client):
    invalid(client.load("good", config='{"max_batch_size": -3}'), "max_batch_size")


@pytest.mark.row(57)
def test_override_of_another_name(client):
    answer = client.load("good", config='{"name": "another"}')
    refused(answer, 500, "INTERNAL", "unexpected directory name 'good' for model 'another'")


@pytest.mark.parametrize("parameters", [{"nothing": "x"}, {"config": 5}, {"file:1/model.onnx": 5, "config": "{}"}])
def test_load_parameters_that_do_not_exist(client, parameters):
    invalid(client.load("good", parameters=parameters), "parameter")


def test_file_that_is_no_base64(http):
    answer = http.load("good", parameters={"config": "{}", "file:1/model.onnx": "!!!"})
    invalid(answer, "base64")


@pytest.mark.parametrize("parameters", [{"nothing": True}, {"unload_dependents": "yes"}])
def test_unload_parameters_that_do_not_exist(client, parameters):
    invalid(client.unload("good", parameters=parameters), "parameter")


@pytest.mark.row(58)
@pytest.mark.parametrize("call", ["index", "load", "unload"])
def test_repository_by_name(client, call):
    given = ["good"] if call != "index" else []
    answer = getattr(client, call)(*given, repository="first")
    refused(answer, 501, "UNIMPLEMENTED", "'repository_name' specification is not supported")


@pytest.mark.row(58)
def test_repository_by_name_in_the_body(http):
    answer = http.call("POST", "/v2/repository/models/good/load", {"repository_name": "first"})
    assert answer.status == 501


@pytest.mark.row(59)
@pytest.mark.parametrize("ready", [1, "true", None, [], {}])
def test_index_ready_that_is_no_boolean(http, ready):
    answer = http.call("POST", "/v2/repository/index", {"ready": ready})
    invalid(answer, "Invalid value for 'ready': expected a boolean")


# --- unloading


@pytest.mark.row(60)
@pytest.mark.parametrize("name", ["nothing", "never", "Grüße"])
def test_unload_of_what_is_not_loaded(client, name):
    accepted(client.unload(name))
    accepted(client.unload(name, parameters={"unload_dependents": True}))


@pytest.mark.row(3, 61)
def test_unload_while_in_use(client):
    """Answered at once; what runs completes; what comes now finds no version."""
    model = f"held_{client.protocol}"
    accepted(client.load(model))
    first = occupy(client, model)
    accepted(client.unload(model))
    assert first.answer is None, "unload waited for the request"
    answer = client.infer(model, turns(0))
    assert answer.status in (404, 503, "NOT_FOUND", "UNAVAILABLE")
    accepted(first.join())

    def unavailable():
        lines = {line["name"]: line for line in accepted(client.index())}
        return (lines[model]["state"], lines[model].get("reason")) == ("UNAVAILABLE", "unloaded")

    wait_until(unavailable, "the version is unloaded")
    refused(client.infer(model, turns(0)), 404, "NOT_FOUND", f"'{model}' has no available versions")
    assert accepted(client.index(ready=True)) == [
        line for line in accepted(client.index()) if line.get("state") == "READY"
    ]


# --- loading that works


def test_reload_with_an_override(client):
    model = f"again_{client.protocol}"
    accepted(client.load(model))
    assert accepted(client.config(model))["max_batch_size"] == 4
    accepted(client.load(model, config=json.dumps({"max_batch_size": 2})))
    assert accepted(client.config(model))["max_batch_size"] == 2
    three = [raw_input("IN", "FP32", np.ones((3, 4)))]
    invalid(client.infer(model, three), "inference request batch-size must be <= 2")
    accepted(client.load(model))
    assert accepted(client.infer(model, three))


def test_a_failed_reload_keeps_what_was_serving(client):
    model = f"again_{client.protocol}"
    accepted(client.load(model))
    invalid(client.load(model, config='{"max_batch_size": -1}'))
    assert client.infer(model, FOUR)["OUT"].tolist() == [[2.0] * 4]
    lines = {line["name"]: line for line in accepted(client.index())}
    assert lines[model]["state"] == "READY" and "max_batch_size" in lines[model]["reason"]
    accepted(client.load(model))


def test_files_with_a_load_request(client):
    model = f"files_{client.protocol}"
    accepted(
        client.load(model, config="{}", files={"1/model.onnx": models.scale(5.0), "7/model.onnx": models.scale(7.0)})
    )
    assert client.infer(model, FOUR)["OUT"].tolist() == [[7.0] * 4]
    accepted(client.load(model))
    assert client.infer(model, FOUR)["OUT"].tolist() == [[2.0] * 4]


def test_bytes_parameters_are_for_grpc_files_only(grpc):
    answer = grpc.load("good", parameters={"config": Typed("bytes_param", b"{}")})
    invalid(answer, "'config' parameter")


def test_index_lists_what_was_never_loaded(client):
    line = next(line for line in accepted(client.index()) if line["name"] == "never")
    assert line == {"name": "never"}
    assert all(line["state"] == "READY" for line in accepted(client.index(ready=True)))


def test_index_without_a_body(http):
    assert isinstance(HttpClient.call(http, "POST", "/v2/repository/index").document, list)
