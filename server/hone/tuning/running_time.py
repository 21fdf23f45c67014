"""The seconds that a tuning child has run, as its parent counts them (without those in which it was paused or waited
for a processor), in memory that both share: what the child goes by is what ends it.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

_NUM_BYTES = 8


class RunningTime:
    """The parent's side: it tells, and `descriptor` is for the child. The constructor raises OSError."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hone-running-time")
        try:
            os.ftruncate(self.descriptor, _NUM_BYTES)
            self._memory = mmap.mmap(self.descriptor, _NUM_BYTES)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._seconds = memoryview(self._memory).cast("d")

    def tell(self, seconds: float) -> None:
        self._seconds[0] = seconds

    def close(self) -> None:
        self._seconds.release()
        self._memory.close()
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class RunningTimeView:
    """The child's side. Keeps its mapping as long as it lives."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _NUM_BYTES, prot=mmap.PROT_READ)
        self._seconds = memoryview(self._memory).cast("d")

    def read(self) -> float:
        return self._seconds[0]
