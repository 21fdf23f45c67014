"""One tensor between its forms over HTTP and numpy: bytes behind the JSON header, and JSON data."""

from __future__ import annotations

from array import array as packed
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import orjson

from hone.errors import InvalidRequest, input_byte_size
from hone.frontends.http_errors import input_too_large
from hone.frontends.http_json import dump_numbers
from hone.frontends.http_parameters import json_type
from hone.strings import from_length_prefixed, to_length_prefixed
from hone.types import BYTES, MAX_ELEMENTS, NUMPY_DTYPES, Array, Shape

Buffer: TypeAlias = bytes | memoryview

#: Outputs up to this size are copied into the response; above it they travel as views.
COPIED_BYTES = 64 * 1024

#: Datatypes that JSON cannot carry without saying which float was meant.
NOT_IN_JSON = frozenset({"FP16", "BF16"})

#: array.array takes whole lists at once, and refuses strings, nulls, fractions and values out of range.
_TYPECODES = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}


def checked_shape(model: str, name: str, datatype: str, shape: Any) -> tuple[Shape, int]:
    """The shape of an input and its number of elements. Raises InvalidRequest (datatype, dimensions, overflow)."""
    dtype = NUMPY_DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidRequest(
            f"inference input '{name}' data-type is '{datatype}', but model '{model}' expects one of"
            f" {', '.join(NUMPY_DTYPES)}"
        )
    if shape.__class__ is not list:
        raise InvalidRequest(f"Unable to parse 'shape' of input '{name}': expected an array, got {json_type(shape)}")
    count = 1
    for dim in shape:
        if dim.__class__ is not int or dim < 0:
            raise InvalidRequest(
                f"Unable to parse 'shape' of input '{name}': attempt to access JSON non-unsigned-integer as"
                f" unsigned-integer, got {_shown(shape)}"
            )
        count *= dim
        if dim > MAX_ELEMENTS:
            raise _too_many_elements(name, shape)
    if count * dtype.itemsize > MAX_ELEMENTS:
        raise _too_many_elements(name, shape)
    return tuple(shape), count


def from_binary(model: str, name: str, datatype: str, shape: Shape, count: int, raw: Buffer) -> Array:
    """The tensor that exactly fills `raw`: a view where it is aligned to its items, else a copy.

    Raises InvalidRequest where shape and bytes do not fit each other.
    """
    if datatype == BYTES:
        return reshaped(model, name, from_length_prefixed(name, raw, count), shape)
    dtype = NUMPY_DTYPES[datatype]
    if len(raw) != count * dtype.itemsize:
        raise input_byte_size(model, name, count * dtype.itemsize, len(raw))
    try:
        tensor: Array = np.ndarray(shape, dtype, raw)
    except ValueError as problem:
        raise _unusable_shape(model, name, shape, problem) from problem
    if datatype == "BOOL":
        # Bytes above 1 are true, and engines may count on true being 1.
        flags: Array = tensor.view(np.uint8) != 0
        return flags
    return tensor if tensor.flags.aligned else tensor.copy()


def from_json(model: str, name: str, datatype: str, shape: Shape, count: int, data: Any, limit: int) -> Array:
    """The tensor in a `data` field, nested or flat. Raises InvalidRequest, and HttpError (more than `limit` bytes)."""
    if datatype in NOT_IN_JSON:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input '{name}'"
        )
    if data.__class__ is not list:
        raise InvalidRequest(f"Unable to parse 'data' of input '{name}': expected an array, got {json_type(data)}")
    expanded = count * (4 if datatype == BYTES else NUMPY_DTYPES[datatype].itemsize)
    if expanded > limit:
        raise input_too_large(f"input '{name}'", expanded, limit)
    values = _flattened(name, data)
    if len(values) > count:
        raise InvalidRequest(
            f"Unable to parse 'data' of input '{name}': Shape does not match true shape of 'data' field:"
            f" expected {count} elements, got {len(values)}"
        )
    if len(values) < count:
        raise InvalidRequest(
            f"Failed to parse 'data' of input '{name}': field: shape does not match true shape:"
            f" expected {count} elements, got {len(values)}"
        )
    if datatype == BYTES:
        return reshaped(model, name, _strings(name, values, limit), shape)
    if datatype == "BOOL":
        _require_types(name, datatype, values, {bool})
        return reshaped(model, name, np.array(values, np.bool_), shape)
    try:
        numbers = np.frombuffer(packed(_TYPECODES[datatype], values), NUMPY_DTYPES[datatype])
    except TypeError:
        _require_types(name, datatype, values, {int, float} if datatype in {"FP32", "FP64"} else {int})
        raise
    except OverflowError:
        raise InvalidRequest(f"a value of input '{name}' is out of range of {datatype}") from None
    return reshaped(model, name, numbers, shape)


