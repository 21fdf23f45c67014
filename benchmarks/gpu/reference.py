"""What a row should give: its operands, the same computed in float64, and how far off a kernel may be.

Runs on the machine with the GPU; imports nothing of hone. `place` multiplies in float64 where that is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

#: How often the root mean square of what was expected the largest error may be, by dtype: of the operands, which are
#: what they are (their products are exact in float32), and of the output, which is rounded to it.
_OF_OUTPUT = {"float16": 1e-2, "bfloat16": 4e-2, "float32": 2e-5, "int8": 2e-2, "int32": 0.0}
#: float32 operands are rounded to ten bits in front of tensor cores.
_TF32 = 1e-2
#: Column sums in float32 of what was rounded to nothing, by atomic additions in any order.
_SUMS = 1e-4
#: Exponentials of scores: what is approximated there is below float16, and shows in float32.
_ATTENTION = 1e-3


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def tolerance(row: Mapping[str, Any]) -> float:
    """For `error_of`."""
    allowed = _OF_OUTPUT[row["output"][1]]
    if row["attributes"].get("math") == "tf32":
        allowed = max(allowed, _TF32)
    if row["op"] == "attention":
        allowed = max(allowed, _ATTENTION)
    if any(op == "column_sum" for op, _ in row["epilogue"]):
        allowed = max(allowed, _SUMS)
    return allowed


def error_of(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the root mean square of what was expected; infinite where something is not
    finite."""
    difference = np.abs(np.asarray(found, np.float64) - expected)
    if not np.isfinite(difference).all():
        return math.inf
    return float(difference.max() / np.sqrt(np.mean(np.square(expected))))


def operands_of(row: Mapping[str, Any]) -> list[Array]:
    """Random, never zero; weights are as small as their sums are long, so that results are of about one."""
    generator = np.random.default_rng(0)
    weights = {"matmul": (1,), "conv2d": (1,), "attention": ()}.get(row["op"], (1, 2))
    arrays = []
    for at, (shape, name) in enumerate(row["inputs"]):
        dtype = dtype_of(name)
        if dtype.kind in "iu":
            values = generator.integers(1, 8, shape)
            arrays.append((values * generator.choice((-1, 1), shape) if dtype.kind == "i" else values).astype(dtype))
            continue
        values = generator.uniform(0.25, 1.0, shape) * generator.choice((-1.0, 1.0), shape)
        if at in weights:
            values /= math.sqrt(_depth(row, at, shape))
        arrays.append(values.astype(dtype))
    return arrays


def _depth(row: Mapping[str, Any], at: int, shape: Sequence[int]) -> int:
    """Of the sums that a weight is in."""
    if len(shape) == 4:
        return math.prod(shape[1:])
    is_transposed = row["attributes"].get("transpose_b" if at == 1 else "transpose_b1", False)
    return shape[-1] if is_transposed else shape[-2]


def expected_of(row: Mapping[str, Any], arrays: Sequence[Array], place: Any) -> Array:
    """The row in float64, before its output is rounded. `place`: see `places.py`."""
    told: Mapping[str, Any] = row["attributes"]
    if row["op"] == "attention":
        return _attend(told, arrays)
    if "_" not in row["op"]:
        result = _operator(row["op"], arrays[0], arrays[1], told, place)
        return _finish(row["epilogue"], result, arrays, row["output"][0], place)
    op = row["op"].split("_")[0]
    first = _operator(op, arrays[0], arrays[1], told, place)
    first = _finish(told["epilogue0"], first, arrays, first.shape, place).astype(dtype_of(told["intermediate"]))
    plain = {"strides": [1, 1], "padding": [0] * 4, "transpose_b": told.get("transpose_b1", False)}
    return _finish(row["epilogue"], _operator(op, first, arrays[2], plain, place), arrays, row["output"][0], place)


def _operator(op: str, one: Array, two: Array, told: Mapping[str, Any], place: Any) -> Array:
    if op == "conv2d":
        found: Array = place.convolve(one, two, told)
        return found
    product: Array = place.multiply(one, np.swapaxes(two, -1, -2) if told.get("transpose_b") else two)
    return product


def _finish(steps: Sequence[Any], result: Array, arrays: Sequence[Array], shape: Sequence[int], place: Any) -> Array:
    """`steps` as a workload's fields have them: (operation, [(kind, position or constant)])."""
    values = [result]
    for op, operands in steps:
        if op == "column_sum":
            rows: Array = values[-1].reshape(math.prod(shape) // shape[-1], -1, shape[-1])
            sums: Array = rows.sum(axis=1)
            return sums.reshape(tuple(shape))
        read = []
        for kind, told in operands:
            if kind == "value":
                read.append(values[told])
            else:
                read.append(told if kind == "constant" else arrays[told].astype(np.float64))
        values.append(place.erf_gelu(read[0]) if op == "gelu" else _STEPS[op](*read))
    return values[-1]


def _attend(told: Mapping[str, Any], arrays: Sequence[Array]) -> Array:
    """softmax(Q K^T scale + mask) V; `layouts` tell dimensions by letters."""
    queries, keys, values = (
        np.einsum(f"{layout}->bhsd", array.astype(np.float64))
        for layout, array in zip(told["layouts"], arrays[:3], strict=True)
    )
    scores = queries @ np.swapaxes(keys, -1, -2) * told["scale"]
    if told["masked"]:
        scores = scores + arrays[3].astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = np.einsum(f"bhsd->{told['output_layout']}", weights / weights.sum(-1, keepdims=True) @ values)
    return found


_STEPS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "multiply": np.multiply,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leakyrelu": lambda x, slope: np.where(x > 0, x, slope * x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "softplus": lambda x: np.logaddexp(x, 0),
}
