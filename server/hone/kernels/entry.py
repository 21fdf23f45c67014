"""What the cache holds and answers with: names of entries, entries, and the reasons why there is none."""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from hone.kernels.digest import is_digest
from hone.kernels.files import NotPrivate

#: Changes whenever the form of what is on disk does; part of the folder's name and of every key.
SCHEMA = 1

Kind: TypeAlias = Literal["kernels", "decisions", "artifacts", "constants"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Names directly in `v<schema>/` that are not those of devices.
RESERVED = frozenset({"kernels", "constants", "decisions", "artifacts", "locks", "quarantine", "clock"})

_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")

MANIFEST = "manifest.json"
#: Inside an entry, beside the files of its manifest: this very folder passed the gate, or was made, here.
PROVEN = ".proven"
#: Inside a staging folder: locked for as long as its writer lives.
STAGING_LOCK = ".lock"


class MissReason(enum.StrEnum):
    """Why there is no entry to use."""

    ABSENT = "absent"
    INCOMPLETE = "incomplete"
    """A file, or the manifest, is missing."""
    CORRUPT = "corrupt"
    """Contents are not what the manifest says, or the manifest is not one."""
    FOREIGN = "foreign"
    """Someone else's, or writable by others, or a link: never used, never touched."""
    SCHEMA = "schema"
    """Written by another version of hone."""
    UNREADABLE = "unreadable"
    """The system would not let it be read now (too many open files, a disk error); the entry stays."""


class FailureReason(enum.StrEnum):
    """Why nothing was published."""

    FULL = "full"
    READ_ONLY = "read-only"
    FOREIGN = "foreign"
    """At its place is something that hone may not touch."""
    TOO_LARGE = "too-large"
    """Larger than the whole cache may be."""
    ERROR = "error"


class EntryName(NamedTuple):
    """Where an entry is: `scope` is the architecture of kernels, the device key's digest of decisions and artifacts,
    and empty for constants."""

    kind: Kind
    scope: str
    digest: str

    @property
    def relative(self) -> Path:
        """The entry's folder inside `v<schema>/`."""
        if self.kind == "kernels":
            return Path("kernels", self.scope, self.digest)
        if self.kind == "constants":
            return Path("constants", self.digest)
        return Path(self.scope, self.kind, self.digest)

    def __str__(self) -> str:
        return str(self.relative)


def entry_name(kind: Kind, digest: str, scope: str) -> EntryName:
    """Raises ValueError: names come from code, so a wrong one is a mistake there."""
    if kind not in KINDS:
        raise ValueError(f"kind '{kind}' is unknown, expected one of {', '.join(KINDS)}")
    if not is_digest(digest):
        raise ValueError(f"'{digest}' is no digest, expected 64 hexadecimal digits")
    check_scope(kind, scope)
    return EntryName(kind, scope, digest)


def check_scope(kind: Kind, scope: str) -> None:
    """Raises ValueError."""
    if kind == "constants":
        if scope:
            raise ValueError(f"constants have no scope, got '{scope}'")
    elif not _SCOPE.fullmatch(scope) or scope in RESERVED:
        what = "an architecture" if kind == "kernels" else "the digest of a device key"
        raise ValueError(f"'{scope}' is no scope of {kind}, expected {what}")


def check_file_name(name: str) -> None:
    """Raises ValueError unless an entry may have a file of this name: entries are flat."""
    if name == MANIFEST or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"'{name}' cannot be a file of an entry, expected a plain name (letters, digits, '._+-')")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose files were just found to be what its manifest says."""

    kind: Kind
    scope: str
    digest: str
    path: Path
    files: Mapping[str, Path]
    manifest: Mapping[str, Any]
    """What the publisher said of it."""
    created: str
    """UTC, ISO 8601."""
    size_bytes: int
    proven: bool
    """Made here, or passed the whole gate here; False for what was imported or copied into the folder."""
    inode: int
    """Of its manifest: tells this entry from a later one at the same place."""

    @property
    def name(self) -> EntryName:
        return EntryName(self.kind, self.scope, self.digest)


@dataclass(frozen=True, slots=True)
class Miss:
    """There is no usable entry. False where an entry is true."""

    reason: MissReason
    detail: str = ""

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Failure:
    """Nothing was published; the server works on without. False where an entry is true."""

    reason: FailureReason
    detail: str = ""

    def __bool__(self) -> bool:
        return False


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def failure_of(problem: OSError) -> Failure:
    where = f"{problem.filename}: " if problem.filename else ""
    detail = f"{where}{problem.strerror or type(problem).__name__}"
    if isinstance(problem, NotPrivate):
        return Failure(FailureReason.FOREIGN, detail)
    if problem.errno in _FULL:
        return Failure(FailureReason.FULL, detail)
    if problem.errno in _READ_ONLY:
        return Failure(FailureReason.READ_ONLY, detail)
    return Failure(FailureReason.ERROR, detail)
