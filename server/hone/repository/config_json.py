"""A config as Triton's JSON: snake_case names, defaults printed, enums as strings, 64-bit integers as numbers.

Protobuf's own JSON writes 64-bit integers as strings; Triton's clients expect numbers, map keys excepted.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from hone.errors import InvalidRequest
from hone.protos import config_pb
from hone.repository.config_text import MAX_CONFIG_BYTES

_WIDE = frozenset(
    {
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED64,
    }
)


def config_to_json(config: config_pb.ModelConfig) -> dict[str, Any]:
    """The JSON object that `/v2/models/M/config` answers with."""
    document: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _convert(document, config_pb.ModelConfig.DESCRIPTOR, _wide_to_number)
    return document


def config_from_json(text: str, model: str) -> config_pb.ModelConfig:
    """The config that a load request brings along. Raises InvalidRequest with the reason, whatever the text is."""
    try:
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"longer than the {MAX_CONFIG_BYTES} characters allowed")
        document = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, found {type(document).__name__}")
        _convert(document, config_pb.ModelConfig.DESCRIPTOR, _enum_to_upper)
        return json_format.ParseDict(document, config_pb.ModelConfig())
    except RecursionError as problem:
        raise InvalidRequest(f"Invalid config override: JSON of model '{model}' is nested too deeply") from problem
    except (json_format.ParseError, ValueError, TypeError, OverflowError) as problem:
        reason = str(problem).split("\n", 1)[0][:300].encode("utf-8", "replace").decode("utf-8")
        raise InvalidRequest(f"Invalid config override: {reason}") from problem


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key '{twice}'")
    return document


def _convert(document: dict[str, Any], descriptor: Descriptor, scalar: Any) -> None:
    """Replace, in place, every scalar that belongs to a field of the message by `scalar(field, value)`.

    What does not fit the message is left as it is, for the parser to refuse with its own words.
    """
    for name, value in document.items():
        field = descriptor.fields_by_name.get(name) or descriptor.fields_by_camelcase_name.get(name)
        if field is not None:
            document[name] = _convert_field(field, value, scalar)


def _convert_field(field: FieldDescriptor, value: Any, scalar: Any) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        if isinstance(value, dict):
            inner = message.fields_by_name["value"]
            return {key: _convert_field(inner, item, scalar) for key, item in value.items()}
        return value
    if isinstance(value, list):
        return [_convert_field(field, item, scalar) for item in value]
    if message is None:
        return scalar(field, value)
    if isinstance(value, dict):
        _convert(value, message, scalar)
    return value


def _wide_to_number(field: FieldDescriptor, value: Any) -> Any:
    return int(value) if field.type in _WIDE else value


def _enum_to_upper(field: FieldDescriptor, value: Any) -> Any:
    """Triton reads enum names without regard to case; every name in this message is upper case."""
    return value.upper() if field.enum_type is not None and isinstance(value, str) else value
