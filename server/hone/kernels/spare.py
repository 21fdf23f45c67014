"""A private temporary folder for what the cache cannot keep: a full or read-only disk then costs memory of it alone.

It lives as long as its server. A server that is killed leaves it behind, and the next one removes it: a file in it is
locked by its living owner, and the system lets go of the locks of the dead.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "hone-kernels-"
_ALIVE = ".alive"
#: What an artifact with its kernels takes, and some room to work.
MIN_FREE_BYTES = 64 << 20


class SpareFolder:
    """Made at once, with nothing in it; `close` removes it with all that it holds then."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, places: Iterable[Path] = ()) -> SpareFolder | None:
        """In the first of the places (by default the system's temporary folder, then memory) that has room and lets
        libraries be loaded from it; None, with a warning, where there is none. Sweeps what the dead left there."""
        tried = []
        for place in places or (Path(tempfile.gettempdir()), Path("/dev/shm")):
            sweep(place)
            problem = why_not(place)
            if not problem:
                try:
                    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
                    lock = os.open(path / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                except OSError as failure:
                    problem = failure.strerror or str(failure)
                else:
                    with suppress(OSError):  # a file system without locks: then its folders are not swept either
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(path, lock)
            tried.append(f"{place}: {problem}")
        logger.warning(
            "no temporary folder for tuned modules, should the kernels cache fail (%s); set TMPDIR", "; ".join(tried)
        )
        return None

    def close(self) -> None:
        """Libraries that are loaded from it stay so: their files live on without a name."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def why_not(place: Path) -> str:
    """Why modules cannot be kept in this folder; empty where they can."""
    try:
        status = os.statvfs(place)
    except OSError as problem:
        return problem.strerror or str(problem)
    if status.f_flag & os.ST_RDONLY or not os.access(place, os.W_OK | os.X_OK):
        return "not writable"
    if status.f_flag & os.ST_NOEXEC:
        return "nothing may be run from it (mounted noexec)"
    if not has_room(place):
        return f"less than {MIN_FREE_BYTES >> 20} MiB free"
    return ""


def has_room(place: Path, num_bytes: int = MIN_FREE_BYTES) -> bool:
    """Whether so many bytes are free there, as far as the system tells."""
    try:
        status = os.statvfs(place)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= num_bytes


def sweep(place: Path) -> int:
    """Removes what this user's dead servers left; how many folders."""
    num_swept = 0
    try:
        found = list(place.glob(f"{PREFIX}*"))
    except OSError:
        return 0
    for path in found:
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(path / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone, or just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its server lives
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            num_swept += not path.exists()
        finally:
            os.close(lock)
    return num_swept
