"""The kernels cache: what one server learned, kept for every model, restart and machine with such a device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hone.kernels.complaints import Complaints
from hone.kernels.device_key import DeviceKey, device_from_file
from hone.kernels.digest import JSON
from hone.kernels.entry import Entry, EntryName, Failure, FailureReason, Kind, Miss, entry_name
from hone.kernels.eviction import EvictionReport
from hone.kernels.files import replace_file
from hone.kernels.folder import Listed, devices_in, listing
from hone.kernels.locks import CacheLocks
from hone.kernels.manifest import read_entry
from hone.kernels.quarantine import Quarantine, QuarantineRecord
from hone.kernels.spare import has_room
from hone.kernels.staging import move_away
from hone.kernels.statistics import CacheStatistics
from hone.kernels.store import Store
from hone.kernels.transfer import ImportReport
from hone.kernels.upkeep import Upkeep, VerifyReport

__all__ = ["Built", "KernelsCache", "VerifyReport"]

#: What others require goes first, when entries move.
_ORDER: tuple[Kind, ...] = ("kernels", "constants", "artifacts", "decisions")


@dataclass(frozen=True, slots=True)
class Built:
    """What `get_or_build` publishes: the entry's files, and what its manifest says of them."""

    files: Mapping[str, bytes | Path]
    manifest: Mapping[str, JSON]


def _no_step(_step: str) -> None:
    return None