def has_booleans(text: bytes) -> bool:
    """Whether JSON text may hold booleans, which Python would take for the numbers 0 and 1."""
    return b"true" in text or b"false" in text


def refuse_booleans(name: str, datatype: str, data: Any) -> None:
    """Raises InvalidRequest where `data` of a numeric tensor holds a boolean."""
    if datatype not in {BYTES, "BOOL"} and isinstance(data, list):
        values = _flattened(name, data)
        if bool in set(map(type, values)):
            raise _wrong_item(name, datatype, "a boolean")


def reshaped(model: str, name: str, tensor: Array, shape: Shape) -> Array:
    try:
        return tensor.reshape(shape)
    except ValueError as problem:
        raise _unusable_shape(model, name, shape, problem) from problem


def to_binary(datatype: str, tensor: Array) -> Buffer:
    """Bytes of an output; of a large one, a view."""
    if datatype == BYTES:
        return to_length_prefixed(tensor)
    if tensor.nbytes <= COPIED_BYTES:
        return tensor.tobytes()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def to_json(name: str, datatype: str, tensor: Array) -> bytes:
    """The flat `data` list of an output. Raises InvalidRequest for what JSON cannot carry."""
    if datatype in NOT_IN_JSON:
        raise output_not_in_json(name, datatype)
    if datatype != BYTES:
        return dump_numbers(tensor)
    try:
        return orjson.dumps([str(item, "utf-8") for item in tensor.reshape(-1)])
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output '{name}' holds bytes that are not UTF-8. Please use the binary data format for output '{name}'"
        ) from None


def output_not_in_json(name: str, datatype: str) -> InvalidRequest:
    return InvalidRequest(
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output '{name}'"
    )


def _flattened(name: str, data: Sequence[Any]) -> Sequence[Any]:
    """`data` without its nesting, which must be the same everywhere: lists beside values are refused."""
    while data and data[0].__class__ is list:
        if set(map(type, data)) != {list}:
            raise InvalidRequest(f"Unable to parse 'data' of input '{name}': arrays and values are mixed")
        data = list(chain.from_iterable(data))
    return data


def _strings(name: str, values: Sequence[Any], limit: int) -> Array:
    _require_types(name, BYTES, values, {str})
    try:
        encoded = [value.encode("utf-8") for value in values]
    except UnicodeEncodeError:
        raise InvalidRequest(f"Unable to parse 'data' of input '{name}': a string has no UTF-8 form") from None
    size = 4 * len(encoded) + sum(map(len, encoded))
    if size > limit:
        raise input_too_large(f"input '{name}'", size, limit)
    strings: Array = np.empty(len(encoded), np.object_)
    strings[:] = encoded
    return strings


def _require_types(name: str, datatype: str, values: Sequence[Any], allowed: set[type]) -> None:
    if not set(map(type, values)) <= allowed:
        wrong = next(value for value in values if type(value) not in allowed)
        raise _wrong_item(name, datatype, json_type(wrong))


def _wrong_item(name: str, datatype: str, got: str) -> InvalidRequest:
    return InvalidRequest(f"Unable to parse 'data' of input '{name}': {got} is no value of datatype {datatype}")


def _too_many_elements(name: str, shape: Sequence[int]) -> InvalidRequest:
    return InvalidRequest(
        f"shape {_shown(shape)} of input '{name}' causes total element count to exceed maximum size of"
        f" {MAX_ELEMENTS} bytes"
    )


def _unusable_shape(model: str, name: str, shape: Shape, problem: Exception) -> InvalidRequest:
    """Sizes fit, and numpy still refuses: too many dimensions, or a zero beside a dimension beyond any memory."""
    return InvalidRequest(f"unusable shape for input '{name}' for model '{model}': {problem}")


def _shown(shape: Sequence[Any]) -> str:
    text = repr(list(shape[:16]))
    return text if len(shape) <= 16 else f"{text[:-1]}, ...]"
