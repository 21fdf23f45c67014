"""A model version's slot: which generation runs a request, and when an old one may be closed.

A generation is one engine as loaded here, the baseline or an artifact. Executions hold a lease on the generation they
run; a retired generation closes when its last lease ends. The lock guards fields only: nothing is loaded, warmed,
run or closed under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hone.types import Engine


class Generation:
    """One loaded engine with the count of its users."""

    __slots__ = ("_leases", "_lock", "_on_idle", "_retired", "engine", "number")

    def __init__(self, number: int, engine: Engine) -> None:
        self.number = number
        self.engine = engine
        self._lock = threading.Lock()
        self._leases = 0
        self._retired = False
        self._on_idle: Callable[[], None] | None = None

    def acquire(self) -> None:
        with self._lock:
            self._leases += 1

    def release(self) -> None:
        with self._lock:
            self._leases -= 1
            close = self._retired and self._leases == 0
            on_idle = self._on_idle
        if close and on_idle is not None:
            on_idle()

    def retire(self, on_idle: Callable[[], None]) -> None:
        """Call `on_idle` once nobody uses the generation: now, or from the thread that ends the last lease."""
        with self._lock:
            self._retired = True
            self._on_idle = on_idle
            idle = self._leases == 0
        if idle:
            on_idle()


class Slot:
    """The generations of one model version; for now the baseline alone."""

    __slots__ = ("baseline",)

    def __init__(self, baseline: Engine) -> None:
        self.baseline = Generation(0, baseline)

    def acquire(self) -> Generation:
        """Lease the generation that runs the next execution; the caller releases it."""
        generation = self.baseline
        generation.acquire()
        return generation

    def close(self) -> None:
        self.baseline.retire(self.baseline.engine.close)
