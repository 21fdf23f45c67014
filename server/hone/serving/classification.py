"""The classification extension: top classes of an output as `value:index[:label]` strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.errors import InvalidRequest
from hone.types import BYTES, Array


def classify(name: str, array: Array, num_classes: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Top `num_classes` of each batch row (or of the whole tensor), best first, ties by lower index.

    Returns a BYTES array of shape [batch, k] or [k], k = min(num_classes, items). Raises InvalidRequest for BYTES or
    BOOL tensors, which have no order.
    """
    if array.dtype in (np.object_, np.bool_):
        raise InvalidRequest(
            f"output '{name}' cannot be classified: its datatype is {BYTES if array.dtype == np.object_ else 'BOOL'}"
        )
    rows = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    k = min(num_classes, rows.shape[1])
    top = np.empty((rows.shape[0], k), dtype=np.object_)
    floating = array.dtype.kind not in "iu"
    if floating:
        rows = rows.astype(np.float64, copy=False)
    for r, row in enumerate(rows):
        # NaN sorts last by being replaced; a stable sort of the negated order keeps the lower index first.
        order = np.argsort(
            -np.nan_to_num(row, nan=-np.inf) if floating else np.subtract(row.max(initial=0), row, dtype=object),
            kind="stable",
        )[:k]
        for column, index in enumerate(order):
            value = f"{row[index]:f}" if floating else str(row[index])
            label = f":{labels[index]}" if index < len(labels) else ""
            top[r, column] = f"{value}:{index}{label}".encode()
    return top if batched else top[0]
