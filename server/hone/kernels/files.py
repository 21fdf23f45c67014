"""File work that lasts: private modes, everything synced before a name says it is there, no links followed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_WRITE = 0o022
_CHUNK_BYTES = 1 << 20


class NotPrivate(OSError):
    """Someone else owns or may write it, or it is a link, pipe or device; `strerror` says which."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BufferedReader:
    """A regular file, open for reading, never a link followed nor a pipe waited for. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPrivate(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_private(path: Path) -> BufferedReader:
    """As `open_regular`, for files that must be this user's own. Raises NotPrivate, or another OSError."""
    try:
        file = open_regular(path)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise NotPrivate(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    try:
        check_private(os.fstat(file.fileno()), path)
    except NotPrivate:
        file.close()
        raise
    return file


def check_private(status: os.stat_result, path: Path) -> None:
    """Raises NotPrivate unless owned by this process's user and writable by no one else."""
    if status.st_uid != os.geteuid():
        raise NotPrivate(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", str(path))
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivate(errno.EPERM, f"can be written by others (mode {mode:04o})", str(path))


def make_folders(path: Path, below: Path) -> None:
    """Creates `path` and what is missing between it and `below` (which exists), private, each name synced."""
    missing = []
    while path != below and not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, source: bytes | Path | Iterable[bytes]) -> tuple[int, str]:
    """Writes a new file, synced; returns size and SHA-256 of what was written. Raises OSError (also if it exists)."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb", buffering=0) as target:
        for chunk in _chunks(source):
            digest.update(chunk)
            size += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[target.write(view) :]
        os.fsync(target.fileno())
    return size, digest.hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """A file that is either what it was or what is given, synced. Raises OSError, leaving nothing behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def remove_tree(path: Path) -> bool:
    """Removes a folder; False if something of it is still there (it is left to a later sweep)."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def reason_of(problem: OSError) -> str:
    """What the system says went wrong, without the path."""
    return problem.strerror or type(problem).__name__


def _chunks(source: bytes | Path | Iterable[bytes]) -> Iterator[bytes]:
    if isinstance(source, Path):
        with source.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    elif isinstance(source, bytes):
        yield source
    else:
        yield from source
