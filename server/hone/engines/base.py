"""What every engine shares: reading a tensor's bytes without copying, and the errors engines raise."""

from __future__ import annotations

import ctypes

import numpy as np

from hone.types import Array


def view_memory(address: int, num_bytes: int, owner: object) -> Array:
    """A uint8 view of foreign memory that keeps `owner` alive for as long as the view or its slices live.

    Writable, because numpy offers no read-only array over a raw address; nobody but the engine's client holds it.
    """
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]  # ctypes instances take attributes; numpy keeps the instance
    return np.ctypeslib.as_array(buffer)
