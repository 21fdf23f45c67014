"""Signatures: what a specialization is made for, which are worth one, and how live traffic is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.specialization import Signature
from hone.types import NUMPY_DTYPES, TensorSpec


def batch_buckets(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the largest batch itself."""
    buckets = []
    size = 1
    while size < max_batch_size:
        buckets.append(size)
        size *= 2
    return [*buckets, max_batch_size] if max_batch_size > 0 else []


def wanted_signatures(
    inputs: Sequence[TensorSpec], max_batch_size: int, *, named: Iterable[Signature] = ()
) -> list[Signature]:
    """What the model and its configuration ask specializations for, the surest first. `named` are those that the
    configuration names (its warm-up samples included); see `seen_signatures`."""
    fixed = _fixed_signature(inputs, batching=max_batch_size > 0)
    return seen_signatures([*([fixed] if fixed is not None else []), *named], max_batch_size)


def seen_signatures(seen: Iterable[Signature], max_batch_size: int) -> list[Signature]:
    """What executions of these signatures ask specializations for, in their order.

    A batching model gets every batch bucket of each shape that is known behind the batch axis. Shapes without items are
    left to the baseline, and so are datatypes that are none of numpy's.
    """
    wanted: dict[Signature, None] = {}
    for base in seen:
        if any(tensor.datatype not in NUMPY_DTYPES for tensor in base.tensors):
            continue
        if max_batch_size <= 0:
            wanted[base] = None
        else:
            wanted.update(dict.fromkeys(base.with_rows(rows) for rows in batch_buckets(max_batch_size)))
    return [signature for signature in wanted if not _is_empty(signature)]


def _is_empty(signature: Signature) -> bool:
    """Whether it has a tensor without items: there is nothing to be gained, and compilers divide by such sizes."""
    return any(0 in tensor.shape for tensor in signature.tensors)


def _fixed_signature(inputs: Sequence[TensorSpec], *, batching: bool) -> Signature | None:
    """The signature that the graph itself fixes, but for the batch axis; None where other axes vary."""
    shapes = []
    for spec in inputs:
        shape = (1, *spec.shape[1:]) if batching else spec.shape
        if -1 in shape or (batching and not spec.shape):
            return None
        shapes.append((spec.name, spec.datatype, shape))
    return Signature.of(shapes) if shapes else None


def values_of(
    buckets: Iterable[Signature], shares: Mapping[Signature, float], *, batching: bool
) -> dict[Signature, float]:
    """What each specialization is worth: the sum of the shares of live signatures that it would run. Those are its own
    and, where the model batches, smaller batches that no smaller bucket holds."""
    values = dict.fromkeys(buckets, 0.0)
    for live, share in shares.items():
        if live in values:
            values[live] += share
        elif batching:
            holding = [bucket for bucket in values if bucket.rows > live.rows and bucket.with_rows(live.rows) == live]
            if holding:
                values[min(holding, key=lambda bucket: bucket.rows)] += share
    return values


