"""Artifacts that may not serve on a kind of device, and the strikes against those that still may."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hone.kernels.digest import is_digest
from hone.kernels.entry import SCHEMA
from hone.kernels.files import open_private, reason_of, replace_file
from hone.kernels.folder import CacheFolder

logger = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 1 << 20
_MAX_HISTORY = 32


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """What is held against one artifact on one kind of device."""

    digest: str
    scope: str
    reason: str | None = None
    """Why it may not serve; None while it may."""
    strikes: dict[str, int] = field(default_factory=dict)
    """By cause, such as "latency" or "death"."""
    history: tuple[dict[str, str], ...] = ()
    """The newest of what happened: at (UTC), cause, reason."""


class _Locking(Protocol):
    def __call__(self, name: str) -> AbstractContextManager[None]: ...


class Quarantine:
    """One small JSON file an artifact, in the device's folder, changed under a file lock. Thread-safe.

    What cannot be written (full disk, read-only folder) still holds in this process. A record that cannot be read
    keeps its artifact out: better no tuned module than one that was found wrong.
    """

    def __init__(self, folder: CacheFolder, lock: _Locking, on_unwritable: Any) -> None:
        self._folder = folder
        self._lock = lock
        self._on_unwritable = on_unwritable
        self._memory_lock = threading.Lock()
        self._memory: dict[tuple[str, str], QuarantineRecord] = {}

    def reason(self, digest: str, scope: str) -> str | None:
        """Why the artifact may not serve on this kind of device; None if it may."""
        return self.record(digest, scope).reason

    def record(self, digest: str, scope: str) -> QuarantineRecord:
        remembered = self._memory.get((scope, digest))
        return remembered if remembered is not None else self._read(digest, scope)

    def put(self, digest: str, scope: str, reason: str, cause: str = "quarantine") -> QuarantineRecord:
        """Keeps the artifact out from now on, also after a restart."""
        return self._change(digest, scope, cause, reason, limit=0)

    def strike(self, digest: str, scope: str, cause: str, reason: str, limit: int) -> QuarantineRecord:
        """One more strike of this cause; with the `limit`-th, the artifact is quarantined."""
        return self._change(digest, scope, cause, reason, limit)

    def pardon(self, digest: str, scope: str) -> bool:
        """Forgets all that is held against the artifact; whether there was anything. Raises OSError."""
        with self._lock(f"quarantine-{scope}-{digest}"), self._memory_lock:
            remembered = self._memory.pop((scope, digest), None)
            try:
                self._path(digest, scope).unlink()
            except FileNotFoundError:
                return remembered is not None
            return True

    def records(self, scope: str) -> Iterator[QuarantineRecord]:
        """All records of one kind of device."""
        folder = self._folder.path / scope / "quarantine"
        names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
        in_memory = {digest for at, digest in list(self._memory) if at == scope}
        for digest in sorted({name for name in names if is_digest(name)} | in_memory):
            yield self.record(digest, scope)

    def _change(self, digest: str, scope: str, cause: str, reason: str, limit: int) -> QuarantineRecord:
        with self._lock(f"quarantine-{scope}-{digest}"), self._memory_lock:
            old = self.record(digest, scope)
            strikes = dict(old.strikes)
            if limit:
                strikes[cause] = strikes.get(cause, 0) + 1
            out = not limit or strikes[cause] >= limit
            new = QuarantineRecord(
                digest,
                scope,
                old.reason or (reason if out else None),
                strikes,
                (*old.history, {"at": _now(), "cause": cause, "reason": reason})[-_MAX_HISTORY:],
            )
            path = self._path(digest, scope)
            try:
                self._folder.make(path.parent)
                replace_file(path, _compose(new))
                self._memory.pop((scope, digest), None)
            except OSError as problem:
                self._memory[scope, digest] = new
                self._on_unwritable(problem)
            return new

    def _read(self, digest: str, scope: str) -> QuarantineRecord:
        path = self._path(digest, scope)
        try:
            with open_private(path) as file:
                body = json.loads(file.read(_MAX_RECORD_BYTES))
            return _parse(body, digest, scope)
        except FileNotFoundError:
            return QuarantineRecord(digest, scope)
        except OSError as problem:
            told = reason_of(problem)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            told = str(problem) or type(problem).__name__
        reason = f"its quarantine record cannot be read ({told}); remove {path} to try the artifact again"
        return QuarantineRecord(digest, scope, reason)

    def _path(self, digest: str, scope: str) -> Path:
        return self._folder.path / scope / "quarantine" / f"{digest}.json"


def _compose(record: QuarantineRecord) -> bytes:
    body = {
        "schema": SCHEMA,
        "digest": record.digest,
        "scope": record.scope,
        "reason": record.reason,
        "strikes": record.strikes,
        "history": list(record.history),
    }
    return f"{json.dumps(body, indent=2)}\n".encode()


def _parse(body: Any, digest: str, scope: str) -> QuarantineRecord:
    if body["schema"] != SCHEMA or (body["digest"], body["scope"]) != (digest, scope):
        raise ValueError("it is of another artifact or schema")
    reason, strikes, history = body["reason"], body["strikes"], body["history"]
    if reason is not None and not isinstance(reason, str):
        raise ValueError("reason is neither text nor null")
    counts = {str(cause): count for cause, count in strikes.items()}
    if not all(type(count) is int and count > 0 for count in counts.values()):
        raise ValueError("strikes are not counts")
    return QuarantineRecord(digest, scope, reason, counts, tuple(dict(event) for event in history))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
