"""Which specialization each thread runs at this moment, in memory that outlives the process.

A cell is two numbers: the thread's identity and the mark of what it runs, 0 for nothing that is tuned. The cells are a
file mapped into memory: what was written into it is there after a crash (not after the machine's own). Writing a mark
costs a tenth of a microsecond.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.specialization import Cells

_NUM_CELLS = 1024
_WORD_BYTES = 8
_NUM_BYTES = _NUM_CELLS * 2 * _WORD_BYTES


class RunningBoard:
    """See `specialization.RunningMarks`. Threads may claim cells from the start; marks last over a crash from `attach`
    on, which comes before anything tuned serves."""

    def __init__(self) -> None:
        self._first_cells = [0] * (2 * _NUM_CELLS)
        self.cells: Cells = self._first_cells
        self._lock = threading.Lock()
        # The last cell is for threads beyond the others: it is claimed any number of times, and never read.
        self._free = list(range(2 * _NUM_CELLS - 3, 0, -2))
        self._spare = 2 * _NUM_CELLS - 1

    def claim(self) -> int:
        with self._lock:
            if not self._free:
                return self._spare
            cell = self._free.pop()
            self.cells[cell - 1] = threading.get_ident()
            self.cells[cell] = 0
            return cell

    def release(self, cell: int) -> None:
        if cell == self._spare:
            return
        with self._lock:
            self.cells[cell - 1] = self.cells[cell] = 0
            self._free.append(cell)

    @contextmanager
    def running(self, mark: int) -> Iterator[None]:
        """Note that the calling thread runs the specialization of this mark, where it has no cell of its own."""
        cell = self.claim()
        self.cells[cell] = mark
        try:
            yield
        finally:
            self.release(cell)

    def attach(self, path: Path) -> None:
        """Keep the cells in a new file from now on. Raises OSError."""
        with path.open("x+b") as file:
            try:
                # Without room behind it, the first write into the mapping would be a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, _NUM_BYTES)
            except OSError:
                path.unlink()
                raise
            memory = mmap.mmap(file.fileno(), _NUM_BYTES)
        with self._lock:
            cells = memoryview(memory).cast("Q")  # keeps the mapping open
            for i, word in enumerate(self._first_cells):
                cells[i] = word
            self.cells = cells


def read_running(path: Path) -> dict[int, int]:
    """Thread -> mark, of the threads that ran something tuned when the file's process ended. Empty where the file is
    not to be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    if len(data) != _NUM_BYTES:
        return {}
    words = memoryview(data).cast("Q")
    return {words[i]: words[i + 1] for i in range(0, 2 * _NUM_CELLS - 2, 2) if words[i + 1]}
