"""Export and import: entries as a tar file, which carries them to other machines.

Its first member is `hone-cache.json`; then, entry by entry, the files as they lie in the cache, manifest first.
What comes in was made by someone else: all of it is checked before any of it is taken, and what is code only on trust.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hone import __version__
from hone.errors import ErrorKind, HoneError
from hone.kernels.digest import is_digest
from hone.kernels.entry import (
    KINDS,
    MANIFEST,
    SCHEMA,
    Entry,
    EntryName,
    Failure,
    FailureReason,
    Miss,
    MissReason,
    entry_name,
)
from hone.kernels.files import FILE_MODE, open_regular, sync_folder, write_new
from hone.kernels.folder import CacheFolder, names_in
from hone.kernels.holds import Holds
from hone.kernels.manifest import MAX_MANIFEST_BYTES, BadManifest, FileRecord, Manifest, parse, read_entry
from hone.kernels.staging import Publisher
from hone.kernels.tar_reader import BadTar, Member, members

HEADER = "hone-cache.json"
_MAX_HEADER_BYTES = 1 << 16
_MAX_MEMBERS = 1_000_000
_MAX_DECISION_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20

#: Taken without trust: data that is only believed after measuring.
UNTRUSTED_KINDS = ("decisions",)


class ImportRefused(HoneError):
    """Nothing was taken from this file; the text says why."""

    kind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"cannot import {path}: {reason}; nothing was taken from it")


@dataclass(frozen=True, slots=True)
class ImportReport:
    num_imported: dict[str, int]
    """By kind."""
    num_present: int
    """Were in the cache already; those stay as they are."""
    num_untrusted: dict[str, int]
    """Left out, by kind, because binaries were not to be trusted."""
    failures: tuple[tuple[EntryName, Failure], ...]


@dataclass(slots=True)
class _Incoming:
    name: EntryName
    members: dict[str, Member] = field(default_factory=dict)
    manifest: Manifest | None = None


def export_entries(folder: CacheFolder, holds: Holds, path: Path) -> tuple[int, tuple[tuple[EntryName, Miss], ...]]:
    """Writes all sound entries; how many, and the others. Each is held meanwhile. Raises OSError."""
    num_exported, problems = 0, []
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                header = {"format": "hone kernels cache", "schema": SCHEMA, "hone": __version__}
                _add(tar, HEADER, f"{json.dumps(header, indent=2)}\n".encode())
                for name in sorted(names_in(folder)):
                    entry = _export_entry(tar, folder, holds, name)
                    if isinstance(entry, Entry):
                        num_exported += 1
                    elif entry.reason is not MissReason.ABSENT:
                        problems.append((name, entry))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
    return num_exported, tuple(problems)


def _export_entry(tar: tarfile.TarFile, folder: CacheFolder, holds: Holds, name: EntryName) -> Entry | Miss:
    path = folder.place_of(name)
    inode = holds.acquire(path)
    try:
        entry = read_entry(path, name)
        if isinstance(entry, Entry):
            _add(tar, f"{name}/{MANIFEST}", (path / MANIFEST).read_bytes())
            for file_name, source in entry.files.items():
                with open_regular(source) as file:
                    tar.addfile(_header(f"{name}/{file_name}", os.fstat(file.fileno()).st_size), file)
        return entry
    finally:
        if inode is not None:
            holds.release(path, inode)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_header(name, len(data)), io.BytesIO(data))


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode = size, FILE_MODE
    return header


def import_entries(
    folder: CacheFolder, publisher: Publisher, path: Path, limit_bytes: int | None, trust_binaries: bool
) -> ImportReport:
    """Takes entries over, none of them proven here. Raises ImportRefused, OSError."""
    imported: dict[str, int] = {}
    untrusted: dict[str, int] = {}
    num_present, failures = 0, []
    with open_regular(path.resolve(strict=True)) as file:
        try:
            incoming = _check(file)
        except BadTar as problem:
            raise ImportRefused(path, str(problem)) from None
        wanted = [item for item in incoming if trust_binaries or item.name.kind in UNTRUSTED_KINDS]
        for item in incoming:
            if not trust_binaries and item.name.kind not in UNTRUSTED_KINDS:
                untrusted[item.name.kind] = untrusted.get(item.name.kind, 0) + 1
        _check_sizes(path, wanted, limit_bytes)
        for item in wanted:
            if isinstance(read_entry(folder.place_of(item.name), item.name), Entry):
                num_present += 1
                continue
            entry, ours = _take(file, publisher, item)
            if isinstance(entry, Failure):
                failures.append((item.name, entry))
            elif ours:
                imported[item.name.kind] = imported.get(item.name.kind, 0) + 1
            else:
                num_present += 1
    return ImportReport(imported, num_present, untrusted, tuple(failures))


def _check(file: BinaryIO) -> list[_Incoming]:
    """Every entry of the file, all names, sizes and hashes found right. Raises BadTar."""
    found: dict[EntryName, _Incoming] = {}
    first = True
    for member in members(file, _MAX_MEMBERS):
        if first:
            _check_header(file, member)
            first = False
            continue
        name, file_name = _split(member.name)
        item = found.setdefault(name, _Incoming(name))
        if file_name in item.members:
            raise BadTar(f"member '{member.name}' is there twice")
        item.members[file_name] = member
    if first:
        raise BadTar(f"it has no {HEADER}")
    for item in found.values():
        _check_entry(file, item)
    return list(found.values())


def _check_header(file: BinaryIO, member: Member) -> None:
    if member.name != HEADER or member.size > _MAX_HEADER_BYTES:
        raise BadTar(f"its first member is '{member.name}', expected {HEADER}: it was not made by 'hone cache export'")
    try:
        schema = json.loads(_content(file, member))["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadTar(f"member '{HEADER}': schema: cannot be read") from None
    if schema != SCHEMA:
        raise BadTar(f"member '{HEADER}': schema is {schema!r}, this version of hone reads {SCHEMA}")


def _split(member: str) -> tuple[EntryName, str]:
    """Entry and file that a member's name stands for, which must be exactly as hone writes them. Raises BadTar."""
    parts = member.split("/")
    try:
        match parts:
            case ["kernels", scope, digest, file_name]:
                name = entry_name("kernels", digest, scope)
            case ["constants", digest, file_name]:
                name = entry_name("constants", digest, "")
            case [scope, ("decisions" | "artifacts") as kind, digest, file_name] if is_digest(digest):
                name = entry_name(next(known for known in KINDS if known == kind), digest, scope)
            case _:
                raise ValueError("expected an entry's file, such as kernels/<architecture>/<digest>/manifest.json")
    except ValueError as problem:
        raise BadTar(f"member '{member}': {problem}") from None
    return name, file_name


