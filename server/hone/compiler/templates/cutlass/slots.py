"""Two compilers at once on a machine at most, and never more memory than is free: a killed compiler helps nobody."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.compiler.build import BuildFailed
from hone.kernels.memory import free_gib

NUM_SLOTS = 2
#: What stays free beside a compiler.
_RESERVE_GIB = 0.5
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 600.0


@contextmanager
def compiler_slot(
    num_gib: float, *, patience_seconds: float = _PATIENCE_SECONDS, free: Callable[[], float] = free_gib
) -> Iterator[None]:
    """While held, this is one of at most two compilers of this user, and `num_gib` were free when it began.

    Slots are file locks in the user's own temporary folder: the death of their holder frees them. Raises BuildFailed
    when the memory does not get free.
    """
    folder = _folder()
    deadline = time.monotonic() + patience_seconds
    while True:
        for number in range(NUM_SLOTS):
            descriptor = os.open(folder / f"slot{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            try:
                if free() >= num_gib + _RESERVE_GIB:
                    yield
                    return
            finally:
                os.close(descriptor)
            break
        if time.monotonic() > deadline:
            told = f"waited {patience_seconds:.0f} s for a compiler's turn and {num_gib:.1f} GiB; {free():.1f} are free"
            raise BuildFailed("a CUTLASS kernel", MemoryError(told))
        time.sleep(_POLL_SECONDS)


def _folder() -> Path:
    """A folder of this user alone. Raises BuildFailed where another owns the name."""
    folder = Path(tempfile.gettempdir()) / f"hone-compilers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise BuildFailed("a CUTLASS kernel", PermissionError(f"{folder} belongs to another user: remove it"))
    return folder
