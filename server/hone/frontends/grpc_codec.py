"""ModelInferRequest to `InferRequest`, and `InferResponse` to the bytes of a ModelInferResponse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from hone.errors import InvalidRequest, duplicate_tensor
from hone.frontends.grpc_parameters import (
    RequestParameters,
    decode_classification,
    decode_parameters,
    decode_region,
    encode_parameters,
)
from hone.frontends.grpc_tensors import checked_size, from_contents, from_raw, to_raw
from hone.frontends.grpc_wire import Buffer, append_raw_output, split_raw_inputs
from hone.protos import service_pb
from hone.types import (
    Array,
    InferInput,
    InferRequest,
    InferResponse,
    ParameterValue,
    RequestedOutput,
    SharedMemoryAccess,
)

PROTOCOL = "grpc"

#: From this size on, taking the tensors out by hand beats the generated parser's copies (measured; below it, the
#: walk in Python costs more than it saves).
SPLIT_BYTES = 64 * 1024


def parse(message_type: Any, message: bytes) -> Any:
    """A protobuf message of the given type. Raises InvalidRequest where the bytes are not one."""
    try:
        return message_type.FromString(message)
    except DecodeError as problem:
        raise InvalidRequest(f"malformed {message_type.DESCRIPTOR.name} message") from problem


def parse_infer_request(message: bytes) -> tuple[Any, Sequence[Buffer]]:
    """The request, and its raw inputs: views of `message` where it is large. Raises InvalidRequest (malformed)."""
    if len(message) >= SPLIT_BYTES:
        parts = split_raw_inputs(message)
        if parts is not None:
            rest, raw = parts
            return parse(service_pb.ModelInferRequest, rest), raw
    proto = parse(service_pb.ModelInferRequest, message)
    return proto, proto.raw_input_contents


def decode_infer_request(
    proto: Any,
    raw: Sequence[Buffer],
    regions: SharedMemoryAccess,
    *,
    received_ns: int,
    forwarded: dict[str, ParameterValue] | None = None,
    traceparent: str | None = None,
) -> InferRequest:
    """Inputs become arrays of the shape given. Raises InvalidRequest, and what `regions.view` raises.

    `forwarded` are headers passed on as parameters; they win over parameters of the same name, so that a client behind
    a proxy cannot forge what the proxy adds.
    """
    model = proto.model_name
    parameters = decode_parameters(proto.parameters) if proto.parameters else RequestParameters()
    if forwarded:
        parameters.others.update(forwarded)
    return InferRequest(
        model_name=model,
        model_version=proto.model_version,
        id=proto.id,
        inputs=_decode_inputs(model, proto.inputs, raw, regions),
        outputs=_decode_outputs(model, proto.outputs) if proto.outputs else [],
        parameters=parameters.others,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        protocol=PROTOCOL,
        received_ns=received_ns,
        traceparent=traceparent,
    )


def encode_infer_response(response: InferResponse, *, final: bool = False) -> list[Buffer]:
    """The pieces of a ModelInferResponse, to be joined once; views of outputs among them.

    Outputs in shared memory get an empty raw content, so that contents and outputs keep the same index. `final` adds
    the mark by which clients of streams know a request's last response.
    """
    proto = service_pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    if response.parameters:
        encode_parameters(response.parameters, proto.parameters)
    if final:
        proto.parameters["triton_final_response"].bool_param = True
    contents: list[Buffer] = []
    for output in response.outputs:
        tensor = proto.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if output.parameters:
            encode_parameters(output.parameters, tensor.parameters)
        if output.region is None:
            contents.append(to_raw(output.datatype, output.data))
            continue
        encode_parameters(
            {
                "shared_memory_region": output.region.region,
                "shared_memory_byte_size": output.region.byte_size,
                **({"shared_memory_offset": output.region.offset} if output.region.offset else {}),
            },
            tensor.parameters,
        )
        contents.append(b"")
    parts: list[Buffer] = [proto.SerializeToString()]
    for content in contents:
        append_raw_output(parts, content)
    return parts


def _decode_inputs(
    model: str, tensors: Any, raw: Sequence[Buffer], regions: SharedMemoryAccess
) -> dict[str, InferInput]:
    inputs: dict[str, InferInput] = {}
    num_raw = len(raw)
    raw_index = 0
    for tensor in tensors:
        name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
        if name in inputs:
            raise duplicate_tensor("input", name)
        region = decode_region(tensor.parameters, name, model) if tensor.parameters else None
        data: Array
        if region is not None:
            if tensor.HasField("contents"):
                raise InvalidRequest(
                    f"unexpected 'contents' provided when using shared memory for input tensor '{name}'"
                    f" for model '{model}'"
                )
            data = from_raw(model, name, datatype, shape, regions.view(region))
        elif num_raw:
            if tensor.HasField("contents"):
                raise InvalidRequest(
                    "contents field must not be specified when using raw_input_contents"
                    f" for '{name}' for model '{model}'"
                )
            if raw_index == num_raw:
                raise InvalidRequest(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
            data = from_raw(model, name, datatype, shape, raw[raw_index])
            raw_index += 1
        elif tensor.HasField("contents") or not checked_size(model, name, datatype, shape):
            data = from_contents(model, name, datatype, shape, tensor.contents)
        else:
            raise InvalidRequest(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
        inputs[name] = InferInput(name, datatype, shape, data)
    if raw_index != num_raw:
        raise InvalidRequest(
            f"unexpected additional input data for model '{model}': {num_raw} raw_input_contents for {raw_index} inputs"
        )
    return inputs


def _decode_outputs(model: str, tensors: Any) -> list[RequestedOutput]:
    outputs: list[RequestedOutput] = []
    names: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if name in names:
            raise duplicate_tensor("output", name)
        names.add(name)
        if not tensor.parameters:
            outputs.append(RequestedOutput(name))
            continue
        outputs.append(
            RequestedOutput(
                name,
                classification=decode_classification(tensor.parameters, name),
                region=decode_region(tensor.parameters, name, model),
            )
        )
    return outputs
