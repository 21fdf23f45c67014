"""One model on several devices: an engine for each, of which a thread runs its own device's."""

from __future__ import annotations

from collections.abc import Mapping

from hone.specialization import DEVICE_ORDINAL
from hone.types import Engine, EngineInstance


class PlacedEngine:
    """Engines by the ordinal of their device; they are the same model, so that any tells its inputs and outputs."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        if not engines:
            raise ValueError("expected an engine for one device or more")
        self._engines = dict(engines)
        self.first_ordinal, first = next(iter(self._engines.items()))
        self.first = first
        self.kind = first.kind
        self.is_steady = False
        self.inputs, self.outputs, self.initializers = first.inputs, first.outputs, first.initializers

    def instantiate(self) -> EngineInstance:
        """On the calling thread's device; on the first where it has none here."""
        return self._engines.get(DEVICE_ORDINAL.get(), self.first).instantiate()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
