"""Parameters of requests and tensors as JSON carries them, each checked for its type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.errors import InvalidRequest
from hone.types import ParameterValue, RegionSlice

RESERVED_PREFIX = "triton_"

#: More classes than any labels file has, and few enough to answer.
MAX_CLASSES = 1_000_000

_MAX_UINT64 = 2**64 - 1
_MIN_INT64 = -(2**63)


@dataclass(slots=True)
class RequestParameters:
    """`binary` is what outputs that do not say `binary_data` themselves get."""

    priority: int = 0
    timeout_us: int = 0
    binary: bool = False
    others: dict[str, ParameterValue] = field(default_factory=dict)


def decode_request_parameters(parameters: Mapping[str, Any]) -> RequestParameters:
    """Parameters of an inference request. Raises InvalidRequest (reserved key, wrong type, negative number)."""
    decoded = RequestParameters()
    for key, value in parameters.items():
        if key == "binary_data_output":
            decoded.binary = _boolean(key, value)
        elif key == "priority":
            decoded.priority = _unsigned(key, value)
        elif key == "timeout":
            decoded.timeout_us = _unsigned(key, value)
        elif key.startswith(RESERVED_PREFIX):
            raise InvalidRequest(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved and should not be specified,"
                f" got '{key}'"
            )
        elif key == "sequence_id":
            decoded.others[key] = value if isinstance(value, str) else _unsigned(key, value, "a string or an integer")
        elif key in {"sequence_start", "sequence_end"}:
            decoded.others[key] = _boolean(key, value)
        else:
            decoded.others[key] = _plain(key, value)
    return decoded


def decode_region(parameters: Mapping[str, Any], tensor: str) -> RegionSlice | None:
    """The place in shared memory that a tensor's parameters name, if they name one. Raises InvalidRequest."""
    where = f" for tensor '{tensor}'"
    region = parameters.get("shared_memory_region")
    if region is None:
        for key in ("shared_memory_byte_size", "shared_memory_offset"):
            if key in parameters:
                raise InvalidRequest(f"'{key}' specified without 'shared_memory_region'{where}")
        return None
    if not isinstance(region, str):
        raise _wrong_type("shared_memory_region", region, "a string", where)
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(f"'shared_memory_byte_size' must be specified along with 'shared_memory_region'{where}")
    byte_size = _unsigned("shared_memory_byte_size", parameters["shared_memory_byte_size"], where=where)
    offset = _unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0), where=where)
    return RegionSlice(region, offset, byte_size)


def decode_classification(parameters: Mapping[str, Any], tensor: str) -> int:
    """How many classes are asked of an output; 0 for the tensor itself. Raises InvalidRequest."""
    if "classification" not in parameters:
        return 0
    count = _unsigned("classification", parameters["classification"], where=f" for tensor '{tensor}'")
    if count > MAX_CLASSES:
        raise InvalidRequest(f"'classification' must be between 0 and {MAX_CLASSES} for tensor '{tensor}', got {count}")
    return count


def decode_binary_data(parameters: Mapping[str, Any], tensor: str, default: bool) -> bool:
    if "binary_data" not in parameters:
        return default
    return _boolean("binary_data", parameters["binary_data"], f" for tensor '{tensor}'")


def decode_binary_size(parameters: Mapping[str, Any], tensor: str) -> int | None:
    if "binary_data_size" not in parameters:
        return None
    size = parameters["binary_data_size"]
    if size.__class__ is int and 0 <= size <= _MAX_UINT64:
        return int(size)
    return _unsigned("binary_data_size", size, where=f" for tensor '{tensor}'")


def _plain(key: str, value: Any) -> ParameterValue:
    if isinstance(value, int) and not isinstance(value, bool) and not _MIN_INT64 <= value <= _MAX_UINT64:
        raise InvalidRequest(f"'{key}' parameter does not fit 64 bits, got {value}")
    if isinstance(value, (bool, int, float, str)):
        return value
    raise _wrong_type(key, value, "a boolean, a number or a string")


def _boolean(key: str, value: Any, where: str = "") -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(key, value, "a boolean", where)
    return value


def _unsigned(key: str, value: Any, expected: str = "an integer", where: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(key, value, expected, where)
    if value < 0:
        raise InvalidRequest(f"'{key}' parameter must not be negative{where}, got {value}")
    if value > _MAX_UINT64:
        raise InvalidRequest(f"'{key}' parameter does not fit 64 bits{where}, got {value}")
    return value


def _wrong_type(key: str, value: Any, expected: str, where: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"invalid value type for '{key}' parameter{where}, expected {expected}, got {json_type(value)}"
    )


def json_type(value: Any) -> str:
    """What JSON calls the type of a parsed value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    return {"str": "a string", "list": "an array", "dict": "an object"}.get(type(value).__name__, "an unknown type")
