"""Input sets on their way into a child: real data is handed over in memory and never touches a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hone.tuning.inputs import InputSet
from hone.types import BYTES, NUMPY_DTYPES, Array

_LENGTH_BYTES = 8
_DATATYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != BYTES}
#: More sets, or more bytes, than this are not handed over: the first ones are.
MAX_SETS = 8
MAX_BYTES = 1 << 28


def pack(sets: Sequence[InputSet]) -> int:
    """A descriptor of anonymous memory that holds the sets; the caller closes it. Sets with texts are left out."""
    header: list[dict[str, Any]] = []
    data: list[Array] = []
    num_bytes = 0
    for one in sets:
        size = sum(array.nbytes for array in one.arrays.values())
        if len(header) == MAX_SETS or num_bytes + size > MAX_BYTES:
            break
        if any(array.dtype not in _DATATYPES for array in one.arrays.values()):
            continue
        num_bytes += size
        header.append(
            {
                "name": one.name,
                "arrays": [[name, _DATATYPES[array.dtype], list(array.shape)] for name, array in one.arrays.items()],
            }
        )
        data += [np.ascontiguousarray(array) for array in one.arrays.values()]
    told = json.dumps(header).encode()
    descriptor = os.memfd_create("hone-samples")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(len(told).to_bytes(_LENGTH_BYTES, "little") + told)
        for array in data:
            file.write(array.reshape(-1).view(np.uint8).data)
    return descriptor


def unpack(descriptor: int) -> list[InputSet]:
    """Raises ValueError for what `pack` did not write."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        data = file.read()
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    sets, place = [], end
    for one in json.loads(data[_LENGTH_BYTES:end]):
        arrays: dict[str, Array] = {}
        for name, datatype, dims in one["arrays"]:
            dtype = NUMPY_DTYPES[datatype]
            num_items = int(np.prod(dims, dtype=np.int64))
            arrays[name] = np.frombuffer(data, dtype, num_items, place).reshape(dims)
            place += num_items * dtype.itemsize
        sets.append(InputSet(one["name"], arrays))
    return sets


def repeated_rows(arrays: Mapping[str, Array], num_rows: int) -> dict[str, Array]:
    """The rows of a sample over and over until there are `num_rows`."""
    return {name: np.resize(array, (num_rows, *array.shape[1:])) for name, array in arrays.items()}
