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
#: The programs that nvcc is made of.
_PARTS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "gcc", "g++", "cc1plus", "as", "ld"})


@contextmanager
def compiler_slot(
    num_gib: float, *, patience_seconds: float = _PATIENCE_SECONDS, free: Callable[[], float] = free_gib
) -> Iterator[int]:
    """While held, this is one of at most two compilers of this user, and `num_gib` are its own: they were free when it
    began, beside what the other compiler has been given and may not have taken yet.

    Gives the slot's descriptor, which the compiler should inherit. Slots are file locks in the user's own temporary
    folder: they are free when all that hold the descriptor have ended. Raises BuildFailed when the memory does not get
    free.
    """
    folder = _folder()
    deadline = time.monotonic() + patience_seconds
    door = _opened(folder / "door")
    try:
        descriptor = None
        while descriptor is None:
            # Who waits for a slot keeps the door meanwhile, so that none who comes later is before him; who waits for
            # memory does not, since another may need less.
            if _locked(door):
                descriptor, is_full = _take(folder, num_gib, free)
                if not is_full:
                    fcntl.flock(door, fcntl.LOCK_UN)
            if descriptor is None:
                if time.monotonic() > deadline:
                    told = f"waited {patience_seconds:.0f} s for a compiler's turn and {num_gib:.1f} GiB"
                    raise BuildFailed("a CUTLASS kernel", MemoryError(f"{told}; {free():.1f} are free"))
                time.sleep(_POLL_SECONDS)
    finally:
        os.close(door)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(folder: Path, num_gib: float, free: Callable[[], float]) -> tuple[int | None, bool]:
    """A slot, if there are one and the memory, and whether all are taken. To be asked by one process at a time, so that
    no memory is given twice."""
    promised, taken = 0.0, None
    for number in range(NUM_SLOTS):
        descriptor = _opened(folder / f"slot{number}")
        if not _locked(descriptor):
            promised += _outstanding(descriptor)
        elif taken is None:
            taken = descriptor
            continue
        os.close(descriptor)
    if taken is None:
        return None, True
    if free() < num_gib + promised + _RESERVE_GIB:
        os.close(taken)
        return None, False
    os.ftruncate(taken, 0)
    os.pwrite(taken, str(num_gib).encode(), 0)
    return taken, False


def _locked(descriptor: int) -> bool:
    """Whether the lock is this descriptor's, now or already."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _outstanding(descriptor: int) -> float:
    """Of what a running compiler was given, the GiB that it has not taken yet."""
    told = os.pread(descriptor, 64, 0).decode("ascii", errors="replace")
    try:
        given = float(told)
    except ValueError:
        return 0.0  # it holds the slot, and has been given nothing yet
    return max(0.0, given - resident_gib(os.fstat(descriptor)))


def resident_gib(slot: os.stat_result) -> float:
    """What the compilers that inherited a slot's file have in memory. The process that runs them holds the file too,
    and has memory for other things: compilers are told from it by the names of their programs."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() not in _PARTS:
                continue
            if any(os.path.samestat(held.stat(), slot) for held in (process / "fd").iterdir()):
                total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            continue  # it has ended meanwhile, or is another user's
    return total / (1 << 30)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _folder() -> Path:
    """A folder of this user alone. Raises BuildFailed where another owns the name."""
    folder = Path(tempfile.gettempdir()) / f"hone-compilers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise BuildFailed("a CUTLASS kernel", PermissionError(f"{folder} belongs to another user: remove it"))
    return folder
