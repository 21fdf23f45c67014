"""An entry's `manifest.json`: writing it, and finding out whether an entry is what it says."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.kernels.digest import JSON, canonical_json, digest_of, digest_of_bytes, is_digest
from hone.kernels.entry import MANIFEST, PROVEN, SCHEMA, Entry, EntryName, Miss, MissReason, check_file_name
from hone.kernels.files import NotPrivate, check_private, open_private, reason_of

#: No manifest is larger; more is not read.
MAX_MANIFEST_BYTES = 16 << 20
MAX_FILES = 10_000


class BadManifest(Exception):
    """`reason` is CORRUPT or SCHEMA; the text says what was expected and found."""

    def __init__(self, reason: MissReason, text: str) -> None:
        self.reason = reason
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class FileRecord:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    name: EntryName
    created: str
    files: Mapping[str, FileRecord]
    content: Mapping[str, Any]


def compose(name: EntryName, files: Mapping[str, FileRecord], content: Mapping[str, JSON]) -> bytes:
    """The manifest's bytes. Raises TypeError or ValueError where `content` is not JSON or has another entry's `key`.

    `content["key"]`, where given, must be the very fields that the entry's digest was made of.
    """
    _check_key(name, content)
    body: dict[str, Any] = {
        "schema": SCHEMA,
        **name._asdict(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {path: {"size": file.size, "sha256": file.sha256} for path, file in sorted(files.items())},
        "content": content,
    }
    body["seal"] = digest_of_bytes(canonical_json(body))
    text = json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False)
    return f"{text}\n".encode("ascii")


def parse(data: bytes, name: EntryName | None = None) -> Manifest:
    """The manifest, known to be whole and (where given) of the entry of this name. Raises BadManifest."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BadManifest(MissReason.CORRUPT, f"manifest.json is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as problem:
        raise BadManifest(MissReason.CORRUPT, f"manifest.json is not JSON: {problem}") from None
    if body.get("schema") != SCHEMA:
        raise BadManifest(MissReason.SCHEMA, f"manifest.json has schema {body.get('schema')!r}, expected {SCHEMA}")
    seal = body.pop("seal", None)
    try:
        if seal != digest_of_bytes(canonical_json(body)):
            raise ValueError("seal does not fit the rest: the file was changed")
        found = EntryName(body["kind"], body["scope"], body["digest"])
        if name is not None and found != name:
            raise ValueError(f"it is of {found}")
        files = {path: _record(path, record) for path, record in body["files"].items()}
        content = body["content"]
        if not isinstance(content, dict) or not isinstance(body["created"], str) or len(files) > MAX_FILES:
            raise ValueError("created or content is not what it should be")
        _check_key(found, content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise BadManifest(MissReason.CORRUPT, f"manifest.json: {problem or type(problem).__name__}") from None
    return Manifest(found, body["created"], files, content)


def read_entry(path: Path, name: EntryName, *, rehash: bool = True) -> Entry | Miss:
    """The entry at `path`, if it is usable; never raises for one that is not.

    Every file's size and (with `rehash`) SHA-256 is compared, owner and mode of everything is checked, and no link is
    followed.
    """
    try:
        folder = path.lstat()
        if not stat.S_ISDIR(folder.st_mode):
            return Miss(MissReason.FOREIGN, f"{path}: not a folder")
        check_private(folder, path)
        with open_private(path / MANIFEST) as file:
            inode = os.fstat(file.fileno()).st_ino
            manifest = parse(file.read(MAX_MANIFEST_BYTES + 1), name)
        files = {}
        for file_name, record in manifest.files.items():
            files[file_name] = path / file_name
            problem = _difference(path / file_name, record, rehash)
            if problem:
                return Miss(MissReason.CORRUPT, f"{path / file_name}: {problem}")
        proven = is_proven(path)
    except (FileNotFoundError, NotADirectoryError) as problem:
        if not path.is_dir():
            return Miss(MissReason.ABSENT)
        return Miss(MissReason.INCOMPLETE, f"{problem.filename}: missing")
    except BadManifest as problem:
        return Miss(problem.reason, f"{path}: {problem}")
    except NotPrivate as problem:
        return Miss(MissReason.FOREIGN, f"{problem.filename}: {reason_of(problem)}")
    except OSError as problem:
        return Miss(MissReason.UNREADABLE, f"{problem.filename or path}: {reason_of(problem)}")
    size = sum(record.size for record in manifest.files.values())
    return Entry(*name, path, files, manifest.content, manifest.created, size, proven, inode)


def is_proven(path: Path) -> bool:
    """Whether the entry's folder is the one that was made or passed the gate here: a copy of it has another inode."""
    try:
        with open_private(path / PROVEN) as file:
            return file.read(64) == proof_of(path)
    except OSError:
        return False


def proof_of(path: Path) -> bytes:
    return f"{path.lstat().st_ino}\n".encode()


def _record(path: str, record: Mapping[str, Any]) -> FileRecord:
    check_file_name(path)
    size, sha256 = record["size"], record["sha256"]
    if type(size) is not int or size < 0 or not isinstance(sha256, str) or not is_digest(sha256):
        raise ValueError(f"files['{path}']: expected a size and a SHA-256")
    return FileRecord(size, sha256)


def _check_key(name: EntryName, content: Mapping[str, Any]) -> None:
    if "key" in content and digest_of(content["key"]) != name.digest:
        raise ValueError(f"the key in the manifest is not that of {name.digest}")


def _difference(path: Path, record: FileRecord, rehash: bool) -> str:
    """What differs between a file and its record; empty if nothing does. Raises OSError."""
    with open_private(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.size:
            return f"{size} bytes, expected {record.size}"
        if rehash and hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            return "SHA-256 differs from the manifest's"
    return ""
