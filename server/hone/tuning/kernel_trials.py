"""Kernels that took a tuning process along: who was being tried when it died, and who is tried no more.

A kernel under trial is noted in a file that its process holds locked. A note whose lock is free is that of a dead one:
the kernel gets a strike, and with the second it is blocked for this kind of device. A kernel that was seen to break the
device is blocked at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hone.kernels import KernelsCache

_log = logging.getLogger(__name__)

_FOLDER = ".trials"
_CAUSE = "crash"
_MAX_DEATHS = 2


class KernelTrials:
    """The blocklist of one kind of device, and this process's note. `scope` is the digest of the device key."""

    def __init__(self, cache: KernelsCache, scope: str) -> None:
        """Settles what dead processes left. Raises OSError where no note can be kept."""
        self._cache = cache
        self._scope = scope
        folder = cache.path / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._settle(folder)
        self._descriptor, path = tempfile.mkstemp(dir=folder)
        self._path = Path(path)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def blocked(self, digest: str) -> str | None:
        """Why a kernel is not to be run on this kind of device; None where it may be."""
        return self._cache.quarantined(digest, self._scope)

    def block(self, digest: str, reason: str) -> None:
        self._cache.quarantine(digest, self._scope, reason, cause=_CAUSE)

    @contextmanager
    def trying(self, digest: str) -> Iterator[None]:
        """While inside, the end of this process counts against the kernel."""
        os.pwrite(self._descriptor, f"{self._scope} {digest}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._descriptor)

    def _settle(self, folder: Path) -> None:
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                note = os.pread(descriptor, 1024, 0).decode("ascii", "replace").split()
                if len(note) == 2 and note[0] == self._scope:
                    record = self._cache.strike(
                        note[1], self._scope, _CAUSE, "a process that measured it died", limit=_MAX_DEATHS
                    )
                    told = "and is tried no more" if record.reason else "and gets another trial"
                    _log.warning("kernel %s was being measured when its process died, %s", note[1][:12], told)
                if not note or note[0] == self._scope:
                    path.unlink(missing_ok=True)
            except BlockingIOError:
                pass  # somebody's who lives
            finally:
                os.close(descriptor)
