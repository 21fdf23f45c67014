"""The protocol over gRPC by the generated stub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.protocol.wire import Answer, Input, Output, Tensor, Typed, from_raw
from tests.running import DEADLINE_SECONDS

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP16": "fp32_contents",
    "BF16": "fp32_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class GrpcClient:
    protocol = "grpc"

    def __init__(self, port: int) -> None:
        self.port = port
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def call(self, method: str, request: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """A unary call; the document of a success is the message in JSON form, with numbers as numbers."""
        answer, response = self._call(method, request, headers)
        if response is not None:
            answer.document = as_dict(response)
        return answer

    def infer_message(self, request: Any, headers: Mapping[str, str] | None = None, **options: Any) -> Answer:
        answer, response = self._call("ModelInfer", request, headers, **options)
        if response is not None:
            read_response(answer, response)
        return answer

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
        del binary  # outputs are always raw
        return self.infer_message(infer_request(model, inputs, outputs, version, id, parameters), headers)

    def live(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ServerLive", pb.ServerLiveRequest(), headers)

    def ready(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ServerReady", pb.ServerReadyRequest(), headers)

    def model_ready(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ModelReady", pb.ModelReadyRequest(name=model, version=version), headers)

    def server_metadata(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ServerMetadata", pb.ServerMetadataRequest(), headers)

    def metadata(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ModelMetadata", pb.ModelMetadataRequest(name=model, version=version), headers)

    def config(self, model: str, version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        answer = self.call("ModelConfig", pb.ModelConfigRequest(name=model, version=version), headers)
        if answer.ok:
            answer.document = answer.document["config"]
        return answer

    def statistics(self, model: str = "", version: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        return self.call("ModelStatistics", pb.ModelStatisticsRequest(name=model, version=version), headers)

    def index(self, ready: Any = None, repository: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        request = pb.RepositoryIndexRequest(ready=bool(ready), repository_name=repository)
        answer = self.call("RepositoryIndex", request, headers)
        if answer.ok:
            # As over HTTP: fields without a value are left out.
            lines = answer.document["models"]
            answer.document = [{key: value for key, value in line.items() if value} for line in lines]
        return answer

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
        request = pb.RepositoryModelLoadRequest(model_name=model, repository_name=repository)
        set_parameters(request.parameters, parameters)
        if config is not None:
            request.parameters["config"].string_param = config
        for name, content in (files or {}).items():
            request.parameters[f"file:{name}"].bytes_param = content
        return self.call("RepositoryModelLoad", request, headers)

    def unload(
        self,
        model: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        repository: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        request = pb.RepositoryModelUnloadRequest(model_name=model, repository_name=repository)
        set_parameters(request.parameters, parameters)
        return self.call("RepositoryModelUnload", request, headers)

    def trace(
        self, model: str = "", settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        request = pb.TraceSettingRequest(model_name=model)
        for name, value in (settings or {}).items():
            values = [] if value is None else value if isinstance(value, list) else [value]
            request.settings[name].value.extend(values)
        answer = self.call("TraceSetting", request, headers)
        if answer.ok:
            # As over HTTP: the level is a list, the rest are single strings.
            values = {name: entry["value"] for name, entry in answer.document["settings"].items()}
            answer.document = {name: v if name == "trace_level" else v[0] for name, v in values.items()}
        return answer

    def log(self, settings: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        request = pb.LogSettingsRequest()
        for name, value in (settings or {}).items():
            form = "bool_param" if isinstance(value, bool) else "string_param"
            form = "uint32_param" if isinstance(value, int) and not isinstance(value, bool) else form
            setattr(request.settings[name], form, value)
        answer = self.call("LogSettings", request, headers)
        if answer.ok:
            answer.document = {name: next(iter(v.values())) for name, v in answer.document["settings"].items()}
        return answer

    def register(
        self, region: str, key: str, byte_size: int, offset: int = 0, headers: Mapping[str, str] | None = None
    ) -> Answer:
        request = pb.SystemSharedMemoryRegisterRequest(name=region, key=key, offset=offset, byte_size=byte_size)
        return self.call("SystemSharedMemoryRegister", request, headers)

    def unregister(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        request = pb.SystemSharedMemoryUnregisterRequest(name=region)
        return self.call("SystemSharedMemoryUnregister", request, headers)

    def regions(self, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        answer = self.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=region), headers)
        if answer.ok:
            answer.document = answer.document["regions"]
            for name, item in answer.document.items():
                assert item.pop("name") == name
        return answer

    def cuda(self, call: str, region: str = "", headers: Mapping[str, str] | None = None) -> Answer:
        method = f"CudaSharedMemory{call.capitalize()}"
        return self.call(method, getattr(pb, f"{method}Request")(name=region), headers)

    def _call(self, method: str, request: Any, headers: Mapping[str, str] | None, **options: Any) -> tuple[Answer, Any]:
        metadata = tuple((name.lower(), value) for name, value in (headers or {}).items())
        options.setdefault("timeout", DEADLINE_SECONDS)
        try:
            response, call = getattr(self.stub, method).with_call(request, metadata=metadata, **options)
        except grpc.RpcError as problem:
            return error_answer(problem), None
        fields = {key: value for key, value in call.initial_metadata() if isinstance(value, str)}
        return Answer("grpc", "OK", headers=fields), response


def error_answer(problem: Any) -> Answer:
    code, details = problem.code(), problem.details()
    assert details, code
    return Answer("grpc", code.name, details)


def read_response(answer: Answer, response: Any) -> None:
    """The tensors of a ModelInferResponse; the rest as the JSON form of HTTP has it."""
    assert len(response.raw_output_contents) == len(response.outputs)
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        assert not tensor.HasField("contents")
        parameters = plain_parameters(tensor.parameters)
        shape = tuple(tensor.shape)
        array = None if "shared_memory_region" in parameters else from_raw(tensor.datatype, shape, raw)
        answer.outputs[tensor.name] = Tensor(tensor.datatype, shape, array, parameters)
    answer.document = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        answer.document["id"] = response.id
    if response.parameters:
        answer.document["parameters"] = plain_parameters(response.parameters)


def infer_request(
    model: str,
    inputs: Sequence[Input],
    outputs: Sequence[Output] | None = None,
    version: str = "",
    id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    set_parameters(request.parameters, parameters)
    for tensor in inputs:
        entry = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        set_parameters(entry.parameters, tensor.parameters)
        if tensor.data is not None:
            field = tensor.field or FIELDS.get(tensor.datatype, "bytes_contents")
            items = [item.encode() if isinstance(item, str) else item for item in tensor.data]
            entry.contents.SetInParent()
            getattr(entry.contents, field).extend(items)
        if tensor.raw is not None:
            request.raw_input_contents.append(tensor.raw)
    for output in outputs or ():
        set_parameters(request.outputs.add(name=output.name).parameters, output.parameters)
    return request


def set_parameters(target: Any, parameters: Mapping[str, Any] | None) -> None:
    for key, value in (parameters or {}).items():
        if isinstance(value, Typed):
            setattr(target[key], value.form, value.value)
        elif isinstance(value, bool):
            target[key].bool_param = value
        elif isinstance(value, int):
            setattr(target[key], "int64_param" if value < 2**63 else "uint64_param", value)
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def plain_parameters(parameters: Any) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in parameters.items()}


def as_dict(message: Any) -> Any:
    """JSON form of a message with every field present, and 64-bit integers as numbers rather than strings."""
    text = json_format.MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _numbers(message, json.loads(text))


def _numbers(message: Any, document: Any) -> Any:
    wide = {"int64", "uint64"}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name not in document:
            continue
        kind = _kind(field)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value_field = field.message_type.fields_by_name["value"]
            for key, value in getattr(message, name).items():
                if value_field.message_type is not None:
                    _numbers(value, document[name][str(key)])
        elif kind in wide:
            value = document[name]
            document[name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            value = getattr(message, name)
            if isinstance(document[name], list):
                for item, entry in zip(value, document[name], strict=True):
                    _numbers(item, entry)
            else:
                _numbers(value, document[name])
    return document


def _kind(field: Any) -> str:
    return {3: "int64", 4: "uint64", 18: "int64", 6: "uint64", 16: "int64"}.get(field.type, "")
