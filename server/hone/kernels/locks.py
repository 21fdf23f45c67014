"""Locks among processes: one file each, so that a thing is built once on a folder that several servers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hone.errors import Unavailable
from hone.kernels.folder import CacheFolder
from hone.kernels.staging import STALE_SECONDS


class CacheBusy(Unavailable):
    """Another process has been building the same thing for longer than this one would wait."""

    def __init__(self, what: str) -> None:
        super().__init__(f"kernels cache: {what} is being built by another process")


class CacheLocks:
    """Named locks; the system lets go of them when a process dies, so none is ever stale. Not reentrant.

    In a folder that cannot be written, or has no locks, they do nothing: at worst a thing is built twice.
    """

    def __init__(self, folder: CacheFolder, on_problem: Callable[[OSError], None]) -> None:
        self._folder = folder
        self._on_problem = on_problem

    @contextmanager
    def held(
        self, name: str, *, timeout_seconds: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Raises CacheBusy after `timeout_seconds` (None waits for ever), or once `cancelled()`."""
        lock = None
        try:
            lock = _file_lock(self._folder.make(self._folder.locks) / f"{name}.lock")
            lock.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds, cancel_check=cancelled)
        except Timeout:
            raise CacheBusy(name) from None
        except (OSError, NotImplementedError) as problem:
            self._on_problem(problem if isinstance(problem, OSError) else OSError(0, str(problem)))
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def sweep(self) -> int:
        """Removes old lock files that nobody holds. Who waits for one notices that it is gone, and makes another."""
        num_swept = 0
        for path in self._folder.locks.glob("*.lock") if self._folder.locks.is_dir() else ():
            try:
                if abs(time.time() - path.stat().st_mtime) > STALE_SECONDS:
                    with _file_lock(path).acquire(timeout=0):
                        path.unlink()
                    num_swept += 1
            except (OSError, NotImplementedError, Timeout):
                continue
        return num_swept


def _file_lock(path: Path) -> FileLock:
    return FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
