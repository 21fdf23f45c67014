"""The server held to its own OpenAPI document by schemathesis, and the document to the protocol.

Checks that are on: no fault of the server (`no_fault`); every status, content type and header is one that the document
tells; bodies fit their schemas; `Allow` names the right methods; methods that the document lacks are refused.

Off: not_a_server_error, which takes 501 and 503 for faults; negative_data_rejection, because a path parameter that is
wrong by its pattern is just another unknown model (404); positive_data_acceptance, because a request that fits the
document need not fit any model; use_after_free and ensure_resource_availability, because names of models are no
resources that a client creates; ignored_auth and missing_required_header, because the document has neither.
"""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from hone.frontends.http_routes import ROUTES
from tests import models
from tests.protocol.repository import write_labelled
from tests.running import run_server

load_all_checks()
ON = CHECKS.get_by_names(
    [
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "allow_header_conformance",
        "unsupported_method",
    ]
)


def no_fault(ctx, response, case):
    """Row 51 of the error table is the only answer of 500 that is not a fault."""
    told = response.json()["error"] if response.status_code == 500 else ""
    assert not told or told.startswith("failed to load "), told


ON.append(no_fault)
EXAMPLES = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("openapi")
    models.write_model(root, "digits", models.identity())
    write_labelled(root)
    # Everything switched on, so that every endpoint can succeed.
    flags = ["--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true", "--allow-file-override=true"]
    with run_server(root, *flags) as running:
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.log, running.log[-4000:]


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.http_port}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_answers_are_those_of_the_document(api, route, mode):
    operation = api[route.path][route.method]

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def check(case, known):
        if known and isinstance(case.path_parameters, dict) and not route.path.endswith("/unload"):
            # Most generated names are unknown; behind a known one there is more to find.
            names = {"model": "digits", "version": "1"}
            case.path_parameters.update({name: names[name] for name in case.path_parameters if name in names})
        response = case.call()
        # A path that is not the operation's any more (a slash, an empty part) is answered as unknown, or as another's.
        case.validate_response(response, checks=ON)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing can be generated"


def test_the_document_describes_inference(http):
    document = http.call("GET", "/openapi.json").document
    operation = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(operation["requestBody"]["content"]) == {"application/json", "application/octet-stream"}
    assert set(operation["responses"]) >= {"200", "400", "404", "500", "501", "503"}
    names = {parameter["name"] for parameter in operation["parameters"]}
    assert names == {"model", "Inference-Header-Content-Length"}
    for path, operations in document["paths"].items():
        for method, described in operations.items():
            for status, response in described["responses"].items():
                if status != "200":
                    reference = response["content"]["application/json"]["schema"]["$ref"]
                    assert reference == "#/components/schemas/Error", (method, path, status)


def test_real_answers_fit_the_document(api):
    """What the document promises of successes, checked on real ones: generated requests seldom succeed."""
    infer = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    classified = {
        "inputs": infer["inputs"],
        "id": "7",
        "outputs": [{"name": "OUT", "parameters": {"classification": 2}}],
        "parameters": {"binary_data_output": False},
    }
    good = [
        ("/v2", "GET", {}, None),
        ("/v2/health/live", "GET", {}, None),
        ("/v2/health/ready", "GET", {}, None),
        ("/v2/models/stats", "GET", {}, None),
        ("/v2/models/{model}", "GET", {"model": "digits"}, None),
        ("/v2/models/{model}/ready", "GET", {"model": "digits"}, None),
        ("/v2/models/{model}/config", "GET", {"model": "digits"}, None),
        ("/v2/models/{model}/stats", "GET", {"model": "digits"}, None),
        ("/v2/models/{model}/versions/{version}/stats", "GET", {"model": "digits", "version": "1"}, None),
        ("/v2/models/{model}/versions/{version}/ready", "GET", {"model": "digits", "version": "1"}, None),
        ("/v2/models/{model}/infer", "POST", {"model": "digits"}, infer),
        ("/v2/models/{model}/infer", "POST", {"model": "labelled"}, classified),
        ("/v2/models/{model}/versions/{version}/infer", "POST", {"model": "digits", "version": "1"}, infer),
        ("/v2/repository/index", "POST", {}, {"ready": True}),
        ("/v2/repository/models/{model}/load", "POST", {"model": "digits"}, {"parameters": {}}),
        ("/v2/trace/setting", "GET", {}, None),
        ("/v2/models/{model}/trace/setting", "POST", {"model": "digits"}, {"trace_rate": "5"}),
        ("/v2/logging", "GET", {}, None),
        ("/v2/logging", "POST", {}, {"log_verbose_level": 0}),
        ("/v2/systemsharedmemory/status", "GET", {}, None),
        ("/v2/systemsharedmemory/unregister", "POST", {}, None),
    ]
    for path, method, parameters, body in good:
        case = api[path][method].Case(path_parameters=parameters, body=body, media_type="application/json")
        response = case.call()
        assert response.status_code == 200, (path, response.text)
        case.validate_response(response, checks=[c for c in ON if c.__name__ != "unsupported_method"])
