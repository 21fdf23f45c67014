"""Everything over HTTP but inference: each method decodes a request, makes one call, returns what becomes JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.errors import InvalidRequest, Unsupported
from hone.frontends.http_errors import HttpError
from hone.frontends.http_json import loads
from hone.frontends.http_parameters import json_type
from hone.frontends.http_tensors import Buffer
from hone.repository.config_json import config_to_json
from hone.types import LoadParameters, TensorMetadata

if TYPE_CHECKING:
    from hone.serving.service import InferenceService

_FILE_PREFIX = "file:"
#: The only trace setting that is a list in Triton's JSON; the others are single strings.
_TRACE_LISTS = frozenset({"trace_level"})


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a control endpoint: the variable parts of its path, and its body."""

    params: Mapping[str, str]
    body: Buffer

    @property
    def model(self) -> str:
        return self.params.get("model", "")

    @property
    def version(self) -> str:
        return self.params.get("version", "")

    def document(self) -> dict[str, Any]:
        """The body as a JSON object, empty where there is no body. Raises InvalidRequest."""
        if not bytes(self.body).strip():
            return {}
        parsed = loads(self.body)
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"expected the request to be a JSON object, got {json_type(parsed)}")
        return parsed


class ControlHandlers:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    # --- health and metadata

    async def live(self, call: Call) -> Any:
        if not self._service.live():
            raise NotReady(self._because("Server not live"), {"live": False})
        return {"live": True}

    async def ready(self, call: Call) -> Any:
        if not self._service.ready():
            raise NotReady(self._because("Server not ready"), {"ready": False})
        return {"ready": True}

    def _because(self, what: str) -> str:
        return f"{what}: {self._service.broken}" if self._service.broken else what

    async def model_ready(self, call: Call) -> Any:
        if not self._service.model_ready(call.model, call.version):
            raise NotReady("Model version not ready", {"name": call.model, "ready": False}, status=400)
        return {"name": call.model, "ready": True}

    async def server_metadata(self, call: Call) -> Any:
        metadata = self._service.server_metadata()
        return {"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions}

    async def model_metadata(self, call: Call) -> Any:
        metadata = self._service.model_metadata(call.model, call.version)
        return {
            "name": metadata.name,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "inputs": [_tensor(spec) for spec in metadata.inputs],
            "outputs": [_tensor(spec) for spec in metadata.outputs],
        }

    async def model_config(self, call: Call) -> Any:
        return config_to_json(self._service.model_config(call.model, call.version))

    async def statistics(self, call: Call) -> Any:
        return {"model_stats": self._service.statistics(call.model, call.version)}

    # --- tuning

    async def tuning_status(self, call: Call) -> Any:
        return self._service.tuning_status(call.model, call.version)

    async def tuning_action(self, call: Call) -> Any:
        action = call.document().get("action")
        if not isinstance(action, str):
            raise InvalidRequest(f"Unable to parse 'action': expected a string, got {json_type(action)}")
        return await self._service.tuning_action(call.model, call.version, action)

    # --- repository

    async def index(self, call: Call) -> Any:
        ready = call.document().get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest(f"Invalid value for 'ready': expected a boolean, got {json_type(ready)}")
        entries = []
        for entry in self._service.index(ready):
            line = {"name": entry.name}
            line |= {"version": entry.version} if entry.version else {}
            line |= {"state": entry.state} if entry.state else {}
            line |= {"reason": entry.reason} if entry.reason else {}
            entries.append(line)
        return entries

    async def load(self, call: Call) -> Any:
        await self._service.load(call.model, decode_load_parameters(_parameters(call.document())))
        return {}

    async def unload(self, call: Call) -> Any:
        parameters = _parameters(call.document())
        dependents = parameters.pop("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(
                f"invalid value type for 'unload_dependents' parameter, expected a boolean, got {json_type(dependents)}"
            )
        if parameters:
            raise InvalidRequest(f"unrecognized unload parameter '{next(iter(parameters))}', known: unload_dependents")
        await self._service.unload(call.model, dependents)
        return {}

    async def named_repository(self, call: Call) -> Any:
        raise Unsupported("'repository_name' specification is not supported")

    # --- settings

    async def trace_settings(self, call: Call) -> Any:
        return _trace_document(self._service.trace_settings(call.model))

    async def update_trace_settings(self, call: Call) -> Any:
        settings = {key: _trace_value(key, value) for key, value in call.document().items()}
        return _trace_document(self._service.update_trace_settings(call.model, settings))

    async def log_settings(self, call: Call) -> Any:
        return self._service.log_settings()

    async def update_log_settings(self, call: Call) -> Any:
        settings = call.document()
        for key, value in settings.items():
            if not isinstance(value, (bool, int, str)):
                raise InvalidRequest(
                    f"invalid value type for log setting '{key}', expected a boolean, an integer or a string,"
                    f" got {json_type(value)}"
                )
        return self._service.update_log_settings(settings)

    # --- shared memory

    async def region_status(self, call: Call) -> Any:
        return [
            {"name": status.name, "key": status.key, "offset": status.offset, "byte_size": status.byte_size}
            for status in self._service.region_statuses(call.params.get("region", ""))
        ]

    async def register_region(self, call: Call) -> Any:
        document = call.document()
        key = document.get("key")
        if not isinstance(key, str):
            raise InvalidRequest(f"Unable to parse 'key': expected a string, got {json_type(key)}")
        offset = _size(document, "offset", 0)
        self._service.register_region(call.params["region"], key, offset, _size(document, "byte_size", None))
        return {}

    async def register_unnamed_region(self, call: Call) -> Any:
        raise InvalidRequest("'region name' is necessary to register system shared memory region")

    async def unregister_region(self, call: Call) -> Any:
        self._service.unregister_region(call.params.get("region", ""))
        return {}

    async def cuda_region(self, call: Call) -> Any:
        raise Unsupported("CUDA shared memory is not supported by this server")

    async def generate(self, call: Call) -> Any:
        raise Unsupported("the generate extension is not supported by this server, use infer")


class NotReady(HttpError):
    """A health answer that is not 200: the body carries the Open Inference Protocol's field beside `error`."""

    def __init__(self, message: str, document: Mapping[str, Any], *, status: int = 503) -> None:
        super().__init__(status, message)
        self.document = {**document, "error": message}


def decode_load_parameters(parameters: Mapping[str, Any]) -> LoadParameters:
    """`config` (JSON text) and `file:<path>` (base64) of a load request. Raises InvalidRequest."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key != "config" and not key.startswith(_FILE_PREFIX):
            raise InvalidRequest(f"unrecognized load parameter '{key}', known: config, file:<path>")
        if not isinstance(value, str):
            raise InvalidRequest(
                f"invalid value type for load parameter '{key}', expected a string, got {json_type(value)}"
            )
        if key == "config":
            config = value
            continue
        try:
            files[key.removeprefix(_FILE_PREFIX)] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"load parameter '{key}' is not base64") from None
    return LoadParameters(config, files)


def _parameters(document: Mapping[str, Any]) -> dict[str, Any]:
    if document.get("repository_name"):
        raise Unsupported("'repository_name' specification is not supported")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"Unable to parse 'parameters': expected an object, got {json_type(parameters)}")
    return dict(parameters)


def _tensor(spec: TensorMetadata) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def _trace_document(settings: Mapping[str, list[str]]) -> dict[str, Any]:
    return {key: values if key in _TRACE_LISTS else (values[0] if values else "") for key, values in settings.items()}


def _trace_value(key: str, value: Any) -> list[str] | None:
    """null clears a setting; numbers are taken as their text, as clients write `trace_rate` both ways."""
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    texts = [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in values]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            f"invalid value type for trace setting '{key}', expected a string, an array of strings or null,"
            f" got {json_type(value)}"
        )
    return texts


def _size(document: Mapping[str, Any], field: str, default: int | None) -> int:
    value = document.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InvalidRequest(f"Unable to parse '{field}': expected an unsigned integer, got {json_type(value)}")
    return value
