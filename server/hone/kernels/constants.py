"""Weights that no model file holds (folded batch norms and the like): kept once, whatever artifacts use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hone.kernels.cache import KernelsCache
from hone.kernels.digest import JSON, digest_of, digest_of_bytes
from hone.kernels.entry import SCHEMA, Entry, Failure
from hone.types import Array

FILE = "constants.safetensors"


def constants_digest(tensors: Mapping[str, Array]) -> str:
    """Of names, dtypes, shapes and contents."""
    return digest_of(
        {
            "kind": "constants",
            "schema": SCHEMA,
            "tensors": {
                name: {
                    "dtype": tensor.dtype.name,
                    "shape": [int(size) for size in tensor.shape],
                    "sha256": digest_of_bytes(_plain(tensor).reshape(-1).view(np.uint8).data),
                }
                for name, tensor in tensors.items()
            },
        }
    )


def publish_constants(cache: KernelsCache, tensors: Mapping[str, Array]) -> Entry | Failure:
    """Keeps the tensors under the digest of their contents (the returned entry's `digest`).

    Raises ValueError for dtypes that safetensors does not have (objects, strings).
    """
    for name, tensor in tensors.items():
        if tensor.dtype.hasobject or tensor.dtype.kind in "USM":
            raise ValueError(f"constant '{name}' is of dtype {tensor.dtype}, which cannot be kept")
    digest = constants_digest(tensors)
    found = cache.get("constants", digest)
    if isinstance(found, Entry):
        return found
    data = save({name: _plain(tensor) for name, tensor in tensors.items()})
    content: dict[str, JSON] = {
        "tensors": {
            name: {"dtype": tensor.dtype.name, "shape": [int(size) for size in tensor.shape]}
            for name, tensor in tensors.items()
        }
    }
    return cache.publish("constants", digest, "", {FILE: data}, content)


def load_constants(entry: Entry | Path) -> dict[str, Array]:
    """The tensors of an entry (or of its folder), in memory of their own. Raises OSError, ValueError."""
    path = (entry.path if isinstance(entry, Entry) else entry) / FILE
    try:
        return dict(load_file(path))
    except SafetensorError as problem:
        raise ValueError(f"{path}: not a safetensors file: {problem}") from problem


def _plain(tensor: Array) -> Array:
    """C-contiguous and little-endian, as the format has it."""
    contiguous = np.ascontiguousarray(tensor).reshape(tensor.shape)
    return contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
