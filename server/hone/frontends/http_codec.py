"""Inference requests and responses between their bytes over HTTP and `InferRequest` / `InferResponse`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hone.errors import InvalidRequest, Unsupported, duplicate_tensor
from hone.frontends.http_errors import JSON_HEADERS, Headers, HttpError
from hone.frontends.http_json import loads
from hone.frontends.http_parameters import (
    RequestParameters,
    decode_binary_data,
    decode_binary_size,
    decode_classification,
    decode_region,
    decode_request_parameters,
    json_type,
)
from hone.frontends.http_tensors import (
    COPIED_BYTES,
    NOT_IN_JSON,
    Buffer,
    checked_shape,
    from_binary,
    from_json,
    has_booleans,
    output_not_in_json,
    refuse_booleans,
    to_binary,
    to_json,
)
from hone.types import (
    BYTES,
    NUMPY_DTYPES,
    InferInput,
    InferOutput,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ParameterValue,
    RequestedOutput,
    SharedMemoryAccess,
    num_elements,
)

PROTOCOL = "http"

_MAX_HEADER_LENGTH = 2**31 - 1
_NOTHING: dict[str, Any] = {}
_NO_BYTES: Buffer = b""
#: Length of the JSON document before the tensors, both ways.
BINARY_HEADER = b"Inference-Header-Content-Length"
_OCTET_STREAM = (b"Content-Type", b"application/octet-stream")


def parse_header_length(value: bytes, body_length: int) -> int:
    """Inference-Header-Content-Length. Raises InvalidRequest (rows 30 and 31 of the error table)."""
    text = value.strip()
    digits = text.removeprefix(b"-").removeprefix(b"+")
    if not digits.isdigit() or len(text) - len(digits) > 1:
        raise InvalidRequest(f"Unable to parse Inference-Header-Content-Length, got: {value[:40].decode('latin-1')}")
    if len(digits) > 19 or not -_MAX_HEADER_LENGTH - 1 <= (number := int(text)) <= _MAX_HEADER_LENGTH:
        raise InvalidRequest(
            f"Unable to parse Inference-Header-Content-Length, value is out of range"
            f" [ {-_MAX_HEADER_LENGTH - 1}, {_MAX_HEADER_LENGTH} ], got: {value[:40].decode('latin-1')}"
        )
    if not 0 <= number <= body_length:
        raise InvalidRequest(f"inference header size should be in range (0, {body_length}), got: {number}")
    return number


class Decoded:
    """A request, and what its response must look like."""

    __slots__ = ("binary", "request")

    def __init__(self, request: InferRequest, binary: bool) -> None:
        self.request = request
        #: Whether outputs are sent as binary when the request names none.
        self.binary = binary


def decode_request(
    body: Buffer,
    header_length: int | None,
    *,
    metadata: ModelMetadata,
    version: str,
    batching: bool,
    regions: SharedMemoryAccess,
    limit: int,
    received_ns: int,
    forwarded: Mapping[str, str] | None = None,
    traceparent: str | None = None,
) -> Decoded:
    """Decode an infer request: `header_length` None for pure JSON, 0 for the raw binary form.

    Inputs become arrays of the shape given, as views of `body` where alignment allows. `forwarded` are headers passed
    on as parameters; they win over parameters of the same name, so that a client behind a proxy cannot forge what the
    proxy adds. Raises InvalidRequest, HttpError (a limit), and what `regions.view` raises.
    """
    model = metadata.name
    if header_length == 0:
        inputs = {metadata.inputs[0].name: _raw_input(body, metadata, batching)} if metadata.inputs else _NOTHING
        request = InferRequest(model, version, "", inputs, [], protocol=PROTOCOL, received_ns=received_ns)
        request.traceparent = traceparent
        if forwarded:
            request.parameters.update(forwarded)
        return Decoded(request, True)
    if header_length is None:
        text, raw = bytes(body), _NO_BYTES
    else:
        # Slicing a small body moves its tensors to an aligned place; a large one was received aligned.
        whole = memoryview(body) if len(body) > COPIED_BYTES else body
        text, raw = bytes(whole[:header_length]), whole[header_length:]
    if len(text) > limit:
        raise HttpError(
            400,
            f"request JSON of {len(text)} bytes exceeds the maximum allowed input size of {limit} bytes."
            " Use --http-max-input-size to increase the limit.",
        )
    parsed = loads(text)
    if parsed.__class__ is not dict:
        raise InvalidRequest(f"expected the request to be a JSON object, got {json_type(parsed)}")
    given = parsed.get("parameters")
    parameters = RequestParameters() if given is None else decode_request_parameters(_object(given, "parameters"))
    if forwarded:
        parameters.others.update(forwarded)
    request_id = parsed.get("id", "")
    if request_id.__class__ is not str:
        raise InvalidRequest(f"Unable to parse 'id': expected a string, got {json_type(request_id)}")
    return Decoded(
        InferRequest(
            model,
            version,
            request_id,
            _decode_inputs(parsed, text, raw, model, regions, limit),
            _decode_outputs(parsed.get("outputs"), parameters.binary),
            parameters.others,
            parameters.priority,
            parameters.timeout_us,
            PROTOCOL,
            received_ns,
            traceparent,
        ),
        parameters.binary,
    )


def _decode_inputs(
    parsed: dict[str, Any], text: bytes, raw: Buffer, model: str, regions: SharedMemoryAccess, limit: int
) -> dict[str, InferInput]:
    inputs: dict[str, InferInput] = {}
    offset = 0
    available = len(raw)
    for item in _array(_member(parsed, "inputs", "the request"), "inputs"):
        entry = item if item.__class__ is dict else _object(item, "inputs")
        name = _name(entry, "input")
        datatype = _member(entry, "datatype", f"input '{name}'")
        shape, count = checked_shape(model, name, datatype, _member(entry, "shape", f"input '{name}'"))
        parameters = entry.get("parameters")
        if parameters.__class__ is not dict:
            parameters = _NOTHING if parameters is None else _object(parameters, "parameters")
        size = decode_binary_size(parameters, name)
        region = decode_region(parameters, name) if parameters else None
        if ("data" in entry) + (size is not None) + (region is not None) != 1:
            raise _one_source_only(name, entry, size is not None, region is not None)
        if size is not None:
            if size > available - offset:
                raise InvalidRequest(
                    f"unexpected size for input '{name}', expecting {size - (available - offset)} additional bytes for"
                    f" model '{model}'"
                )
            part = raw if size == available else raw[offset : offset + size]
            data = from_binary(model, name, datatype, shape, count, part)
            offset += size
        elif region is not None:
            data = from_binary(model, name, datatype, shape, count, regions.view(region))
        else:
            if has_booleans(text):
                refuse_booleans(name, datatype, entry["data"])
            data = from_json(model, name, datatype, shape, count, entry["data"], limit)
        if name in inputs:
            raise duplicate_tensor("input", name)
        inputs[name] = InferInput(name, datatype, shape, data)
    if offset != available:
        raise InvalidRequest(
            f"unexpected additional input data for model '{model}': {available - offset} bytes are left over"
        )
    return inputs


def _decode_outputs(outputs: Any, binary: bool) -> list[RequestedOutput]:
    if outputs is None:
        return []
    requested: list[RequestedOutput] = []
    names: set[str] = set()
    for item in _array(outputs, "outputs"):
        entry = _object(item, "outputs")
        name = _name(entry, "output")
        if name in names:
            raise duplicate_tensor("output", name)
        names.add(name)
        given = entry.get("parameters")
        if given is None:
            requested.append(RequestedOutput(name, 0, binary))
            continue
        parameters = _object(given, "parameters")
        requested.append(
            RequestedOutput(
                name,
                decode_classification(parameters, name),
                decode_binary_data(parameters, name, binary),
                decode_region(parameters, name),
            )
        )
    return requested


def _raw_input(body: Buffer, metadata: ModelMetadata, batching: bool) -> InferInput:
    """The one input of a request without a header: its shape follows from the model and the number of bytes."""
    model = metadata.name
    if len(metadata.inputs) != 1:
        raise InvalidRequest(
            f"a raw binary request needs a model with 1 input, but model '{model}' has {len(metadata.inputs)}"
        )
    spec = metadata.inputs[0]
    shape = list(spec.shape)
    if batching:
        shape[0] = 1
    variable = [axis for axis, dim in enumerate(shape) if dim < 0]
    if spec.datatype == BYTES:
        if variable:
            shape = [1 if dim < 0 else dim for dim in shape]
        if num_elements(shape) != 1:
            raise InvalidRequest(
                f"a raw binary request for BYTES input '{spec.name}' needs shape [1], but model '{model}' has"
                f" {list(spec.shape)}"
            )
        prefixed = len(body).to_bytes(4, "little") + bytes(body)
        return InferInput(
            spec.name, BYTES, tuple(shape), from_binary(model, spec.name, BYTES, tuple(shape), 1, prefixed)
        )
    if len(variable) > 1:
        raise InvalidRequest(
            f"a raw binary request allows at most 1 variable dimension, but input '{spec.name}' of model '{model}' has"
            f" shape {list(spec.shape)}"
        )
    if variable:
        row = NUMPY_DTYPES[spec.datatype].itemsize
        for dim in shape:
            row *= dim if dim >= 0 else 1
        if row == 0 or len(body) % row:
            raise InvalidRequest(
                f"{len(body)} bytes do not fill input '{spec.name}' of model '{model}': expected a multiple of {row}"
            )
        shape[variable[0]] = len(body) // row
    fixed = tuple(shape)
    return InferInput(
        spec.name,
        spec.datatype,
        fixed,
        from_binary(model, spec.name, spec.datatype, fixed, num_elements(fixed), body),
    )


def refuse_json_outputs(metadata: ModelMetadata, decoded: Decoded) -> None:
    """Refuse, before anything runs, outputs that could not be sent as JSON (row 14). Raises InvalidRequest."""
    datatypes = {spec.name: spec.datatype for spec in metadata.outputs if spec.datatype in NOT_IN_JSON}
    if not datatypes:
        return
    outputs = decoded.request.outputs
    if not outputs and not decoded.binary:
        name, datatype = next(iter(datatypes.items()))
        raise output_not_in_json(name, datatype)
    for output in outputs:
        in_json = not output.binary and output.region is None and not output.classification
        if in_json and output.name in datatypes:
            raise output_not_in_json(output.name, datatypes[output.name])


def encode_response(response: InferResponse, *, explicit: bool, binary: bool) -> tuple[Headers, list[Buffer]]:
    """Headers but for Content-Length, and the body in parts, JSON first.

    `explicit`: the request named its outputs, which then say themselves whether they are binary; else `binary` holds.
    """
    buffers: list[Buffer] = []
    total = 0
    outputs: list[dict[str, Any]] = []
    for output in response.outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        parameters: dict[str, ParameterValue] | None = dict(output.parameters) if output.parameters else None
        if output.region is not None:
            parameters = {**(parameters or {}), **_region_parameters(output)}
        elif output.binary if explicit else binary:
            data = to_binary(output.datatype, output.data)
            size = len(data)
            total += size
            buffers.append(data)
            if parameters is None:
                parameters = {"binary_data_size": size}
            else:
                parameters["binary_data_size"] = size
        else:
            entry["data"] = orjson.Fragment(to_json(output.name, output.datatype, output.data))
        if parameters is not None:
            entry["parameters"] = parameters
        outputs.append(entry)
    document: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    header = orjson.dumps(document)
    if not total:
        return JSON_HEADERS, [header]
    return (_OCTET_STREAM, (BINARY_HEADER, b"%d" % len(header))), [header, *buffers]


def _region_parameters(output: InferOutput) -> dict[str, ParameterValue]:
    place = output.region
    if place is None:
        return {}
    parameters: dict[str, ParameterValue] = {
        "shared_memory_region": place.region,
        "shared_memory_byte_size": place.byte_size,
    }
    if place.offset:
        parameters["shared_memory_offset"] = place.offset
    return parameters


def _member(entry: Mapping[str, Any], field: str, where: str) -> Any:
    try:
        return entry[field]
    except KeyError:
        raise InvalidRequest(
            f"Unable to parse '{field}' of {where}: attempt to access non-existing object member '{field}'"
        ) from None


def _name(entry: Mapping[str, Any], what: str) -> str:
    name = _member(entry, "name", f"an {what}")
    if name.__class__ is not str:
        raise InvalidRequest(f"Unable to parse 'name' of an {what}: expected a string, got {json_type(name)}")
    return str(name)


def _array(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"Unable to parse '{field}': expected an array, got {json_type(value)}")
    return value


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"Unable to parse '{field}': expected an object, got {json_type(value)}")
    return value


def _one_source_only(name: str, entry: Mapping[str, Any], binary: bool, region: bool) -> InvalidRequest:
    given = [
        field
        for field, present in (
            ("'data'", "data" in entry),
            ("'binary_data_size' in 'parameters'", binary),
            ("'shared_memory_region' in 'parameters'", region),
        )
        if present
    ]
    return InvalidRequest(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
        f" 'shared_memory_region' in 'parameters'. Input '{name}' sets {' and '.join(given) or 'none'}"
    )


def unsupported_encoding(encoding: str) -> Unsupported:
    return Unsupported(f"Unsupported compression type: '{encoding}'")
