"""The kernels cache: what one server learned, kept for every model, restart and machine with such a device."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hone.kernels.device_key import DeviceKey, device_from_file
from hone.kernels.digest import JSON
from hone.kernels.entry import (
    MANIFEST,
    PROVEN,
    Entry,
    EntryName,
    Failure,
    FailureReason,
    Kind,
    Miss,
    MissReason,
    entry_name,
    failure_of,
)
from hone.kernels.eviction import EvictionReport, evict
from hone.kernels.files import reason_of, replace_file
from hone.kernels.folder import CacheFolder, CacheUnsafe, Listed, devices_in, listing, names_in
from hone.kernels.holds import Holds
from hone.kernels.locks import CacheLocks
from hone.kernels.manifest import proof_of, read_entry
from hone.kernels.quarantine import Quarantine, QuarantineRecord
from hone.kernels.staging import Publisher, move_away, sweep
from hone.kernels.statistics import CacheStatistics
from hone.kernels.transfer import ImportReport, export_entries, import_entries
from hone.kernels.usage import LogicalClock

logger = logging.getLogger(__name__)

#: Other servers on the folder publish too: the sizes are looked at anew after this many of our own entries.
_LOOK_AFTER = 64
#: Entries whose misses are told of, each once: a thousand broken ones are told well enough.
_MAX_TOLD = 1000


@dataclass(frozen=True, slots=True)
class Built:
    """What `get_or_build` publishes: the entry's files, and what its manifest says of them."""

    files: Mapping[str, bytes | Path]
    manifest: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    num_sound: int
    problems: tuple[tuple[EntryName, Miss], ...]
    num_removed: int = 0


def _no_step(_step: str) -> None:
    return None


