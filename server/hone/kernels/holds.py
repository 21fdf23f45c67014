"""Pins on what is loaded: shared file locks on manifests, which the system lets go of when a process dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.kernels.entry import MANIFEST
from hone.kernels.files import reason_of

logger = logging.getLogger(__name__)

#: An evictor that was stopped in the middle must not stop others for longer.
_PATIENCE_SECONDS = 1.0
_POLL_SECONDS = 0.002
#: A file system without locks (some network ones) says so in one of these ways.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Holds:
    """Entries held by this process, each with one descriptor and a count. Thread-safe.

    Where the file system has no locks, holding works within this process only, and nothing is evicted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Path, int], tuple[int, int]] = {}
        self._told = False

    def acquire(self, path: Path, inode: int | None = None) -> int | None:
        """Holds the entry whose folder is `path`; returns its manifest's inode, to be given to `release`.

        None if there is no such entry (any more), or, with `inode`, another one. Raises OSError when the system will
        not open one more file.
        """
        try:
            descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        keep = False
        try:
            found = os.fstat(descriptor).st_ino
            if inode is not None and found != inode:
                return None
            with self._lock:
                held = self._held.get((path, found))
                if held is not None:
                    self._held[path, found] = (held[0], held[1] + 1)
                    return found
            if not self._share(descriptor, path / MANIFEST, found):
                return None
            with self._lock:
                held = self._held.get((path, found))
                if held is not None:  # another thread was faster
                    self._held[path, found] = (held[0], held[1] + 1)
                    return found
                self._held[path, found] = (descriptor, 1)
                keep = True
            return found
        finally:
            if not keep:
                os.close(descriptor)

    def release(self, path: Path, inode: int) -> None:
        """Raises KeyError if it is not held."""
        with self._lock:
            descriptor, count = self._held[path, inode]
            if count > 1:
                self._held[path, inode] = (descriptor, count - 1)
                return
            del self._held[path, inode]
        os.close(descriptor)

    def release_all(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for descriptor, _ in held.values():
            os.close(descriptor)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def is_held_here(self, path: Path) -> bool:
        with self._lock:
            return any(held == path for held, _ in self._held)

    @contextmanager
    def exclusively(self, path: Path) -> Iterator[int | None]:
        """For removing: the manifest's inode while no process holds the entry and none can; None while one does."""
        if self.is_held_here(path):
            yield None
            return
        try:
            descriptor = os.open(path / MANIFEST, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            yield self._own(descriptor, path)
        finally:
            os.close(descriptor)

    def _own(self, descriptor: int, path: Path) -> int | None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise
            self._tell(problem)
            return None
        inode = os.fstat(descriptor).st_ino
        return inode if _is_at(path / MANIFEST, inode) else None

    def _share(self, descriptor: int, manifest: Path, inode: int) -> bool:
        """False if the entry is being removed. An evictor that only looks is waited for: it is done at once."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _is_at(manifest, inode) or time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
                continue
            except OSError as problem:
                if problem.errno not in _NO_LOCKS:
                    raise
                self._tell(problem)
            return _is_at(manifest, inode)

    def _tell(self, problem: OSError) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "kernels cache: its file system has no file locks (%s): nothing in it is evicted", reason_of(problem)
            )


def _is_at(path: Path, inode: int) -> bool:
    try:
        return path.lstat().st_ino == inode
    except OSError:
        return False
