"""One folder of entries: finding, publishing, holding and proving in it, without counting or telling anyone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hone.kernels.digest import JSON
from hone.kernels.entry import MANIFEST, PROVEN, Entry, EntryName, Failure, Miss, MissReason, failure_of
from hone.kernels.files import reason_of, replace_file
from hone.kernels.folder import CacheFolder
from hone.kernels.holds import Holds
from hone.kernels.manifest import proof_of, read_entry
from hone.kernels.staging import Publisher, move_away
from hone.kernels.usage import LogicalClock


class Store:
    """Thread-safe, and safe among processes on one folder. Raises nothing for what is on disk but where it says so."""

    def __init__(self, root: Path, now_ns: Callable[[], int], on_step: Callable[[str], None]) -> None:
        self.folder = CacheFolder(root)
        self.holds = Holds()
        self.clock = LogicalClock(self.folder.clock, now_ns)
        self.publisher = Publisher(self.folder, self.clock, on_step)

    def contains(self, entry: Entry) -> bool:
        return entry.path.is_relative_to(self.folder.path)

    def find(self, name: EntryName, *, hold: bool) -> tuple[Entry | Miss, bool]:
        """The entry, every file of it hashed, or why there is none; and whether a damaged one was taken away.

        With `hold`, it is held from before it was checked, so that it cannot be evicted in between.
        """
        path = self.folder.place_of(name)
        inode = None
        if hold:
            try:
                inode = self.holds.acquire(path)
            except OSError as problem:
                return Miss(MissReason.UNREADABLE, f"{path}: {reason_of(problem)}"), False
        folder_inode = inode_of(path)
        found = read_entry(path, name)
        if isinstance(found, Entry) and (not hold or inode == found.inode):
            self.clock.touch(path / MANIFEST)
            return found, False
        if inode is not None:
            self.holds.release(path, inode)
        if isinstance(found, Entry):  # replaced, or about to be evicted, while we looked
            return Miss(MissReason.ABSENT), False
        damaged = found.reason in (MissReason.CORRUPT, MissReason.INCOMPLETE)
        return found, damaged and folder_inode is not None and move_away(path, self.folder, folder_inode)

    def publish(
        self,
        name: EntryName,
        files: Mapping[str, bytes | Path],
        manifest: Mapping[str, JSON],
        *,
        proven: bool,
        replace: bool = False,
    ) -> tuple[Entry | Failure, bool]:
        """The entry, and whether it is ours (False: it was there, or another won). Raises as `Publisher.check`."""
        try:
            return self.publisher.publish(name, files, manifest, proven=proven, replace=replace)
        except OSError as problem:
            return failure_of(problem), False

    def release(self, entry: Entry) -> None:
        self.clock.touch(entry.path / MANIFEST)
        self.holds.release(entry.path, entry.inode)

    def prove(self, entry: Entry) -> Entry:
        """Raises OSError where that cannot be written."""
        with suppress(FileNotFoundError):  # evicted meanwhile
            replace_file(entry.path / PROVEN, proof_of(entry.path))
        return dataclasses.replace(entry, proven=True)


def inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
