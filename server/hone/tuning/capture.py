"""Live requests kept as inputs for the gate, of models that allow it. In memory only, and few of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hone.specialization import VersionRef
from hone.tuning.inputs import InputSet
from hone.types import Array

_MAX_SETS = 4
_MAX_BYTES = 64 << 20
_INTERVAL_SECONDS = 5.0


class Capture:
    """The newest few executions of each version that is allowed. `wants` and `add` are called by executor threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[VersionRef, deque[InputSet]] = {}
        self._next: dict[VersionRef, float] = {}
        self._num_taken = 0

    def allow(self, ref: VersionRef, allowed: bool) -> None:
        """Begin or end keeping requests of a version; what was kept goes with the permission."""
        if allowed:
            self._kept.setdefault(ref, deque(maxlen=_MAX_SETS))
        else:
            self._kept.pop(ref, None)
            self._next.pop(ref, None)

    def wants(self, ref: VersionRef) -> bool:
        return ref in self._kept and self._clock() >= self._next.get(ref, 0.0)

    def add(self, ref: VersionRef, inputs: Mapping[str, Array]) -> None:
        """The arrays are the capture's own from here on."""
        kept = self._kept.get(ref)
        if kept is None or sum(array.nbytes for array in inputs.values()) > _MAX_BYTES // _MAX_SETS:
            return
        self._next[ref] = self._clock() + _INTERVAL_SECONDS
        self._num_taken += 1
        kept.append(InputSet(f"captured request {self._num_taken}", dict(inputs)))

    def samples(self, ref: VersionRef) -> Sequence[InputSet]:
        return list(self._kept.get(ref, ()))
