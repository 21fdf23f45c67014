"""When entries were last used: stamps that only grow, whatever the machine's clock does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hone.kernels.files import FILE_MODE

#: A stamp after this (the year 2116) is a mistake, and would leave no room for later ones.
_LATEST_NS = 1 << 62


class LogicalClock:
    """Stamps files with a time that is now, or one tick after the last stamp any process gave, whichever is later.

    The last stamp is the modification time of one file in the cache, so a clock set back does not make what is used
    next look older than what was used before. (After a jump forwards and back, stamps stay in that future; their order
    is right.) Two processes that stamp in the same moment may give the same stamp, which does no harm.
    """

    def __init__(self, path: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns

    def stamp(self, path: Path) -> None:
        """Marks a file as used. Raises OSError."""
        stamp = self.next()
        os.utime(path, ns=(stamp, stamp), follow_symlinks=False)

    def touch(self, path: Path) -> None:
        """The same where it can be done; a read-only cache keeps no stamps, and evicts nothing either."""
        with suppress(OSError):
            self.stamp(path)

    def next(self) -> int:
        """Raises OSError."""
        try:
            last = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE))
            last = 0
        stamp = max(self._now_ns(), last + 1 if last < _LATEST_NS else 0)
        os.utime(self._path, ns=(stamp, stamp))
        return stamp