def _check_entry(file: BinaryIO, item: _Incoming) -> None:
    written = item.members.pop(MANIFEST, None)
    if written is None:
        raise BadTar(f"entry '{item.name}' has no {MANIFEST}")
    if written.size > MAX_MANIFEST_BYTES:
        raise BadTar(f"member '{written.name}' has {written.size} bytes, expected at most {MAX_MANIFEST_BYTES}")
    try:
        item.manifest = parse(_content(file, written), item.name)
    except BadManifest as problem:
        raise BadTar(f"entry '{item.name}': {problem}") from None
    if set(item.members) != set(item.manifest.files):
        odd = sorted(set(item.members) ^ set(item.manifest.files))[0]
        raise BadTar(f"entry '{item.name}': file '{odd}' is in only one of the manifest and the export")
    for file_name, record in item.manifest.files.items():
        member = item.members[file_name]
        if member.size != record.size or _hash(file, member) != record.sha256:
            raise BadTar(f"member '{member.name}' is not what its entry's manifest says (size or SHA-256)")
    item.members[MANIFEST] = written


def _check_sizes(path: Path, wanted: list[_Incoming], limit_bytes: int | None) -> None:
    total = sum(member.size for item in wanted for member in item.members.values())
    if limit_bytes is not None and total > limit_bytes:
        raise ImportRefused(path, f"its entries have {total} bytes, the whole cache may have {limit_bytes}")
    for item in wanted:
        size = sum(member.size for member in item.members.values())
        if item.name.kind in UNTRUSTED_KINDS and size > _MAX_DECISION_BYTES:
            raise ImportRefused(path, f"entry '{item.name}' has {size} bytes, a decision at most {_MAX_DECISION_BYTES}")


def _take(file: BinaryIO, publisher: Publisher, item: _Incoming) -> tuple[Entry | Failure, bool]:
    """Writes one entry, hashing again what is written: the file may have changed since it was checked."""
    if item.manifest is None:
        raise RuntimeError(f"{item.name} was not checked")
    with publisher.stage(item.name) as staged:
        for file_name, member in item.members.items():
            size, sha256 = write_new(staged / file_name, _chunks(file, member))
            expected = item.manifest.files.get(file_name)
            if expected is not None and expected != FileRecord(size, sha256):
                return Failure(FailureReason.ERROR, f"member '{member.name}' changed while it was read"), False
        return publisher.install(staged, item.name, proven=False)


def _hash(file: BinaryIO, member: Member) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(file, member):
        digest.update(chunk)
    return digest.hexdigest()


def _content(file: BinaryIO, member: Member) -> bytes:
    return b"".join(_chunks(file, member))


def _chunks(file: BinaryIO, member: Member) -> Iterator[bytes]:
    file.seek(member.offset)
    left = member.size
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise BadTar(f"member '{member.name}' was cut off")
        left -= len(chunk)
        yield chunk