class KernelsCache:
    """Entries of four kinds: `kernels` (scope: architecture), `decisions` and `artifacts` (scope: a device key's
    digest), `constants` (no scope).

    Thread-safe, and safe among processes on one folder. A bad entry is a miss, a full or read-only disk a `Failure`
    and one warning: neither raises. Wrong names, kinds and manifests are mistakes of the code and raise ValueError or
    TypeError. The constructor raises CacheUnsafe when hone's own folder inside `root` cannot be trusted.

    `spare` is a private temporary folder (see `spare.SpareFolder`): what the cache's own folder will not take goes
    there and is found there, until `keep_spared` can move it. `size_limit_bytes` None keeps everything. `on_step` is
    told each step of publishing (see staging.STEPS), `now_ns` is the clock of last uses: both are there for tests.
    """

    def __init__(
        self,
        root: Path,
        *,
        spare: Path | None = None,
        size_limit_bytes: int | None = None,
        create: bool = True,
        now_ns: Callable[[], int] = time.time_ns,
        on_step: Callable[[str], None] = _no_step,
    ) -> None:
        self.root = root
        self.size_limit_bytes = size_limit_bytes
        self.statistics = CacheStatistics()
        self._store = Store(root, now_ns, on_step)
        self._spare = Store(spare, now_ns, _no_step) if spare is not None else None
        self._folder = self._store.folder
        self._complaints = Complaints(root, spare)
        self._locks = CacheLocks(self._folder, self._complaints.trouble)
        self._quarantine = Quarantine(self._folder, self._locks.held, self._complaints.trouble)
        self._upkeep = Upkeep(self._store, self._locks, self.statistics, self._complaints, size_limit_bytes)
        exists = self._folder.check()
        if create:
            self._upkeep.open()
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
        found, was_taken_away = self._store.find(name, hold=hold)
        if was_taken_away:
            self.statistics.discarded()
        if isinstance(found, Miss) and self._spare is not None:
            spared, _ = self._spare.find(name, hold=hold)
            found = spared or found
        if isinstance(found, Entry):
            self.statistics.hit(kind)
            return found
        self.statistics.miss(kind, found)
        self._complaints.miss(name, found)
        return found

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
        again, say; for an instant there is none), and whoever holds the old one keeps its files. Where the folder will
        not take it, the entry is in the spare one.

        `manifest["key"]`, where given, must be the fields that `digest` is of; `manifest["requires"]` may list entries
        ({"kind", "scope", "digest"}) that must not be evicted while this one is held.
        """
        name = entry_name(kind, digest, scope)
        self._store.publisher.check(name, files, manifest)
        entry, is_ours = self._publish(name, files, manifest, proven, replace)
        if isinstance(entry, Entry):
            if not is_ours:
                self.statistics.present(kind)
                return entry
            self.statistics.published(kind, entry.size_bytes)
            self._upkeep.keep_under_limit(name)
            return entry
        self.statistics.failed(kind, entry)
        self._complaints.failure(entry)
        if self._spare is None or entry.reason is FailureReason.TOO_LARGE:
            return entry
        spared, _ = self._spare.publish(name, files, manifest, proven=proven, replace=replace)
        if isinstance(spared, Failure):
            return Failure(entry.reason, f"{entry.detail}; in the temporary folder {spared.detail}")
        return spared

    def _publish(
        self,
        name: EntryName,
        files: Mapping[str, bytes | Path],
        manifest: Mapping[str, JSON],
        proven: bool,
        replace: bool,
    ) -> tuple[Entry | Failure, bool]:
        if self.size_limit_bytes is not None:
            size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
            if size > self.size_limit_bytes:
                detail = f"{name}: {size} bytes, the whole cache may have {self.size_limit_bytes}"
                return Failure(FailureReason.TOO_LARGE, detail), False
        return self._store.publish(name, files, manifest, proven=proven, replace=replace)

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
        return self._store_of(entry).holds.acquire(entry.path, entry.inode) is not None

    def release(self, entry: Entry) -> None:
        """Undoes one `hold`. The entry counts as used now."""
        self._store_of(entry).release(entry)

    def prove(self, entry: Entry) -> Entry:
        """Remembers that an imported entry passed the whole gate here; returns it as proven.

        Where that cannot be written, it holds for this process only.
        """
        if not entry.proven:
            try:
                return self._store_of(entry).prove(entry)
            except OSError as problem:
                self._complaints.trouble(problem)
        return dataclasses.replace(entry, proven=True)

    def close(self) -> None:
        """Releases everything that is still held."""
        self._store.holds.release_all()
        if self._spare is not None:
            self._spare.holds.release_all()

    def _store_of(self, entry: Entry) -> Store:
        return self._spare if self._spare is not None and self._spare.contains(entry) else self._store

    # --- what could not be kept

    @property
    def num_spared(self) -> int:
        """Entries in the spare folder: they go with it, unless they can be moved before."""
        return 0 if self._spare is None else sum(1 for _ in listing(self._spare.folder))

    def keep_spared(self) -> int:
        """Try again to keep what is in the spare folder; how many entries moved. Ends at the first that cannot.

        What is loaded from there stays loaded: its file lives on without a name.
        """
        if self._spare is None:
            return 0
        num_moved = 0
        for listed in sorted(listing(self._spare.folder), key=lambda one: _ORDER.index(one.name.kind)):
            name, place = listed.name, listed.path
            if self._folder.root.exists() and not has_room(self._folder.root, listed.size_bytes):
                break
            found = read_entry(place, name)
            if isinstance(found, Entry):
                kept, is_ours = self._publish(name, found.files, found.manifest, found.proven, False)
                if isinstance(kept, Failure):
                    break
                if is_ours:
                    self.statistics.published(name.kind, kept.size_bytes)
                    self._upkeep.keep_under_limit(name)
            num_moved += move_away(place, self._spare.folder)
        if num_moved:
            self._complaints.over(num_moved)
        return num_moved

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

    # --- the whole; see `upkeep.Upkeep`

    def entries(self) -> list[Listed]:
        """Every entry with size and last use. Opens no file."""
        return self._upkeep.entries()

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
            self._complaints.trouble(problem)

    def evict(self, limit_bytes: int | None = None, *, keep: EntryName | None = None) -> EvictionReport:
        """Removes least recently used entries until under the limit (by default the cache's own), and sweeps.

        Never what a process holds. While another process does the same, this one waits for it.
        """
        return self._upkeep.evict(limit_bytes, keep=keep)

    def look(self) -> None:
        """Adds up sizes for the statistics, which otherwise know of them from the first publishing on."""
        self._upkeep.look()

    def tend(self) -> None:
        """Now and then: under the limit, and statistics that know of what other processes published. What the disk
        has against it is told of once, in the log."""
        self._upkeep.tend()

    def verify(self, *, remove: bool = False) -> VerifyReport:
        """Hashes every file of every entry. With `remove`, what is corrupt, incomplete or of another schema goes."""
        return self._upkeep.verify(remove=remove)

    def export(self, path: Path) -> VerifyReport:
        """Writes every sound entry into a tar file, which appears whole or not at all. Raises OSError."""
        return self._upkeep.export(path)

    def import_(self, path: Path, *, trust_binaries: bool = False) -> ImportReport:
        """Takes over decisions from an export, and with `trust_binaries` all the rest, which is run as code.

        Everything is checked and hashed before anything is taken. Raises ImportRefused, naming file and member, or
        OSError; entries taken until then stay, each whole.
        """
        return self._upkeep.import_(path, trust_binaries=trust_binaries)

    def _device_file(self, scope: str) -> Path:
        return self._folder.path / scope / "device.json"
