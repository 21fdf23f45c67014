"""The cache as a whole: keeping it under its size, checking all of it, carrying it elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hone.kernels.complaints import Complaints
from hone.kernels.entry import Entry, EntryName, Failure, FailureReason, Miss, MissReason
from hone.kernels.eviction import EvictionReport, evict
from hone.kernels.folder import CacheUnsafe, Listed, listing, names_in
from hone.kernels.locks import CacheLocks
from hone.kernels.manifest import read_entry
from hone.kernels.staging import move_away, sweep
from hone.kernels.statistics import CacheStatistics
from hone.kernels.store import Store, inode_of
from hone.kernels.transfer import ImportReport, export_entries, import_entries

#: Other servers on the folder publish too: the sizes are looked at anew after this many of our own entries.
_LOOK_AFTER = 64


@dataclass(frozen=True, slots=True)
class VerifyReport:
    num_sound: int
    problems: tuple[tuple[EntryName, Miss], ...]
    num_removed: int = 0


class Upkeep:
    """See `KernelsCache`, whose methods of the same names these are."""

    def __init__(
        self,
        store: Store,
        locks: CacheLocks,
        statistics: CacheStatistics,
        complaints: Complaints,
        size_limit_bytes: int | None,
    ) -> None:
        self._folder = store.folder
        self._store = store
        self._locks = locks
        self._statistics = statistics
        self._complaints = complaints
        self._size_limit_bytes = size_limit_bytes
        self._num_unlooked = _LOOK_AFTER

    def open(self) -> None:
        """Find out whether the folder can be written to, and sweep it."""
        self._folder.warn_of_shared_parent()
        try:
            self._store.publisher.probe()
            self._statistics.swept(sweep(self._folder))
        except OSError as problem:
            self._complaints.trouble(problem)

    def entries(self) -> list[Listed]:
        return list(listing(self._folder))

    def look(self) -> None:
        entries = self.entries()
        self._statistics.looked(sum(entry.size_bytes for entry in entries), len(entries))

    def evict(self, limit_bytes: int | None = None, *, keep: EntryName | None = None) -> EvictionReport:
        limit = self._size_limit_bytes if limit_bytes is None else limit_bytes
        if not self._folder.check():
            return EvictionReport()
        num_swept = sweep(self._folder) + self._locks.sweep()
        with self._locks.held("evict"):
            report = evict(
                self._folder, self._store.holds, limit, lambda gone: self._statistics.evicted(gone.name.kind), keep
            )
        self._statistics.swept(num_swept)
        self._statistics.looked(report.size_bytes, report.num_entries)
        self._num_unlooked = 0
        return dataclasses.replace(report, num_swept=num_swept)

    def keep_under_limit(self, published: EntryName) -> None:
        """After each publishing; `published` itself stays."""
        if self._size_limit_bytes is None:
            return
        self._num_unlooked += 1
        if self._num_unlooked > _LOOK_AFTER or self._statistics.size_bytes > self._size_limit_bytes:
            self._complaining(lambda: self.evict(keep=published))

    def tend(self) -> None:
        """Now and then: other processes publish as well, and nobody else brings what they did under the limit and
        into the statistics."""
        self._complaining(self.look if self._size_limit_bytes is None else self.evict)

    def _complaining(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as problem:
            self._complaints.trouble(problem)
        except CacheUnsafe as problem:
            self._complaints.failure(Failure(FailureReason.FOREIGN, str(problem)))

    def verify(self, *, remove: bool = False) -> VerifyReport:
        num_sound = num_removed = 0
        problems = []
        for name in sorted(names_in(self._folder)):
            path = self._folder.place_of(name)
            inode = inode_of(path)
            found = read_entry(path, name)
            if isinstance(found, Entry):
                num_sound += 1
            elif found.reason is not MissReason.ABSENT:
                problems.append((name, found))
                removable = found.reason in (MissReason.CORRUPT, MissReason.INCOMPLETE, MissReason.SCHEMA)
                if remove and removable and inode is not None and move_away(path, self._folder, inode):
                    num_removed += 1
        return VerifyReport(num_sound, tuple(problems), num_removed)

    def export(self, path: Path) -> VerifyReport:
        return VerifyReport(*export_entries(self._folder, self._store.holds, path))

    def import_(self, path: Path, *, trust_binaries: bool = False) -> ImportReport:
        report = import_entries(self._folder, self._store.publisher, path, self._size_limit_bytes, trust_binaries)
        self._num_unlooked = _LOOK_AFTER
        if self._size_limit_bytes is not None:
            self.evict()
        return report
