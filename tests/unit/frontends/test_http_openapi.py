"""The OpenAPI document describes every route and only those, is valid, and tells the truth."""

import re
from collections.abc import Iterator

import jsonschema_rs
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings

from hone.frontends.http_errors import STATUS_OF_KIND
from hone.frontends.http_openapi import openapi_document
from hone.frontends.http_routes import ROUTES
from tests.unit.frontends.http_serving import serving

DOCUMENT = openapi_document(ROUTES)


def operations() -> Iterator[tuple[str, str, dict]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_the_document_and_the_routers_table_are_the_same(served):
    routed = {
        (method, route.path)
        for route in served.app.fastapi.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert routed == {(method, path) for method, path, _ in operations()}
    assert served.get("/openapi.json").json() == DOCUMENT


def test_no_route_is_there_twice():
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_every_reference_resolves_and_every_schema_is_used():
    used = set(re.findall(r"#/components/schemas/(\w+)", repr(DOCUMENT)))
    assert used == set(DOCUMENT["components"]["schemas"])


def test_every_schema_is_json_schema():
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_every_error_has_the_one_form():
    for _, path, operation in operations():
        for status, response in operation["responses"].items():
            if status != "200":
                assert response["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        assert {"400", "403", "500", "503"} <= operation["responses"].keys(), path
    told = {int(status) for _, _, operation in operations() for status in operation["responses"]}
    assert set(STATUS_OF_KIND.values()) <= told


def test_every_variable_of_a_path_is_described():
    for _, path, operation in operations():
        described = {entry["name"] for entry in operation.get("parameters", []) if entry["in"] == "path"}
        assert described == set(re.findall(r"{(\w+)}", path))


def test_operations_have_names_of_their_own():
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in (
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    )
]


@pytest.fixture(scope="module")
def running():
    with serving() as served:
        yield served


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_server_answers_is_what_the_document_says(case, running):
    response = case.call(base_url=f"http://127.0.0.1:{running.port}")
    case.validate_response(response, checks=CHECKS)
    assert response.status_code != 500
    if response.status_code != 200:
        assert response.json()["error"]
