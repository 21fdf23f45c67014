"""Keeping the cache under its size: what was not used for longest goes first, what is loaded never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hone.kernels.entry import EntryName, Miss, entry_name
from hone.kernels.folder import CacheFolder, Listed, listing, look_at
from hone.kernels.holds import Holds
from hone.kernels.manifest import read_entry
from hone.kernels.staging import move_away


@dataclass(frozen=True, slots=True)
class EvictionReport:
    num_evicted: int = 0
    freed_bytes: int = 0
    num_held: int = 0
    """Entries that would have gone, were they not loaded somewhere."""
    num_swept: int = 0
    size_bytes: int = 0
    """Of what stayed."""
    num_entries: int = 0


def evict(
    folder: CacheFolder,
    holds: Holds,
    limit_bytes: int | None,
    on_evicted: Callable[[Listed], None],
    keep: EntryName | None = None,
) -> EvictionReport:
    """Removes least recently used entries until the others take at most `limit_bytes`, or only loaded ones are left.

    What a loaded entry requires (`"requires"` in its manifest) counts as loaded. `keep` stays too: it was just made.
    """
    entries = list(listing(folder))
    size = sum(entry.size_bytes for entry in entries)
    if limit_bytes is None or size <= limit_bytes:
        return EvictionReport(size_bytes=size, num_entries=len(entries))
    entries.sort(key=lambda entry: (entry.used_ns, entry.name))
    kept = _required_by_held(entries, holds)
    if keep is not None:
        kept.add(keep)
    num_evicted = freed = num_held = 0
    for entry in entries:
        if size - freed <= limit_bytes:
            break
        if entry.name in kept or not _remove(entry, folder, holds):
            num_held += 1
            continue
        on_evicted(entry)
        num_evicted += 1
        freed += entry.size_bytes
    return EvictionReport(num_evicted, freed, num_held, 0, size - freed, len(entries) - num_evicted)


def _remove(entry: Listed, folder: CacheFolder, holds: Holds) -> bool:
    if entry.used_ns == 0:  # it has no manifest: nobody can hold or use it
        return move_away(entry.path, folder)
    with holds.exclusively(entry.path) as inode:
        if inode is None:
            return False
        now = look_at(entry.name, entry.path)
        if now is None or now.used_ns != entry.used_ns:  # used since the list was made
            return False
        return move_away(entry.path, folder)


def _required_by_held(entries: list[Listed], holds: Holds) -> set[EntryName]:
    """Entries that a held artifact names. Only manifests of artifacts that someone holds are read."""
    required: set[EntryName] = set()
    for entry in entries:
        if entry.name.kind != "artifacts" or entry.used_ns == 0:
            continue
        with holds.exclusively(entry.path) as inode:
            if inode is not None:
                continue
        found = read_entry(entry.path, entry.name, rehash=False)
        if not isinstance(found, Miss):
            required |= requirements(found.manifest.get("requires", []))
    return required


def requirements(written: object) -> set[EntryName]:
    """The names in a manifest's `requires`; what is none is passed over, as it protects nothing."""
    names = set()
    for item in written if isinstance(written, list) else []:
        try:
            names.add(entry_name(item["kind"], item["digest"], item.get("scope", "")))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return names
