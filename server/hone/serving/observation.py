"""What one served version tells of its executions, to whoever listens; nothing where nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.serving.slot import RouteKey
from hone.specialization import Observers, Signature, VersionRef
from hone.types import Array

_MAX_SIGNATURES = 256


class Observation:
    """The observers, with the version they are told about. Methods are called on executor threads."""

    def __init__(
        self,
        ref: VersionRef,
        inputs: Sequence[tuple[str, str]] = (),
        *,
        batching: bool = False,
        observers: Observers = Observers(),  # noqa: B008 (frozen, and empty)
    ) -> None:
        """`inputs` are names and datatypes in the model's order, as route keys have them."""
        self._ref = ref
        self._inputs = tuple(inputs)
        self._batching = batching
        self._watcher = observers.watcher
        self._traffic = observers.traffic
        self._signatures: dict[tuple[RouteKey, int], Signature] = {}

    def ran(self, key: RouteKey, rows: int, duration_ns: int) -> None:
        if self._traffic is not None:
            self._traffic.ran(self._ref.model, self._ref.version, self._signature(key, rows), duration_ns / 1e9)

    def failed(self, generation: int, problem: Exception) -> None:
        if self._watcher is not None:
            self._watcher.failed(self._ref, generation, str(problem) or type(problem).__name__)

    def declined(self, generation: int) -> None:
        if self._watcher is not None:
            self._watcher.declined(self._ref, generation)

    def sample(
        self, generation: int, rows: int | None, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        """Hand copies to the watcher if it wants them; `rows` of the batch are real, None where there is none."""
        if self._watcher is None or not self._watcher.wants_sample(self._ref, generation):
            return
        self._watcher.sampled(
            self._ref,
            generation,
            {name: array[:rows].copy() if rows is not None else array.copy() for name, array in inputs.items()},
            {name: array[:rows].copy() if rows is not None else array.copy() for name, array in outputs.items()},
        )

    def _signature(self, key: RouteKey, rows: int) -> Signature:
        known = self._signatures.get((key, rows))
        if known is None:
            prefix = (rows,) if self._batching else ()
            known = Signature.of(
                (name, datatype, prefix + shape)
                for (name, datatype), shape in zip(self._inputs, key, strict=True)
                if shape is not None
            )
            if len(self._signatures) < _MAX_SIGNATURES:
                self._signatures[key, rows] = known
        return known
