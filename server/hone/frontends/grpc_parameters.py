"""Parameters of requests, tensors and responses: `InferParameter` maps to plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.errors import InvalidRequest
from hone.types import ParameterValue, RegionSlice

_CHOICE = "parameter_choice"
_RESERVED_PREFIX = "triton_"
#: The only reserved key that clients send: on streams, and perf_analyzer on every request.
_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_INTEGERS = ("int64_param", "uint64_param")
#: Keys with a meaning of their own -> the forms that their value may have.
_KNOWN_KEYS = {
    "priority": _INTEGERS,
    "timeout": _INTEGERS,
    "sequence_id": (*_INTEGERS, "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
}

#: As over HTTP: more classes than any labels file has, and few enough to answer.
MAX_CLASSES = 1_000_000
_MAX_INT64 = 2**63 - 1
_MIN_INT64 = -(2**63)
_MAX_UINT64 = 2**64 - 1


@dataclass(slots=True)
class RequestParameters:
    priority: int = 0
    timeout_us: int = 0
    others: dict[str, ParameterValue] = field(default_factory=dict)


def decode_parameters(parameters: Mapping[str, Any]) -> RequestParameters:
    """Parameters of a ModelInferRequest. Raises InvalidRequest (reserved key, wrong type, negative number)."""
    decoded = RequestParameters()
    for key, parameter in parameters.items():
        if key.startswith(_RESERVED_PREFIX):
            if key != _EMPTY_FINAL_RESPONSE:
                raise InvalidRequest(
                    f"parameter keys starting with '{_RESERVED_PREFIX}' are reserved and should not be specified,"
                    f" got '{key}'"
                )
            # Every request gets exactly one response, marked final: there is no empty one to ask for.
            _value_of(key, parameter, ("bool_param",))
            continue
        value = _value_of(key, parameter, _KNOWN_KEYS.get(key))
        if key == "priority":
            decoded.priority = _not_negative(key, value)
        elif key == "timeout":
            decoded.timeout_us = _not_negative(key, value)
        else:
            decoded.others[key] = value
    return decoded


def encode_parameters(values: Mapping[str, ParameterValue], parameters: Any) -> None:
    """Write `values` into a protobuf map of `InferParameter`."""
    for key, value in values.items():
        parameter = parameters[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if _MIN_INT64 <= value <= _MAX_INT64:
                parameter.int64_param = value
            elif 0 < value <= _MAX_UINT64:
                parameter.uint64_param = value
            else:
                raise OverflowError(f"parameter '{key}' does not fit 64 bits: {value}")
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value


def decode_region(parameters: Mapping[str, Any], tensor: str, model: str) -> RegionSlice | None:
    """The place in shared memory that a tensor's parameters name, if they name one. Raises InvalidRequest."""
    if "shared_memory_region" not in parameters:
        for key in ("shared_memory_byte_size", "shared_memory_offset"):
            if key in parameters:
                raise InvalidRequest(
                    f"'{key}' specified without 'shared_memory_region' for tensor '{tensor}' for model '{model}'"
                )
        return None
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' for tensor '{tensor}'"
            f" for model '{model}'"
        )
    region = _tensor_value(parameters, "shared_memory_region", ("string_param",), tensor)
    byte_size = _tensor_value(parameters, "shared_memory_byte_size", _INTEGERS, tensor)
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _tensor_value(parameters, "shared_memory_offset", _INTEGERS, tensor)
    for key, value in (("shared_memory_byte_size", byte_size), ("shared_memory_offset", offset)):
        if value < 0:
            raise InvalidRequest(f"'{key}' must not be negative for tensor '{tensor}', got {value}")
    return RegionSlice(region, offset, byte_size)


def decode_classification(parameters: Mapping[str, Any], tensor: str) -> int:
    """How many classes are asked of an output; 0 for the tensor itself. Raises InvalidRequest."""
    if "classification" not in parameters:
        return 0
    count: int = _tensor_value(parameters, "classification", _INTEGERS, tensor)
    if not 0 <= count <= MAX_CLASSES:
        raise InvalidRequest(f"'classification' must be between 0 and {MAX_CLASSES} for tensor '{tensor}', got {count}")
    return count


def _tensor_value(parameters: Mapping[str, Any], key: str, forms: tuple[str, ...], tensor: str) -> Any:
    return _value_of(key, parameters[key], forms, f" for tensor '{tensor}'")


def _value_of(key: str, parameter: Any, forms: tuple[str, ...] | None, where: str = "") -> Any:
    """Value of a parameter, whose form must be one of `forms` (None: any, but there must be one)."""
    form = parameter.WhichOneof(_CHOICE)
    if form is None or (forms is not None and form not in forms):
        expected = " or ".join(forms) if forms else "a value"
        raise InvalidRequest(f"invalid value type for '{key}' parameter{where}, expected {expected}, got {form}")
    return getattr(parameter, form)


def _not_negative(key: str, value: int) -> int:
    if value < 0:
        raise InvalidRequest(f"'{key}' parameter must not be negative, got {value}")
    return value
