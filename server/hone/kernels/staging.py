"""Publishing: an entry is put together beside its target and gets its name in one step, whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hone.kernels.digest import JSON
from hone.kernels.entry import (
    MANIFEST,
    PROVEN,
    STAGING_LOCK,
    Entry,
    EntryName,
    Failure,
    FailureReason,
    Miss,
    MissReason,
    check_file_name,
)
from hone.kernels.files import FOLDER_MODE, remove_tree, sync_folder, write_new
from hone.kernels.folder import CacheFolder
from hone.kernels.manifest import FileRecord, compose, proof_of, read_entry
from hone.kernels.usage import LogicalClock

logger = logging.getLogger(__name__)

#: The steps of publishing, in order, each named after what was just done.
STEPS = ("staged", "file-written", "manifest-written", "synced", "renamed", "published")

#: Staging folders without a living writer are removed when older than this.
STALE_SECONDS = 3600
_TRIES = 3


class Publisher:
    """Writes entries. Holds no state, so threads and processes may publish the same entry at once: one wins."""

    def __init__(self, folder: CacheFolder, clock: LogicalClock, on_step: Callable[[str], None]) -> None:
        self._folder = folder
        self._clock = clock
        self._on_step = on_step

    def publish(
        self,
        name: EntryName,
        files: Mapping[str, bytes | Path],
        content: Mapping[str, JSON],
        *,
        proven: bool,
        replace: bool,
    ) -> tuple[Entry | Failure, bool]:
        """The entry, and whether it is ours (False: it was there, or another won). Raises OSError, leaving nothing
        behind, and as `check`."""
        target = self._folder.place_of(name)
        if not replace:
            present = read_entry(target, name)
            if isinstance(present, Entry):
                return present, False
        with self.stage(name) as staged:
            self._on_step("staged")
            records = {}
            for file_name, source in files.items():
                records[file_name] = FileRecord(*write_new(staged / file_name, source))
                self._on_step("file-written")
            write_new(staged / MANIFEST, compose(name, records, content))
            self._on_step("manifest-written")
            return self.install(staged, name, proven=proven, replace=replace)

    @staticmethod
    def check(name: EntryName, files: Mapping[str, bytes | Path], content: Mapping[str, JSON]) -> None:
        """Raises ValueError or TypeError for what can never be published."""
        for file_name in files:
            check_file_name(file_name)
        compose(name, {}, content)

    def probe(self) -> None:
        """Finds out whether the folder can be written to. Raises OSError."""
        with self.stage(EntryName("kernels", "probe", "0" * 64)):
            pass

    @contextmanager
    def stage(self, name: EntryName) -> Iterator[Path]:
        """An empty folder on the target's file system, gone at the end. Raises OSError."""
        staging = self._folder.make(self._folder.staging)
        staged = staging / f"{name.kind}-{name.digest[:16]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        staged.mkdir(mode=FOLDER_MODE)
        lock = -1
        try:
            lock = os.open(staged / STAGING_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks: age alone tells the stale ones
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield staged
        finally:
            if lock >= 0:
                os.close(lock)
            remove_tree(staged)

    def install(
        self, staged: Path, name: EntryName, *, proven: bool, replace: bool = False
    ) -> tuple[Entry | Failure, bool]:
        """Gives a staged folder, complete but for syncing, its name. Raises OSError."""
        target = self._folder.place_of(name)
        if proven:
            write_new(staged / PROVEN, proof_of(staged))
        (staged / STAGING_LOCK).unlink()
        self._clock.stamp(staged / MANIFEST)
        sync_folder(staged)
        self._folder.make(target.parent)
        self._on_step("synced")
        for _ in range(_TRIES):
            try:
                staged.rename(target)
            except OSError as problem:
                if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            else:
                self._on_step("renamed")
                sync_folder(target.parent)
                self._on_step("published")
                entry = read_entry(target, name)
                return (entry, True) if isinstance(entry, Entry) else (_gone(entry), False)
            there = read_entry(target, name)
            if isinstance(there, Entry):
                if not replace:
                    return there, False
            elif there.reason in (MissReason.FOREIGN, MissReason.UNREADABLE):
                return Failure(FailureReason.FOREIGN, there.detail), False
            move_away(target, self._folder)
        return Failure(FailureReason.ERROR, f"{target}: could not take its place in {_TRIES} tries"), False


def move_away(path: Path, folder: CacheFolder, inode: int | None = None) -> bool:
    """Takes an entry's folder from its place, in one step, and removes it; whether it did.

    With `inode` (of the folder), only that one: another that came meanwhile is put back.
    """
    aside = folder.staging / f"removed-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        folder.make(folder.staging)
        path.rename(aside)
        if inode is not None and aside.lstat().st_ino != inode:
            aside.rename(path)
            return False
    except OSError as problem:
        if not isinstance(problem, FileNotFoundError):
            logger.debug("kernels cache: cannot move %s away: %s", path, problem)
        return False
    remove_tree(aside)
    return True


def sweep(folder: CacheFolder, now: float | None = None) -> int:
    """Removes what writers that died left in the staging folder; how many.

    A folder whose writer lives is locked. The others must also be an hour old, by a clock that may have jumped either
    way, for a writer makes its folder a moment before it locks it.
    """
    now = time.time() if now is None else now
    num_swept = 0
    try:
        candidates = list(folder.staging.iterdir())
    except OSError:
        return 0
    for candidate in candidates:
        try:
            age = now - candidate.lstat().st_mtime
        except OSError:
            continue
        if abs(age) > STALE_SECONDS and not _has_writer(candidate):
            if candidate.is_dir() and not candidate.is_symlink():
                num_swept += remove_tree(candidate)
            else:
                with suppress(OSError):
                    candidate.unlink()
                    num_swept += 1
    return num_swept


def _has_writer(staged: Path) -> bool:
    try:
        lock = os.open(staged / STAGING_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _gone(miss: Miss) -> Failure:
    return Failure(FailureReason.ERROR, f"published, and then {miss.reason}: {miss.detail}")