class KernelsCache:
    """Entries of four kinds: `kernels` (scope: architecture), `decisions` and `artifacts` (scope: a device key's
    digest), `constants` (no scope).

    Thread-safe, and safe among processes on one folder. A bad entry is a miss, a full or read-only disk a `Failure`
    and one warning: neither raises. Wrong names, kinds and manifests are mistakes of the code and raise ValueError or
    TypeError. The constructor raises CacheUnsafe when hone's own folder inside `root` cannot be trusted.

    `size_limit_bytes` None keeps everything. `on_step` is told each step of publishing (see staging.STEPS), `now_ns`
    is the clock of last uses: both are there for tests.
    """

    def __init__(
        self,
        root: Path,
        *,
        size_limit_bytes: int | None = None,
        create: bool = True,
        now_ns: Callable[[], int] = time.time_ns,
        on_step: Callable[[str], None] = _no_step,
    ) -> None:
        self.root = root
        self.size_limit_bytes = size_limit_bytes
        self.statistics = CacheStatistics()
        self._folder = CacheFolder(root)
        self._clock = LogicalClock(self._folder.clock, now_ns)
        self._publisher = Publisher(self._folder, self._clock, on_step)
        self._holds = Holds()
        self._locks = CacheLocks(self._folder, self._tell)
        self._quarantine = Quarantine(self._folder, self._locks.held, self._tell)
        self._told_lock = threading.Lock()
        self._told: set[FailureReason] = set()
        self._told_misses: set[tuple[EntryName, MissReason]] = set()
        self._num_unlooked = _LOOK_AFTER
        exists = self._folder.check()
        if create:
            self._open()
        elif exists:
            self._folder.warn_of_shared_parent()

    @property
    def exists(self) -> bool:
        """Whether hone's folder is there. Raises CacheUnsafe."""
        return self._folder.check()

    @property
    def path(self) -> Path:
        """hone's own folder inside the root."""
        return self._folder.path

    # --- entries

    def get(self, kind: Kind, digest: str, scope: str = "", *, hold: bool = False) -> Entry | Miss:
        """The entry, every file of it hashed; or why there is none.

        With `hold`, the entry is held from before it was checked, so that it cannot be evicted in between; `release`
        it. A corrupt or incomplete entry is taken away, so that it can be published anew. A use counts for eviction.
        """
        name = entry_name(kind, digest, scope)
        path = self._folder.place_of(name)
        inode = None
        if hold:
            try:
                inode = self._holds.acquire(path)
            except OSError as problem:
                return self._missed(name, Miss(MissReason.UNREADABLE, f"{path}: {reason_of(problem)}"))
        folder_inode = _inode_of(path)
        found = read_entry(path, name)
        if isinstance(found, Entry) and (not hold or inode == found.inode):
            self._clock.touch(path / MANIFEST)
            self.statistics.hit(kind)
            return found
        if inode is not None:
            self._holds.release(path, inode)
        if isinstance(found, Entry):  # replaced, or about to be evicted, while we looked
            return self._missed(name, Miss(MissReason.ABSENT))
        damaged = found.reason in (MissReason.CORRUPT, MissReason.INCOMPLETE)
        if damaged and folder_inode is not None and move_away(path, self._folder, folder_inode):
            self.statistics.discarded()
        return self._missed(name, found)

    def peek(self, name: EntryName) -> Entry | Miss:
        """As `get`, for people who look: nothing is counted, touched or taken away."""
        return read_entry(self._folder.place_of(name), name)

    def publish(
        self,
        kind: Kind,
        digest: str,
        scope: str,
        files: Mapping[str, bytes | Path],
        manifest: Mapping[str, JSON],
        *,
        proven: bool = True,
        replace: bool = False,
    ) -> Entry | Failure:
        """Keeps the files as one entry: all of it appears at once, or nothing does.

        `files` maps plain names to bytes or to files to copy. If the entry is there already, or another process is
        faster, that one is returned: it was made of the same key. With `replace` it makes room instead (measured
        again, say; for an instant there is none), and whoever holds the old one keeps its files.

        `manifest["key"]`, where given, must be the fields that `digest` is of; `manifest["requires"]` may list entries
        ({"kind", "scope", "digest"}) that must not be evicted while this one is held.
        """
        name = entry_name(kind, digest, scope)
        self._publisher.check(name, files, manifest)
        try:
            size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
            if self.size_limit_bytes is not None and size > self.size_limit_bytes:
                detail = f"{name}: {size} bytes, the whole cache may have {self.size_limit_bytes}"
                return self._failed(kind, Failure(FailureReason.TOO_LARGE, detail))
            entry, ours = self._publisher.publish(name, files, manifest, proven=proven, replace=replace)
        except OSError as problem:
            return self._failed(kind, failure_of(problem))
        if isinstance(entry, Failure):
            return self._failed(kind, entry)
        if not ours:
            self.statistics.present(kind)
            return entry
        self.statistics.published(kind, entry.size_bytes)
        self._keep_under_limit(name)
        return entry

    def get_or_build(
        self,
        kind: Kind,
        digest: str,
        scope: str,
        build: Callable[[], Built | Failure],
        *,
        timeout_seconds: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Entry | Failure:
        """The entry, built at most once however many processes ask for it: look, lock, look again, build, publish.

        Raises CacheBusy as `lock` does, and what `build` raises.
        """
        found = self.get(kind, digest, scope)
        if isinstance(found, Entry):
            return found
        with self.lock(kind, digest, scope, timeout_seconds=timeout_seconds, cancelled=cancelled):
            found = self.get(kind, digest, scope)
            if isinstance(found, Entry):
                return found
            built = build()
            if isinstance(built, Failure):
                return built
            return self.publish(kind, digest, scope, built.files, built.manifest)

    @contextmanager
    def lock(
        self,
        kind: Kind,
        digest: str,
        scope: str = "",
        *,
        timeout_seconds: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[None]:
        """While held, no other thread or process holds the lock of the same entry; a dead process holds nothing.

        Take it round building, then look with `get` again. Raises CacheBusy after `timeout_seconds`, or once
        `cancelled()`. Not reentrant. In a folder that cannot be written it does nothing: nothing is published there.
        """
        name = entry_name(kind, digest, scope)
        with self._locks.held("-".join(filter(None, name)), timeout_seconds=timeout_seconds, cancelled=cancelled):
            yield

    def hold(self, entry: Entry) -> bool:
        """Keeps the entry, and what it `requires`, from being evicted by any process; False if it went meanwhile.

        Counted: as many times as it is held, it must be released. The death of a process releases. Raises OSError
        when no more files can be opened.
        """
        return self._holds.acquire(entry.path, entry.inode) is not None

    def release(self, entry: Entry) -> None:
        """Undoes one `hold`. The entry counts as used now."""
        self._clock.touch(entry.path / MANIFEST)
        self._holds.release(entry.path, entry.inode)

    def prove(self, entry: Entry) -> Entry:
        """Remembers that an imported entry passed the whole gate here; returns it as proven.

        Where that cannot be written, it holds for this process only.
        """
        if not entry.proven:
            try:
                replace_file(entry.path / PROVEN, proof_of(entry.path))
            except FileNotFoundError:  # evicted meanwhile
                pass
            except OSError as problem:
                self._tell(problem)
        return dataclasses.replace(entry, proven=True)

    def close(self) -> None:
        """Releases everything that is still held."""
        self._holds.release_all()

    # --- quarantine

    def quarantine(self, digest: str, scope: str, reason: str, cause: str = "quarantine") -> QuarantineRecord:
        """Keeps an artifact out on a kind of device from now on, also after restarts."""
        entry_name("artifacts", digest, scope)
        return self._quarantine.put(digest, scope, reason, cause)

    def strike(self, digest: str, scope: str, cause: str, reason: str, *, limit: int = 2) -> QuarantineRecord:
        """Counts a strike of this cause against an artifact; with the `limit`-th it is quarantined."""
        if limit < 1:
            raise ValueError(f"limit is {limit}, expected at least 1")
        entry_name("artifacts", digest, scope)
        return self._quarantine.strike(digest, scope, cause, reason, limit)

    def quarantined(self, digest: str, scope: str) -> str | None:
        """Why the artifact may not serve; None if it may."""
        entry_name("artifacts", digest, scope)
        return self._quarantine.reason(digest, scope)

    def quarantine_record(self, digest: str, scope: str) -> QuarantineRecord:
        entry_name("artifacts", digest, scope)
        return self._quarantine.record(digest, scope)

    def quarantine_records(self, scope: str) -> list[QuarantineRecord]:
        return list(self._quarantine.records(scope))

    def pardon(self, digest: str, scope: str) -> bool:
        """Forgets strikes and quarantine of an artifact; whether there were any. Raises OSError."""
        entry_name("artifacts", digest, scope)
        return self._quarantine.pardon(digest, scope)

    # --- the whole

    def entries(self) -> list[Listed]:
        """Every entry with size and last use. Opens no file."""
        return list(listing(self._folder))

    def devices(self) -> dict[str, DeviceKey | None]:
        """Kinds of devices by scope; None where the folder does not say (or not the truth)."""
        return {scope: device_from_file(self._device_file(scope), scope) for scope in sorted(devices_in(self._folder))}

    def describe(self, device: DeviceKey) -> None:
        """Writes down, for people, what the device's digest stands for."""
        path = self._device_file(device.digest)
        if device_from_file(path, device.digest) is not None:
            return
        try:
            self._folder.make(path.parent)
            replace_file(path, device.to_bytes())
        except OSError as problem:
            self._tell(problem)

    def evict(self, limit_bytes: int | None = None, *, keep: EntryName | None = None) -> EvictionReport:
        """Removes least recently used entries until under the limit (by default the cache's own), and sweeps.

        Never what a process holds. While another process does the same, this one waits for it.
        """
        limit = self.size_limit_bytes if limit_bytes is None else limit_bytes
        if not self._folder.check():
            return EvictionReport()
        num_swept = sweep(self._folder) + self._locks.sweep()
        with self._locks.held("evict"):
            report = evict(self._folder, self._holds, limit, lambda gone: self.statistics.evicted(gone.name.kind), keep)
        self.statistics.swept(num_swept)
        self.statistics.looked(report.size_bytes, report.num_entries)
        self._num_unlooked = 0
        return dataclasses.replace(report, num_swept=num_swept)

    def look(self) -> None:
        """Adds up sizes for the statistics, which otherwise know of them from the first publishing on."""
        entries = self.entries()
        self.statistics.looked(sum(entry.size_bytes for entry in entries), len(entries))

    def verify(self, *, remove: bool = False) -> VerifyReport:
        """Hashes every file of every entry. With `remove`, what is corrupt, incomplete or of another schema goes."""
        num_sound = num_removed = 0
        problems = []
        for name in sorted(names_in(self._folder)):
            path = self._folder.place_of(name)
            inode = _inode_of(path)
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
        """Writes every sound entry into a tar file, which appears whole or not at all. Raises OSError."""
        return VerifyReport(*export_entries(self._folder, self._holds, path))

    def import_(self, path: Path, *, trust_binaries: bool = False) -> ImportReport:
        """Takes over decisions from an export, and with `trust_binaries` all the rest, which is run as code.

        Everything is checked and hashed before anything is taken. Raises ImportRefused, naming file and member, or
        OSError; entries taken until then stay, each whole.
        """
        report = import_entries(self._folder, self._publisher, path, self.size_limit_bytes, trust_binaries)
        self._num_unlooked = _LOOK_AFTER
        if self.size_limit_bytes is not None:
            self.evict()
        return report

    # --- inner

    def _open(self) -> None:
        self._folder.warn_of_shared_parent()
        try:
            self._publisher.probe()
            self.statistics.swept(sweep(self._folder))
        except OSError as problem:
            self._tell(problem)

    def _keep_under_limit(self, published: EntryName) -> None:
        if self.size_limit_bytes is None:
            return
        self._num_unlooked += 1
        if self._num_unlooked > _LOOK_AFTER or self.statistics.size_bytes > self.size_limit_bytes:
            try:
                self.evict(keep=published)
            except OSError as problem:
                self._tell(problem)
            except CacheUnsafe as problem:
                self._warn(Failure(FailureReason.FOREIGN, str(problem)))

    def _device_file(self, scope: str) -> Path:
        return self._folder.path / scope / "device.json"

    def _missed(self, name: EntryName, miss: Miss) -> Miss:
        self.statistics.miss(name.kind, miss)
        if miss.reason is not MissReason.ABSENT and len(self._told_misses) < _MAX_TOLD:
            with self._told_lock:
                new = (name, miss.reason) not in self._told_misses
                self._told_misses.add((name, miss.reason))
            if new:
                logger.warning("kernels cache: %s is not used: %s (%s)", name, miss.reason.value, miss.detail)
        return miss

    def _failed(self, kind: Kind, failure: Failure) -> Failure:
        self.statistics.failed(kind, failure)
        self._warn(failure)
        return failure

    def _tell(self, problem: OSError) -> None:
        self._warn(failure_of(problem))

    def _warn(self, failure: Failure) -> None:
        """Once for each reason: a full disk does not fill the log too."""
        with self._told_lock:
            if failure.reason in self._told:
                return
            self._told.add(failure.reason)
        logger.warning(
            "kernels cache: cannot keep what is learned in %s (%s: %s); serving goes on without",
            self.root,
            failure.reason.value,
            failure.detail,
        )


def _inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
