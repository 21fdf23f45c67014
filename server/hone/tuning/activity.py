"""How busy serving is, as the tuning child sees it: two counters in memory that server and child share.

The server counts executions when they begin and when they end. A child that reads the same numbers before and after a
measurement, with none in between, knows that it had the machine to itself. The memory is anonymous (no file is left
behind) and reaches the child as an inherited descriptor.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_NUM_BYTES = 16
_STARTED, _FINISHED = 0, 1


@dataclass(frozen=True, slots=True)
class Activity:
    """Executions begun and ended since the server's start."""

    num_started: int
    num_finished: int

    @property
    def num_in_flight(self) -> int:
        return max(0, self.num_started - self.num_finished)


class ActivityView:
    """Reads the counters of a board. Closes its own mapping, not the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _NUM_BYTES, prot=mmap.PROT_READ)
        self._counters = memoryview(self._memory).cast("Q")

    def read(self) -> Activity:
        # Finished first: an execution that ends in between is then counted as in flight, which only errs on the side
        # of "busy".
        finished = self._counters[_FINISHED]
        return Activity(self._counters[_STARTED], finished)

    def close(self) -> None:
        self._counters.release()
        self._memory.close()


class ActivityBoard:
    """The server's side. `started` and `finished` are called on one thread (the event loop), and cost about 0.1 µs."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hone-activity")
        os.ftruncate(self.descriptor, _NUM_BYTES)
        self._memory = mmap.mmap(self.descriptor, _NUM_BYTES)
        self._counters = memoryview(self._memory).cast("Q")

    def started(self) -> None:
        self._counters[_STARTED] += 1

    def finished(self) -> None:
        self._counters[_FINISHED] += 1

    def read(self) -> Activity:
        finished = self._counters[_FINISHED]
        return Activity(self._counters[_STARTED], finished)

    def close(self) -> None:
        self._counters.release()
        self._memory.close()
        os.close(self.descriptor)
