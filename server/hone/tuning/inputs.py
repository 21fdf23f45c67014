"""Inputs made up for a model, within what its graph allows: what to draw from, and the drawing.

What to draw from (`Domain`) is derived from the graph where the ONNX package is at hand, in the child; drawing needs
numpy alone, so that the server can draw the very same inputs later, from what an artifact's manifest says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.types import NUMPY_DTYPES, Array, Shape


@dataclass(frozen=True, slots=True)
class Domain:
    """What one input may hold: numbers from `low` to `high`, both included for integers.

    `normal` draws floats from a normal distribution around the middle instead, cut off nowhere.
    """

    datatype: str
    shape: Shape
    low: float
    high: float
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "datatype": self.datatype,
            "shape": list(self.shape),
            "low": self.low,
            "high": self.high,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Domain:
        """Raises KeyError, TypeError or ValueError for what no domain is."""
        datatype = told["datatype"]
        if datatype not in NUMPY_DTYPES:
            raise ValueError(f"datatype: expected one of the protocol's, found '{datatype}'")
        shape = tuple(int(dim) for dim in told["shape"])
        return cls(datatype, shape, float(told["low"]), float(told["high"]), str(told.get("why", "")))


Domains = Mapping[str, Domain]


@dataclass(frozen=True, slots=True)
class InputSet:
    """Arrays for every input of one execution, under a name for messages."""

    name: str
    arrays: dict[str, Array]


def draw(domains: Domains, seed: int) -> InputSet:
    """The same arrays for the same seed, on every machine. Sets differ in kind too: floats are spread evenly over
    their domain in even sets, and bunched around its middle in odd ones. Floats are never exactly 0."""
    generator = np.random.default_rng([0x686F6E65, seed])
    return InputSet(
        f"synthetic inputs {seed}",
        {name: _draw_one(domain, generator, bunched=seed % 2 == 1) for name, domain in sorted(domains.items())},
    )


def draw_many(domains: Domains, num: int, first_seed: int = 0) -> list[InputSet]:
    return [draw(domains, seed) for seed in range(first_seed, first_seed + num)]


def rotation(domains: Domains, *, cache_bytes: int, max_bytes: int = 1 << 28, first_seed: int = 100) -> list[InputSet]:
    """Enough sets to rotate through that they do not all stay in a cache of this size, within `max_bytes`."""
    set_bytes = max(1, sum(_num_bytes(domain) for domain in domains.values()))
    wanted = min(2 * cache_bytes // set_bytes + 1, max_bytes // set_bytes, _MAX_ROTATION)
    return draw_many(domains, max(_MIN_ROTATION, int(wanted)), first_seed)


_MIN_ROTATION, _MAX_ROTATION = 3, 16


def narrower(domains: Domains) -> list[dict[str, Domain]]:
    """Domains to try in turn where a model refuses what was drawn: integers closer and closer to 0."""
    tries = []
    for high in (1.0, 0.0):
        tries.append(
            {
                name: Domain(d.datatype, d.shape, max(d.low, 0.0), min(d.high, high), f"{d.why}, narrowed")
                if d.datatype.startswith(("INT", "UINT"))
                else d
                for name, d in domains.items()
            }
        )
    return tries


def pad_rows(arrays: Mapping[str, Array], num_rows: int) -> dict[str, Array]:
    """The same rows with the last one repeated behind them, `num_rows` in all: how serving fills a larger batch."""
    padded = {}
    for name, array in arrays.items():
        larger = np.empty((num_rows, *array.shape[1:]), array.dtype)
        larger[: array.shape[0]] = array
        larger[array.shape[0] :] = array[-1]
        padded[name] = larger
    return padded


def first_rows(arrays: Sequence[Array], num_rows: int) -> list[Array]:
    return [array[:num_rows] for array in arrays]


def _draw_one(domain: Domain, generator: np.random.Generator, *, bunched: bool) -> Array:
    dtype = NUMPY_DTYPES[domain.datatype]
    if domain.datatype == "BOOL":
        return np.asarray(generator.integers(int(domain.low), int(domain.high), domain.shape, endpoint=True), dtype)
    if domain.datatype.startswith(("INT", "UINT")):
        whole = generator.integers(int(domain.low), int(domain.high), domain.shape, dtype=np.int64, endpoint=True)
        return np.asarray(whole, dtype)
    spread = domain.high - domain.low
    if bunched:
        numbers = np.clip(
            generator.normal((domain.low + domain.high) / 2, spread / 6, domain.shape), domain.low, domain.high
        )
    else:
        numbers = generator.uniform(domain.low, domain.high, domain.shape)
    array = np.array(numbers, dtype)  # for a shape without dimensions the generator gives a number, and no array
    array[array == 0] = dtype.type(max(abs(domain.low), abs(domain.high)) / 2)
    return array


def _num_bytes(domain: Domain) -> int:
    return int(np.prod(domain.shape, dtype=np.int64)) * NUMPY_DTYPES[domain.datatype].itemsize


def aligned_copy(array: Array, alignment: int = 64) -> Array:
    """A copy whose first item is at a multiple of `alignment` bytes."""
    memory = np.empty(array.nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
