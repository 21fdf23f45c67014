"""Initializers of an ONNX file by name, straight from its bytes.

The `onnx` package would parse the whole graph and copy every weight twice. This reads only the fields on the way to
`ModelProto.graph.initializer` and hands out views of the file's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from hone.engines.protobuf import Malformed, contents_of, fields, varints
from hone.errors import EngineError
from hone.types import Array

# Field numbers of ONNX's messages (part of the format).
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_DIMS, _DATA_TYPE, _FLOATS, _INT32S, _INT64S, _NAME, _RAW, _DOUBLES, _UINT64S, _EXTERNAL, _LOCATION = (
    1, 2, 4, 5, 7, 8, 9, 10, 11, 13, 14,
)  # fmt: skip
_ENTRY_KEY, _ENTRY_VALUE = 1, 2

#: TensorProto.DataType -> numpy dtype, and the field that holds items which are not in `raw_data`.
_TYPES: dict[int, tuple[np.dtype, int]] = {
    1: (np.dtype("<f4"), _FLOATS),
    2: (np.dtype("u1"), _INT32S),
    3: (np.dtype("i1"), _INT32S),
    4: (np.dtype("<u2"), _INT32S),
    5: (np.dtype("<i2"), _INT32S),
    6: (np.dtype("<i4"), _INT32S),
    7: (np.dtype("<i8"), _INT64S),
    9: (np.dtype("?"), _INT32S),
    10: (np.dtype("<f2"), _INT32S),
    11: (np.dtype("<f8"), _DOUBLES),
    12: (np.dtype("<u4"), _UINT64S),
    13: (np.dtype("<u8"), _UINT64S),
    16: (np.dtype(ml_dtypes.bfloat16), _INT32S),
}


@dataclass(slots=True)
class _Tensor:
    name: str = ""
    dims: list[int] = field(default_factory=list)
    data_type: int = 0
    raw: memoryview | None = None
    items: list[tuple[int, int | memoryview]] = field(default_factory=list)
    external: dict[str, str] = field(default_factory=dict)
    is_external: bool = False


def read_initializers(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """The named initializers, as read-only views of the file where possible. Raises EngineError."""
    wanted = set(names)
    found: dict[str, Array] = {}
    if not wanted:
        return found
    try:
        for number, graph in fields(contents_of(path)):
            if number != _MODEL_GRAPH or not isinstance(graph, memoryview):
                continue
            for inner, value in fields(graph):
                if inner != _GRAPH_INITIALIZER or not isinstance(value, memoryview):
                    continue
                tensor = _parse(value)
                if tensor.name in wanted:
                    found[tensor.name] = _array(tensor, path.parent)
    except (OSError, ValueError, Malformed) as problem:
        raise EngineError(f"weights of {path.name} cannot be read: {problem}") from problem
    missing = sorted(wanted - found.keys())
    if missing:
        raise EngineError(f"{path.name} has no initializer '{missing[0]}' ({len(missing)} of {len(wanted)} missing)")
    return found


def _parse(message: memoryview) -> _Tensor:
    tensor = _Tensor()
    for number, value in fields(message):
        if isinstance(value, int):
            if number == _DIMS:
                tensor.dims.append(value)
            elif number == _DATA_TYPE:
                tensor.data_type = value
            elif number == _LOCATION:
                tensor.is_external = value == 1
            else:
                tensor.items.append((number, value))
        elif number == _DIMS:
            tensor.dims.extend(varints(value))
        elif number == _NAME:
            tensor.name = str(value, "utf-8")
        elif number == _RAW:
            tensor.raw = value
        elif number == _EXTERNAL:
            entry = dict(fields(value))
            key, told = entry.get(_ENTRY_KEY), entry.get(_ENTRY_VALUE)
            if isinstance(key, memoryview) and isinstance(told, memoryview):
                tensor.external[str(key, "utf-8")] = str(told, "utf-8")
        else:
            tensor.items.append((number, value))
    return tensor


def _array(tensor: _Tensor, folder: Path) -> Array:
    known = _TYPES.get(tensor.data_type)
    if known is None:
        raise Malformed(f"initializer '{tensor.name}' has data type {tensor.data_type}, which hone does not read")
    dtype, items_field = known
    count = int(np.prod(tensor.dims, dtype=np.int64))
    flat: Array
    if tensor.is_external:
        flat = _external(tensor, dtype, count, folder)
    elif tensor.raw is not None:
        flat = np.frombuffer(tensor.raw, dtype)
    else:
        flat = _items(tensor, dtype, items_field)
    if flat.size != count:
        raise Malformed(f"initializer '{tensor.name}' has {flat.size} items, expected {count}")
    return flat.reshape(tensor.dims)


def _external(tensor: _Tensor, dtype: np.dtype, count: int, folder: Path) -> Array:
    location = Path(tensor.external.get("location", ""))
    path = (folder / location).resolve()
    if location.is_absolute() or not path.is_relative_to(folder.resolve()):
        raise Malformed(f"initializer '{tensor.name}' lies outside of the model's folder: '{location}'")
    return np.fromfile(path, dtype, count, offset=int(tensor.external.get("offset", "0")))


def _items(tensor: _Tensor, dtype: np.dtype, items_field: int) -> Array:
    parts: list[Array] = []
    for number, value in tensor.items:
        if number != items_field:
            continue
        if items_field in (_FLOATS, _DOUBLES):
            stored = np.dtype("<f4" if items_field == _FLOATS else "<f8")
            raw = value if isinstance(value, memoryview) else value.to_bytes(stored.itemsize, "little")
            parts.append(np.frombuffer(raw, stored))
        else:
            numbers = varints(value) if isinstance(value, memoryview) else [value]
            parts.append(np.array([n - (1 << 64) if n >= 1 << 63 else n for n in numbers], np.int64))
    flat = np.concatenate(parts) if parts else np.empty(0, dtype)
    if items_field == _INT32S and dtype.itemsize == 2 and dtype.kind not in "iu":
        return flat.astype(np.uint16).view(dtype)  # half floats are stored as their bits
    return flat.astype(dtype)
