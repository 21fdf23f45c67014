"""The kernels cache as one sees it from above: entries and bytes by kind, and kernels that several models run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.kernels import CacheUnsafe, KernelsCache
from hone.kernels.entry import MANIFEST, EntryName
from hone.kernels.folder import Listed
from hone.kernels.manifest import MAX_MANIFEST_BYTES, BadManifest, parse

#: Kernels that are listed; the numbers count all.
_MAX_SHARED = 50
_MAX_QUARANTINED = 50


def summarize(root: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Reads the cache's folder: for a thread of its own. `names` are served models by the fingerprint of their graph.

    Manifests are read, files are not hashed: this is for people, and nothing runs what it finds.
    """
    try:
        cache = KernelsCache(root, create=False)
    except CacheUnsafe as problem:
        return {"path": str(root), "exists": False, "problem": str(problem)}
    try:
        if not cache.exists:
            return {"path": str(cache.path), "exists": False}
        return _summary(cache, names)
    except CacheUnsafe as problem:
        return {"path": str(root), "exists": False, "problem": str(problem)}
    finally:
        cache.close()


def _summary(cache: KernelsCache, names: Mapping[str, str]) -> dict[str, Any]:
    entries = cache.entries()
    kinds: dict[str, dict[str, int]] = {}
    for entry in entries:
        kind = kinds.setdefault(entry.name.kind, {"num_entries": 0, "size_bytes": 0})
        kind["num_entries"] += 1
        kind["size_bytes"] += entry.size_bytes
    users = _users(entries, names)
    shared = sorted(
        ((digest, models) for digest, models in users.items() if len(models) > 1),
        key=lambda item: (-len(item[1]), item[0]),
    )
    places = {entry.name.digest: entry for entry in entries if entry.name.kind == "kernels"}
    return {
        "path": str(cache.path),
        "exists": True,
        "size_bytes": sum(entry.size_bytes for entry in entries),
        "num_entries": len(entries),
        "kinds": kinds,
        "devices": {scope: device.name if device else None for scope, device in cache.devices().items()},
        "num_used_kernels": len(users),
        "num_shared_kernels": len(shared),
        "shared": [
            {"digest": digest, "models": sorted(models), **_kernel(places.get(digest))}
            for digest, models in shared[:_MAX_SHARED]
        ],
        "quarantined": [
            {"digest": record.digest, "reason": record.reason}
            for scope in cache.devices()
            for record in cache.quarantine_records(scope)
            if record.reason is not None
        ][:_MAX_QUARANTINED],
    }


def _users(entries: list[Listed], names: Mapping[str, str]) -> dict[str, set[str]]:
    """Kernel -> models whose artifacts call it; models that are not served now by the beginning of their graph."""
    users: dict[str, set[str]] = {}
    for entry in entries:
        if entry.name.kind != "artifacts":
            continue
        content = content_of(entry.name, entry)
        key = content.get("key")
        graph = str(key.get("graph_sha256", "")) if isinstance(key, Mapping) else ""
        model = names.get(graph) or f"graph {graph[:12]}"
        kernels = content.get("kernels")
        for digest in kernels if isinstance(kernels, list) else ():
            users.setdefault(str(digest), set()).add(model)
    return users


def _kernel(entry: Listed | None) -> dict[str, Any]:
    """What a kernel computes, and how."""
    if entry is None:
        return {}
    key = content_of(entry.name, entry).get("key")
    if not isinstance(key, Mapping):
        return {"size_bytes": entry.size_bytes}
    return {"size_bytes": entry.size_bytes, "template": key.get("template"), "workload": key.get("workload")}


def content_of(name: EntryName, entry: Listed) -> Mapping[str, Any]:
    """The manifest's content; empty where there is none that can be read."""
    try:
        with (entry.path / MANIFEST).open("rb") as opened:
            return parse(opened.read(MAX_MANIFEST_BYTES + 1), name).content
    except (OSError, BadManifest):
        return {}
