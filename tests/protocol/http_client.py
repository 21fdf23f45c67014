"""The protocol over HTTP by the standard library alone, so that nothing between test and server mends a request."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tests.protocol.wire import Answer, Input, Output, Tensor, from_list, from_raw
from tests.running import DEADLINE_SECONDS

HEADER_LENGTH = "inference-header-content-length"


class HttpClient:
    protocol = "http"

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        self._connection.close()

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on the kept connection (http.client opens it again where the server closed it)."""
        self._connection.request(method, path, body, dict(headers or {}))
        response = self._connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def call(
        self,
        method: str,
        path: str,
        document: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | None = None,
    ) -> Answer:
        """A JSON call; `body` sends bytes in place of a document."""
        if document is not None:
            body = json.dumps(document).encode()
        status, fields, content = self.send(method, path, body, headers)
        return answer_of(status, fields, content)

    def infer_bytes(
        self, model: str, body: bytes, headers: Mapping[str, str] | None = None, version: str = ""
    ) -> Answer:
        status, fields, content = self.send("POST", f"{_model(model, version)}/infer", body, headers)
        return answer_of(status, fields, content)

    def infer_document(self, model: str, document: Any, tail: bytes = b"", **headers: str) -> Answer:
        """Send a document as it is, with `tail` behind it as binary data if there is any."""
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if tail:
            fields.setdefault(HEADER_LENGTH, str(len(text)))
        return self.infer_bytes(model, text + tail, fields)

    def infer(
        self,
        model: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output] | None = None,
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
        binary: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        body, fields = encode_infer(inputs, outputs, id=id, parameters=parameters, binary=binary)
        return self.infer_bytes(model, body, {**fields, **(headers or {})}, version)

    def live(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", "/v2/health/live", None, headers)

    def ready(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", "/v2/health/ready", None, headers)

    def model_ready(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", f"{_model(model, version)}/ready", None, headers)

    def server_metadata(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", "/v2", None, headers)

    def metadata(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", _model(model, version), None, headers)

    def config(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET", f"{_model(model, version)}/config", None, headers)

    def statistics(self, model: str = "", version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        path = f"{_model(model, version)}/stats" if model else "/v2/models/stats"
        return self.call("GET", path, None, headers)

    def index(self, ready: Any = None, repository: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        path = f"/v2/repository/{repository}/index" if repository else "/v2/repository/index"
        return self.call("POST", path, {} if ready is None else {"ready": ready}, headers)

    def load(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        parameters: Mapping[str, Any] | None = None,
        repository: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        given = dict(parameters or {})
        if config is not None:
            given["config"] = config
        for name, content in (files or {}).items():
            given[f"file:{name}"] = base64.b64encode(content).decode()
        return self._control(model, "load", given, repository, headers)

    def unload(
        self,
        model: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        repository: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return self._control(model, "unload", parameters, repository, headers)

    def _control(
        self,
        model: str,
        what: str,
        parameters: Mapping[str, Any] | None,
        repository: str,
        headers: Mapping[str, str] | None,
    ) -> Answer:
        where = f"/v2/repository/{repository}/models" if repository else "/v2/repository/models"
        document = {"parameters": dict(parameters)} if parameters else None
        return self.call("POST", f"{where}/{_name(model)}/{what}", document, headers)

    def trace(
        self, model: str = "", settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        path = f"{_model(model)}/trace/setting" if model else "/v2/trace/setting"
        return self.call("GET" if settings is None else "POST", path, settings, headers)

    def log(self, settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("GET" if settings is None else "POST", "/v2/logging", settings, headers)

    def register(
        self, region: str, key: str, byte_size: int, offset: int = 0, headers: Mapping[str, str] | None = None
    ) -> Answer:
        document = {"key": key, "offset": offset, "byte_size": byte_size}
        return self.call("POST", f"{_region('system', region)}/register", document, headers)

    def unregister(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("POST", f"{_region('system', region)}/unregister", None, headers)

    def regions(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        answer = self.call("GET", f"{_region('system', region)}/status", None, headers)
        if answer.ok:
            answer.document = {item.pop("name"): item for item in answer.document}
        return answer

    def cuda(self, call: str, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        method = "GET" if call == "status" else "POST"
        document = {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 64} if call == "register" else None
        return self.call(method, f"{_region('cuda', region)}/{call}", document, headers)


def encode_infer(
    inputs: Sequence[Input],
    outputs: Sequence[Output] | None = None,
    *,
    id: str = "",
    parameters: Mapping[str, Any] | None = None,
    binary: bool = True,
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an inference request."""
    document: dict[str, Any] = {"inputs": []}
    tail = []
    for tensor in inputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        given = dict(tensor.parameters)
        if tensor.data is not None:
            entry["data"] = [item.decode() if isinstance(item, bytes) else item for item in tensor.data]
        if tensor.raw is not None:
            given.setdefault("binary_data_size", len(tensor.raw))
            tail.append(tensor.raw)
        if given:
            entry["parameters"] = given
        document["inputs"].append(entry)
    if id:
        document["id"] = id
    given = dict(parameters or {})
    if outputs is None:
        if binary:
            given["binary_data_output"] = True
    else:
        document["outputs"] = [_output(output, binary) for output in outputs]
    if given:
        document["parameters"] = given
    text = json.dumps(document).encode()
    headers = {HEADER_LENGTH: str(len(text))} if any(tensor.raw is not None for tensor in inputs) else {}
    return text + b"".join(tail), headers


def _output(output: Output, binary: bool) -> dict[str, Any]:
    parameters = dict(output.parameters)
    if "shared_memory_region" not in parameters:
        parameters["binary_data"] = binary if output.binary is None else output.binary
    return {"name": output.name, "parameters": parameters}


def answer_of(status: int, headers: dict[str, str], body: bytes) -> Answer:
    """Read a response, and hold it to what every response must be."""
    kind = headers.get("content-type", "")
    if status != 200:
        assert kind == "application/json", f"{status} with {kind}: {body!r}"
        document = json.loads(body)
        assert isinstance(document, dict) and isinstance(document.get("error"), str) and document["error"], document
        assert "detail" not in document, document
        return Answer("http", status, document["error"], document, headers)
    if HEADER_LENGTH in headers:
        assert kind == "application/octet-stream"
        length = int(headers[HEADER_LENGTH])
        document, tail = json.loads(body[:length]), body[length:]
    else:
        assert kind == "application/json", kind
        document, tail = json.loads(body), b""
    answer = Answer("http", status, "", document, headers)
    if isinstance(document, dict) and "model_name" in document:
        answer.outputs = _tensors(document, tail)
    return answer


def _tensors(document: Any, tail: bytes) -> dict[str, Tensor]:
    tensors = {}
    position = 0
    for entry in document["outputs"]:
        datatype, shape = entry["datatype"], tuple(entry["shape"])
        parameters = entry.get("parameters", {})
        array = None
        if "binary_data_size" in parameters:
            assert "data" not in entry
            size = parameters["binary_data_size"]
            array = from_raw(datatype, shape, tail[position : position + size])
            position += size
        elif "data" in entry:
            array = from_list(datatype, shape, entry["data"])
        else:
            assert "shared_memory_region" in parameters, entry
        tensors[entry["name"]] = Tensor(datatype, shape, array, parameters)
    assert position == len(tail), "bytes are left over behind the outputs"
    return tensors


def _name(model: str) -> str:
    return quote(model, safe="")


def _model(model: str, version: str = "") -> str:
    return f"/v2/models/{_name(model)}{f'/versions/{version}' if version else ''}"


def _region(kind: str, region: str) -> str:
    return f"/v2/{kind}sharedmemory{f'/region/{_name(region)}' if region else ''}"
