"""Remembers over a crash what was on probation and what was running, so that the death is held against the right one.

Each server has files here, named by a number of its own: a lock that it holds while it lives, a list of the artifacts
that it serves, what its threads run at this moment (see `running`), and the note that faulthandler writes when the
process dies of a fault (SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT), with the thread that it died in. Files whose lock
nobody holds tell of a server that died; one that stopped as it should took its files away. A copy of such files, made
with the cache that they lie in, tells of nobody: the list names the files (by inode) that it belongs to.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hone.tuning.running import RunningBoard, read_running

_log = logging.getLogger(__name__)

_MAX_NOTE_BYTES = 1 << 16
_KINDS = ("json", "tmp", "fault", "running", "lock")
_LASTING = ("lock", "fault", "running")
_CURRENT_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)
#: faulthandler's words -> the signal.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Illegal instruction": "SIGILL",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Aborted": "SIGABRT",
}


@dataclass(frozen=True, slots=True)
class Served:
    """An artifact in service. `scope` is the digest of its device key, `name` is for people."""

    artifact: str
    scope: str
    name: str = ""
    on_probation: bool = True


@dataclass(frozen=True, slots=True)
class Death:
    """A server that ended without saying so."""

    fault: str = ""
    """The signal that it died of; empty for a death without a note (SIGKILL, power loss)."""
    blamed: tuple[Served, ...] = ()
    """What ran on the thread that died of the fault; where that was a thread of a library, all that ran."""
    others: tuple[Served, ...] = ()
    """What else was on probation."""


class Probation:
    """This server's files, and those that dead servers left. Belongs to one thread, but for `fault_note` and `board`.

    What cannot be written only weakens the memory: a warning, once, and serving goes on.
    """

    def __init__(self, folder: Path, board: RunningBoard | None = None) -> None:
        self._folder = folder
        self._name = secrets.token_hex(8)
        self._lock: BinaryIO | None = None
        self._served: dict[int, Served] = {}
        self._marks = itertools.count(1)
        self._told = False
        self.board = board or RunningBoard()
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
            self.board.attach(self._path(self._name, "running"))
        except OSError as problem:
            self._tell(problem)
        self._write()
        deaths = []
        for name in self._dead():
            death = self._read(name)
            if death.blamed or death.others:
                deaths.append(death)
            self._remove(name)
        return deaths

    def begin(self, served: Sequence[Served]) -> list[int]:
        """A mark for each, which threads note while they run it. On disk when this returns: load and run it after."""
        marks = [next(self._marks) for _ in served]
        self._served.update(zip(marks, served, strict=True))
        self._write()
        return marks

    def passed(self, mark: int) -> None:
        """Its probation is over; it goes on serving."""
        served = self._served.get(mark)
        if served is not None and served.on_probation:
            self._served[mark] = replace(served, on_probation=False)
            self._write()

    def end(self, mark: int) -> None:
        """It no longer serves."""
        if self._served.pop(mark, None) is not None:
            self._write()

    def close(self) -> None:
        """A stop as it should be ends every probation, neither passed nor failed."""
        self._served.clear()
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
            told = {
                "of": self._inodes(self._name),
                "served": {str(mark): asdict(served) for mark, served in self._served.items()},
            }
            with staged.open("wb") as file:
                file.write(json.dumps(told).encode())
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
        served: dict[int, Served] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            told = json.loads(self._path(name, "json").read_bytes())
            if told["of"] != self._inodes(name):
                _log.info("%s: notes in %s are copies of another place's, and say nothing here", name, self._folder)
                return Death()
            served = {int(mark): Served(**fields) for mark, fields in told["served"].items()}
        note = ""
        with suppress(OSError), self._path(name, "fault").open("rb") as file:
            note = file.read(_MAX_NOTE_BYTES).decode("utf-8", "replace").strip()
        if note:
            _log.error("a server that ran before died of a fault:\n%s", note)
        running = read_running(self._path(name, "running")) if note else {}
        thread = _thread_of(note)
        marks = {running[thread]} if thread in running else set() if thread is not None else set(running.values())
        blamed = tuple(served[mark] for mark in sorted(marks & served.keys()))
        others = tuple(one for mark, one in served.items() if mark not in marks and one.on_probation)
        return Death(_signal_of(note), blamed, others)

    def _remove(self, name: str) -> None:
        for kind in _KINDS:
            with suppress(OSError):
                self._path(name, kind).unlink()

    def _inodes(self, name: str) -> list[int]:
        """Of a server's files that are never replaced: a copy's are others. Raises OSError."""
        return [self._path(name, kind).stat().st_ino for kind in _LASTING if self._path(name, kind).exists()]

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


def _signal_of(note: str) -> str:
    """`Fatal Python error: Segmentation fault` and what else faulthandler writes first; empty for no note."""
    first = note.splitlines()[0] if note else ""
    return next((name for words, name in _SIGNALS.items() if words in first), first)


def _thread_of(note: str) -> int | None:
    """The thread that died, if it was one that the interpreter knows."""
    found = _CURRENT_THREAD.search(note)
    return int(found[1], 16) if found is not None else None