class SpaceSaving:
    """The most frequent keys of a stream in fixed memory.

    A key that is not counted takes the place of the least frequent one and inherits its count, as an upper bound of
    its own: every key that makes up more than 1/capacity of the stream is among those kept, and no count is too low
    (Metwally, Agrawal and El Abbadi, "Efficient Computation of Frequent and Top-k Elements in Data Streams", 2005).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: expected 1 or more, found {capacity}")
        self._capacity = capacity
        # key -> [count, how much of it may be others', sum of what came with it since it was counted here]
        self._counts: dict[Any, list[float]] = {}
        self.total = self.total_value = 0.0

    def add(self, key: Any, weight: float = 1.0, value: float = 0.0) -> None:
        """Count a key; the values that come with a key are summed up."""
        self.total += weight
        self.total_value += value
        counted = self._counts.get(key)
        if counted is not None:
            counted[0] += weight
            counted[2] += value
        elif len(self._counts) < self._capacity:
            self._counts[key] = [weight, 0.0, value]
        else:
            least = min(self._counts, key=lambda kept: self._counts[kept][0])
            inherited = self._counts.pop(least)[0]
            self._counts[key] = [inherited + weight, inherited, value]

    def frequent(self, min_share: float) -> list[tuple[Any, float]]:
        """Keys that surely make up at least this share of the stream, the most frequent first, with that sure share."""
        if not self.total:
            return []
        sure = ((key, (count - error) / self.total) for key, (count, error, _) in self._counts.items())
        return sorted((pair for pair in sure if pair[1] >= min_share), key=lambda pair: -pair[1])

    def counts(self) -> dict[Any, float]:
        """How often each key that is counted came for sure, since it was counted here."""
        return {key: count - error for key, (count, error, _) in self._counts.items()}

    def halve(self) -> None:
        """Let what came so far count half as much as what comes; shares stay as they are."""
        for counted in self._counts.values():
            counted[:] = [number / 2 for number in counted]
        self.total /= 2
        self.total_value /= 2

    def sums(self) -> dict[Any, float]:
        """The sum of the values of each key that is counted."""
        return {key: counted[2] for key, counted in self._counts.items()}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._counts)


class Traffic:
    """What serving tells of executions: signatures by how often they came, and time by model.

    What came of late counts: after every `span` executions of a model those before count half as much. `ran` is called
    by executor threads, once an execution: a lock of its own, held for a microsecond.
    """

    def __init__(self, *, capacity: int = 64, max_models: int = 4096, span: int = 20_000) -> None:
        self._span = span
        self._capacity = capacity
        self._max_models = max_models
        self._lock = threading.Lock()
        self._models: dict[tuple[str, int], _ModelTraffic] = {}
        self._total_seconds = 0.0

    def ran(self, model: str, version: int, signature: Signature, seconds: float) -> None:
        """One execution of this signature (batch size included) took so long in the engine."""
        with self._lock:
            counted = self._models.get((model, version))
            if counted is None:
                if len(self._models) >= self._max_models:
                    return
                counted = self._models[model, version] = _ModelTraffic(SpaceSaving(self._capacity))
            counted.signatures.add(signature, value=seconds)
            counted.num_since_halved += 1
            if counted.num_since_halved >= self._span:
                counted.num_since_halved = 0
                counted.signatures.halve()
            counted.seconds += seconds
            self._total_seconds += seconds

    def forget(self, model: str, version: int) -> None:
        with self._lock:
            gone = self._models.pop((model, version), None)
            if gone is not None:
                self._total_seconds -= gone.seconds

    def time_share(self, model: str, version: int) -> float:
        """Share of all engine time that went into this version."""
        with self._lock:
            counted = self._models.get((model, version))
            if counted is None or self._total_seconds <= 0:
                return 0.0
            return counted.seconds / self._total_seconds

    def shares(self, model: str, version: int) -> dict[Signature, float]:
        """Share of all engine time that went into each of a version's frequent signatures."""
        with self._lock:
            counted = self._models.get((model, version))
            if counted is None or self._total_seconds <= 0:
                return {}
            signatures = counted.signatures
            scale = counted.seconds / self._total_seconds / signatures.total_value if signatures.total_value else 0.0
            return {key: seconds * scale for key, seconds in signatures.sums().items()}

    def counts(self, model: str, version: int) -> dict[Signature, float]:
        """Executions of late of each signature that is counted, as far as they are sure."""
        with self._lock:
            counted = self._models.get((model, version))
            return counted.signatures.counts() if counted is not None else {}

    def frequent(self, model: str, version: int, *, min_share: float = 0.02, min_count: int = 20) -> list[Signature]:
        """Signatures seen often enough to be worth a specialization, the most frequent first."""
        with self._lock:
            counted = self._models.get((model, version))
            if counted is None:
                return []
            total = counted.signatures.total
            return [key for key, share in counted.signatures.frequent(min_share) if share * total >= min_count - 0.5]


@dataclass(slots=True)
class _ModelTraffic:
    signatures: SpaceSaving
    seconds: float = 0.0
    num_since_halved: int = 0
