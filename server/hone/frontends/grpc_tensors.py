"""One tensor between its forms on the wire and numpy: raw bytes, typed contents, length-prefixed strings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hone.errors import InvalidRequest, input_byte_size
from hone.frontends.grpc_wire import Buffer
from hone.strings import from_length_prefixed, to_length_prefixed
from hone.types import BYTES, MAX_ELEMENTS, NUMPY_DTYPES, Array, Shape, num_elements

#: Datatype -> the one field of InferTensorContents that may carry it. FP16 and BF16 have none.
_CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
_FIXED_SIZE = {name: (dtype, dtype.itemsize) for name, dtype in NUMPY_DTYPES.items() if name != BYTES}
#: Types that travel in a wider field, whose values may therefore be out of their range.
_NARROWED = {"INT8": np.int32, "INT16": np.int32, "UINT8": np.uint32, "UINT16": np.uint32}

#: Up to this size copying once more is cheaper than making a view.
_COPIED_BYTES = 16 * 1024


def checked_size(model: str, name: str, datatype: str, shape: Shape) -> int:
    """Number of elements of an input. Raises InvalidRequest (unknown datatype, negative or overflowing shape)."""
    if datatype not in NUMPY_DTYPES:
        raise InvalidRequest(
            f"inference input '{name}' data-type is '{datatype}', but model '{model}' expects one of"
            f" {', '.join(NUMPY_DTYPES)}"
        )
    if shape and min(shape) < 0:
        raise InvalidRequest(
            f"All input dimensions should be specified for input '{name}' for model '{model}', got {list(shape)}"
        )
    count = num_elements(shape)
    if count * NUMPY_DTYPES[datatype].itemsize > MAX_ELEMENTS:
        raise InvalidRequest(
            f"shape {list(shape)} of input '{name}' for model '{model}' causes total element count to exceed maximum"
            f" size of {MAX_ELEMENTS} bytes"
        )
    return count


def from_raw(model: str, name: str, datatype: str, shape: Shape, content: Buffer) -> Array:
    """The tensor that `content` holds: a view of it where it is aligned to its items, else a copy.

    Raises InvalidRequest where datatype, shape and size do not fit each other.
    """
    fixed = _FIXED_SIZE.get(datatype)
    if fixed is None:
        count = checked_size(model, name, datatype, shape)
        return _shaped(from_length_prefixed(name, content, count), shape, model, name)
    dtype, itemsize = fixed
    try:
        if math.prod(shape) * itemsize != len(content):
            raise input_byte_size(model, name, checked_size(model, name, datatype, shape) * itemsize, len(content))
        array: Array = np.ndarray(shape, dtype, content)
    except ValueError as problem:
        # Negative dimensions whose product fits come to here, too.
        checked_size(model, name, datatype, shape)
        raise _unusable_shape(model, name, shape, problem) from problem
    if datatype == "BOOL":
        # Bytes above 1 are true, and engines may count on true being 1.
        flags: Array = array.view(np.uint8) != 0
        return flags
    return array if array.flags.aligned else array.copy()


def from_contents(model: str, name: str, datatype: str, shape: Shape, contents: Any) -> Array:
    """The tensor in an InferTensorContents. Raises InvalidRequest (wrong field, wrong count, value out of range)."""
    count = checked_size(model, name, datatype, shape)
    field = _CONTENTS_FIELDS.get(datatype)
    if field is None:
        raise InvalidRequest(
            f"receiving {datatype} data via typed contents is not supported, use raw_input_contents"
            f" for input tensor '{name}' for model '{model}'"
        )
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type '{datatype}':"
                f" expected {field}, got {descriptor.name}"
            )
    values = getattr(contents, field)
    if len(values) != count:
        raise InvalidRequest(
            f"unexpected number of elements {len(values)} in {field} for input tensor '{name}' for model '{model}',"
            f" expecting {count}"
        )
    if datatype == BYTES:
        strings: Array = np.empty(count, np.object_)
        strings[:] = list(values)
        return _shaped(strings, shape, model, name)
    wide = _NARROWED.get(datatype)
    if wide is None:
        return _shaped(np.fromiter(values, NUMPY_DTYPES[datatype], count), shape, model, name)
    numbers = np.fromiter(values, wide, count)
    limits = np.iinfo(NUMPY_DTYPES[datatype])
    if count and (numbers.min() < limits.min or numbers.max() > limits.max):
        raise InvalidRequest(
            f"a value of input tensor '{name}' for model '{model}' is out of range of {datatype}:"
            f" expected {limits.min} to {limits.max}"
        )
    return _shaped(numbers.astype(NUMPY_DTYPES[datatype]), shape, model, name)


def to_raw(datatype: str, array: Array) -> Buffer:
    """Bytes of an output as `raw_output_contents` carries them, without a copy where the array is large."""
    if datatype == BYTES:
        return to_length_prefixed(array)
    if array.nbytes <= _COPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _shaped(array: Array, shape: Shape, model: str, name: str) -> Array:
    try:
        return array.reshape(shape)
    except ValueError as problem:
        raise _unusable_shape(model, name, shape, problem) from problem


def _unusable_shape(model: str, name: str, shape: Shape, problem: Exception) -> InvalidRequest:
    """Sizes fit, and numpy still refuses: too many dimensions, or a zero beside a dimension beyond any memory."""
    return InvalidRequest(f"unusable shape for input '{name}' for model '{model}': {problem}")
