"""What a model's folder holds, as one hash: cheap to ask again, and never fooled by a preserved modification time.

Two looks at a file are the same when path, size, modification and change time, inode and device are; only then is its
digest taken from the cache. The change time cannot be set by a program, so an overwrite in place that restores size
and modification time is still seen.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hone.repository.files import is_ignored, open_regular

MAX_FILES = 10_000
_MAX_DEPTH = 32

#: File systems stamp times with the kernel's tick (4 to 10 ms; 2 s on FAT). A file changed less than this before it
#: was hashed could change again under the same stamp, so its digest is not kept.
_SETTLED_NS = 2_000_000_000


class TooManyFiles(OSError):
    """A model's folder holds more than anyone would put there, for instance through a link to the root."""


class FileEntry(NamedTuple):
    """One file of a model, by its path inside the model's folder, and what tells its content from earlier ones."""

    relative: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def list_files(folder: Path) -> tuple[FileEntry, ...]:
    """Every regular file below a folder, sorted, links followed, ignored names left out. Raises OSError.

    A link to a folder that is already being listed is passed over; a dangling link is as good as no file.
    """
    found: list[FileEntry] = []
    status = folder.stat()
    _list_into(found, str(folder), "", {(status.st_dev, status.st_ino)})
    found.sort(key=lambda entry: entry.relative)
    return tuple(found)


def _list_into(found: list[FileEntry], folder: str, prefix: str, above: set[tuple[int, int]]) -> None:
    if len(above) > _MAX_DEPTH:
        raise TooManyFiles(0, f"folders are nested more than {_MAX_DEPTH} deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ignored(entry.name):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # a dangling link, or gone since the folder was opened
                continue
            relative = prefix + entry.name
            if stat.S_ISDIR(status.st_mode):
                identity = (status.st_dev, status.st_ino)
                if identity not in above:
                    _list_into(found, entry.path, relative + "/", above | {identity})
            elif stat.S_ISREG(status.st_mode):
                if len(found) == MAX_FILES:
                    raise TooManyFiles(0, f"more than {MAX_FILES} files")
                found.append(
                    FileEntry(
                        relative,
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                        status.st_ino,
                        status.st_dev,
                    )
                )


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises OSError."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Fingerprints:
    """Digests of files, remembered for as long as the files look the same.

    Safe to use from several threads: each step is one look-up or one assignment, and doing work twice is harmless.
    """

    def __init__(
        self, *, hash_file: Callable[[Path], str] = hash_file, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._hash_file = hash_file
        self._now_ns = now_ns
        self._digests: dict[tuple[str, FileEntry], str] = {}

    def of(self, folder: Path, files: Sequence[FileEntry], prefix: str = "") -> str:
        """One hash over contents and names, less `prefix`, of `files` that `list_files(folder)` returned.

        Raises OSError.
        """
        total = hashlib.sha256()
        for entry in files:
            total.update(
                os.fsencode(entry.relative.removeprefix(prefix)) + b"\0" + self._digest(folder, entry).encode()
            )
        return total.hexdigest()

    def keep_only(self, listings: Iterable[tuple[Path, Sequence[FileEntry]]]) -> None:
        """Forget the files that are in none of the listings, once there are more digests than files."""
        listings = list(listings)
        if len(self._digests) <= sum(len(files) for _, files in listings):
            return
        wanted = {(str(folder), entry) for folder, files in listings for entry in files}
        for key in [key for key in list(self._digests) if key not in wanted]:
            self._digests.pop(key, None)

    def _digest(self, folder: Path, entry: FileEntry) -> str:
        key = (str(folder), entry)
        known = self._digests.get(key)
        if known is not None:
            return known
        started_ns = self._now_ns()
        digest = self._hash_file(folder / entry.relative)
        if started_ns - max(entry.ctime_ns, entry.mtime_ns) > _SETTLED_NS:
            self._digests[key] = digest
        return digest
