"""The OpenAPI document, built from the route table: every endpoint with its bodies and its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone import __version__
from hone.frontends.http_codec import BINARY_HEADER
from hone.frontends.http_json import MAX_DEPTH
from hone.frontends.http_parameters import MAX_CLASSES
from hone.frontends.http_routes import Route
from hone.types import NUMPY_DTYPES

Schema = dict[str, Any]

_ERRORS = {
    400: "The request cannot be understood, does not fit the model, or exceeds a limit",
    403: "The endpoint is behind a key that the request does not carry",
    404: "Unknown path, model, version or region",
    408: "The request did not arrive in time",
    431: "Too many or too large request headers",
    500: "A fault of the server or of an engine",
    501: "A feature that this server does not offer",
    503: "Not now: stopping, loading, queue full, or not allowed in this mode",
}
#: Statuses that any endpoint may answer with.
_ALWAYS = (400, 403, 408, 431, 500, 503)

_UINT64: Schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
_STRING: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_INTEGER: Schema = {"type": "integer"}


def _object(properties: Mapping[str, Schema], required: Iterable[str] = (), **more: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return {**schema, **more}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _everything(properties: Mapping[str, Schema], **more: Any) -> Schema:
    """An object that always has all of its properties."""
    return _object(properties, properties, **more)


_DATATYPE: Schema = {"type": "string", "enum": list(NUMPY_DTYPES)}
_SHAPE = _array({"type": "integer", "minimum": 0, "maximum": 2**63 - 1})
_PARAMETER: Schema = {"type": ["boolean", "number", "string"]}
_REGION: dict[str, Schema] = {
    "shared_memory_region": _STRING,
    "shared_memory_byte_size": _UINT64,
    "shared_memory_offset": _UINT64,
}
_TENSOR_METADATA = _everything({"name": _STRING, "datatype": _DATATYPE, "shape": _array(_INTEGER)})
_DATA: Schema = {
    "type": "array",
    "description": "The items in row-major order, flat or nested. NaN, Infinity and -Infinity are accepted and sent as"
    f" such. Nesting of the whole document is limited to {MAX_DEPTH}.",
    "items": {},
}

_SCHEMAS: dict[str, Schema] = {
    "Error": _object({"error": _STRING}, ["error"]),
    "Empty": {"type": "object", "maxProperties": 0},
    "AnyObject": {"type": "object"},
    "Live": _everything({"live": {"const": True}}),
    "Ready": _everything({"ready": {"const": True}}),
    "ModelReady": _everything({"name": _STRING, "ready": {"const": True}}),
    "ServerMetadata": _everything({"name": _STRING, "version": _STRING, "extensions": _array(_STRING)}),
    "ModelMetadata": _everything(
        {
            "name": _STRING,
            "versions": _array(_STRING),
            "platform": _STRING,
            "inputs": _array(_TENSOR_METADATA),
            "outputs": _array(_TENSOR_METADATA),
        }
    ),
    "ModelConfig": _object({"name": _STRING, "max_batch_size": _INTEGER}, ["name"]),
    "Statistics": _everything({"model_stats": _array(_object({"name": _STRING, "version": _STRING}, ["name"]))}),
    "RequestInput": _object(
        {
            "name": _STRING,
            "datatype": _DATATYPE,
            "shape": _SHAPE,
            "parameters": _object({"binary_data_size": _UINT64, **_REGION}),
            "data": _DATA,
        },
        ["name", "datatype", "shape"],
        description="Exactly one of `data`, `binary_data_size` and `shared_memory_region` gives the tensor.",
    ),
    "RequestOutput": _object(
        {
            "name": _STRING,
            "parameters": _object(
                {
                    "binary_data": _BOOLEAN,
                    "classification": {"type": "integer", "minimum": 0, "maximum": MAX_CLASSES},
                    **_REGION,
                }
            ),
        },
        ["name"],
    ),
    "InferRequest": _object(
        {
            "id": _STRING,
            "parameters": _object(
                {
                    "binary_data_output": _BOOLEAN,
                    "priority": _UINT64,
                    "timeout": {**_UINT64, "description": "Microseconds."},
                    "sequence_id": {"anyOf": [_UINT64, _STRING]},
                    "sequence_start": _BOOLEAN,
                    "sequence_end": _BOOLEAN,
                },
                additionalProperties=_PARAMETER,
            ),
            "inputs": _array(_ref("RequestInput")),
            "outputs": _array(_ref("RequestOutput")),
        },
        ["inputs"],
    ),
    "ResponseOutput": _object(
        {
            "name": _STRING,
            "datatype": _DATATYPE,
            "shape": _SHAPE,
            "parameters": {"type": "object", "additionalProperties": _PARAMETER},
            "data": _DATA,
        },
        ["name", "datatype", "shape"],
    ),
    "InferResponse": _object(
        {
            "model_name": _STRING,
            "model_version": _STRING,
            "id": _STRING,
            "parameters": {"type": "object", "additionalProperties": _PARAMETER},
            "outputs": _array(_ref("ResponseOutput")),
        },
        ["model_name", "model_version", "outputs"],
    ),
    "IndexRequest": _object({"ready": _BOOLEAN}),
    "Index": _array(
        _object(
            {
                "name": _STRING,
                "version": _STRING,
                "state": {"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
                "reason": _STRING,
            },
            ["name"],
        )
    ),
    "LoadRequest": _object(
        {
            "parameters": _object(
                {"config": {**_STRING, "description": "A model configuration in JSON form."}},
                patternProperties={"^file:": {**_STRING, "contentEncoding": "base64"}},
                additionalProperties=False,
            )
        }
    ),
    "UnloadRequest": _object(
        {"parameters": _object({"unload_dependents": _BOOLEAN}, additionalProperties=False)},
    ),
    "TraceSettings": {"type": "object", "additionalProperties": {"anyOf": [_STRING, _array(_STRING)]}},
    "TraceUpdate": {
        "type": "object",
        "additionalProperties": {"anyOf": [_STRING, _INTEGER, _array(_STRING), {"type": "null"}]},
    },
    "LogSettings": {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "string"]}},
    "LogUpdate": {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "string"]}},
    "TuningAction": _object(
        {"action": {"enum": ["start", "retune", "pause", "cancel", "roll_back", "pin_baseline"]}}, ["action"]
    ),
    "TuningStatus": _object(
        {
            "model": _STRING,
            "version": _STRING,
            "state": {
                "enum": ["off", "queued", "tuning", "paused", "tuned", "baseline", "unsupported", "failed"],
            },
            "progress": {"type": "number", "minimum": 0, "maximum": 1},
            "reason": _STRING,
            "job": {"type": "object"},
            "buckets": _array({"type": "object"}),
            "history": _array({"type": "object"}),
        },
        ["model", "version", "state", "progress", "reason", "buckets", "history"],
    ),
    "RegionRequest": _object(
        {
            "key": _STRING,
            "offset": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
            "byte_size": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        },
        ["key", "byte_size"],
    ),
    "RegionStatuses": _array(_everything({"name": _STRING, "key": _STRING, "offset": _INTEGER, "byte_size": _INTEGER})),
}

_PARAMETERS: dict[str, Schema] = {
    "model": {"description": "Name of a model", "schema": {"type": "string", "pattern": "^[^/]+$"}},
    "version": {"description": "Number of a version", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
    "region": {"description": "Name of a shared-memory region", "schema": {"type": "string", "pattern": "^[^/]+$"}},
    "repository": {"description": "Name of a repository", "schema": {"type": "string", "pattern": "^[^/]+$"}},
}

_HEADER_NAME = BINARY_HEADER.decode("ascii")
_BINARY_NOTE = (
    f"With `{_HEADER_NAME}: N`, the first N bytes (after any Content-Encoding is undone) are the JSON document and the"
    " rest holds the tensors that have `binary_data_size`, in the order of the inputs. With N = 0 the whole body is the"
    " one input of the model."
)


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hone",
            "version": __version__,
            "description": "KServe v2 inference protocol with Triton's extensions. Every answer that is not 200 has a"
            " JSON body with the key `error`.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }


def _operation(route: Route) -> dict[str, Any]:
    infer = route.handler is None
    responses: dict[str, Any] = {}
    if route.response:
        content: dict[str, Any] = {"application/json": {"schema": _ref(route.response)}}
        success: dict[str, Any] = {"description": "Success", "content": content}
        if infer:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
            success["headers"] = {
                _HEADER_NAME: {
                    "description": "Length of the JSON document before the tensors; only with binary outputs.",
                    "schema": _INTEGER,
                }
            }
        responses["200"] = success
    for status in sorted({*_ALWAYS, *route.errors}):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
        }
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": route.summary,
        "tags": [route.group],
        "responses": responses,
    }
    parameters = [{"name": name, "in": "path", "required": True, **_PARAMETERS[name]} for name in route.parameters]
    if infer:
        parameters.append(
            {"name": _HEADER_NAME, "in": "header", "required": False, "description": _BINARY_NOTE, "schema": _INTEGER}
        )
    if parameters:
        operation["parameters"] = parameters
    if route.request:
        content = {"application/json": {"schema": _ref(route.request)}}
        if infer:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": infer, "content": content}
    return operation
