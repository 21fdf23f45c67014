"""Remembers over a crash what was on probation: a death by a fault while a fresh generation served is held against it.

Each server has three files here, named by a number of its own: a lock that it holds while it lives, a list of the
artifacts on probation, and the note that faulthandler writes into when the process dies of a fault (SIGSEGV, SIGILL,
SIGBUS, SIGFPE, SIGABRT). Files whose lock nobody holds tell of a server that died; one that stopped as it should took
its files away.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)

_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Death:
    """A server that ended without saying so, and which artifacts (digest, scope) it had on probation then."""

    artifacts: tuple[tuple[str, str], ...]
    fault: str
    """First line of faulthandler's note; empty for a death without one (SIGKILL, power loss)."""


class Probation:
    """This server's files, and those that dead servers left. Belongs to one thread, but for `fault_note`.

    What cannot be written only weakens the memory: a warning, once, and serving goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = secrets.token_hex(8)
        self._lock: BinaryIO | None = None
        self._artifacts: dict[tuple[str, str], None] = {}
        self._told = False
        self.fault_note: BinaryIO | None = None
        """For `faulthandler.enable`; None where it cannot be written."""

    def open(self) -> list[Death]:
        """Begin this server's own files, and take away those of servers that died; tells of them."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._path(self._name, "lock").open("xb")
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._lock = lock
            self.fault_note = self._path(self._name, "fault").open("xb", buffering=0)
        except OSError as problem:
            self._tell(problem)
        deaths = []
        for name in self._dead():
            death = self._read(name)
            if death.artifacts:
                deaths.append(death)
            self._remove(name)
        return deaths

    def begin(self, artifact: str, scope: str) -> None:
        """On disk when this returns: the artifact serves only after."""
        self._artifacts[artifact, scope] = None
        self._write()

    def end(self, artifact: str, scope: str) -> None:
        """It passed, or no longer serves."""
        if self._artifacts.pop((artifact, scope), self) is None:
            self._write()

    def close(self) -> None:
        """A stop as it should be ends every probation, neither passed nor failed."""
        self._artifacts.clear()
        if self._lock is not None:
            self._remove(self._name)
            self._lock.close()
            self._lock = None
        if self.fault_note is not None:
            self.fault_note.close()
            self.fault_note = None

    def _write(self) -> None:
        if self._lock is None:
            return
        path = self._path(self._name, "json")
        staged = path.with_suffix(".tmp")
        try:
            with staged.open("wb") as file:
                file.write(json.dumps(list(self._artifacts)).encode())
                file.flush()
                os.fsync(file.fileno())
            staged.replace(path)
        except OSError as problem:
            self._tell(problem)

    def _dead(self) -> Iterator[str]:
        """Names of servers whose lock is free; held until the next is asked for, so that only one takes them."""
        with suppress(OSError):
            for path in sorted(self._folder.glob("*.lock")):
                if path.stem == self._name:
                    continue
                try:
                    with path.open("rb") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        if path.exists():
                            yield path.stem
                except OSError:
                    continue  # alive, or gone meanwhile

    def _read(self, name: str) -> Death:
        artifacts: list[tuple[str, str]] = []
        with suppress(OSError, ValueError, TypeError):
            told = json.loads(self._path(name, "json").read_bytes())
            artifacts = [(str(artifact), str(scope)) for artifact, scope in told]
        fault = ""
        with suppress(OSError), self._path(name, "fault").open("rb") as file:
            note = file.read(_MAX_NOTE_BYTES).decode("utf-8", "replace").strip()
            fault = note.splitlines()[0] if note else ""
            if note:
                _log.error("a server that ran before died of a fault:\n%s", note)
        return Death(tuple(artifacts), fault)

    def _remove(self, name: str) -> None:
        for kind in ("json", "tmp", "fault", "lock"):
            with suppress(OSError):
                self._path(name, kind).unlink()

    def _path(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"

    def _tell(self, problem: OSError) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "cannot remember in %s what is on probation (%s): a crash will not be held against it",
                self._folder,
                problem.strerror or problem,
            )
