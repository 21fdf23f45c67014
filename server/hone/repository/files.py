"""Rules about files that every part of the repository follows: names to ignore, paths that may not escape, limits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: What names end in that are never models, versions or parts of one: left by editors and copy tools.
_TEMPORARY_SUFFIXES = (".tmp", "~", ".part", ".swp")

#: Made by file systems.
_FOREIGN_NAMES = frozenset({"lost+found"})

_MAX_COMPONENT = 255
_MAX_DEPTH = 16


class FileTooLarge(OSError):
    """A file that ought to be small is not; `strerror` says how large it may be."""


def is_ignored(name: str) -> bool:
    """Whether a file or folder of this name, hidden or temporary, is passed over wherever it lies."""
    return name.startswith(".") or name.endswith(_TEMPORARY_SUFFIXES) or name in _FOREIGN_NAMES


def relative_path(text: str) -> Path:
    """A path inside some folder, from text that a user or client wrote. Raises ValueError with the reason."""
    if not text:
        raise ValueError("the path is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the path is not valid Unicode") from None
    if "\0" in text:
        raise ValueError("the path contains a null byte")
    if text.startswith("/"):
        raise ValueError("the path is absolute, expected one relative to the model's folder")
    parts = text.split("/")
    if len(parts) > _MAX_DEPTH:
        raise ValueError(f"the path has {len(parts)} parts, expected at most {_MAX_DEPTH}")
    for part in parts:
        if part == "..":
            raise ValueError("the path must stay within the model's folder, found '..'")
        if part in ("", "."):
            raise ValueError("the path has an empty part or '.', expected plain names between '/'")
        if len(part.encode("utf-8")) > _MAX_COMPONENT:
            raise ValueError(f"the path has a part of more than {_MAX_COMPONENT} bytes")
        if is_ignored(part):
            raise ValueError(f"'{part}' is a hidden or temporary name, which this server ignores")
    return Path(*parts)


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, open for reading. Raises OSError; a pipe or device is refused, never waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def read_limited(path: Path, limit: int) -> bytes:
    """The whole of a small file. Raises FileTooLarge, or another OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FileTooLarge(0, f"larger than the {limit} bytes allowed")
    return data


def reason_of(problem: OSError) -> str:
    """What the system says went wrong, without the path."""
    return problem.strerror or type(problem).__name__
