"""The memory limit of the container this process runs in, if it has one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)


class MemoryLimit(NamedTuple):
    """Bytes allowed, and bytes used towards that (without file cache that can be dropped at once)."""

    total_bytes: int
    used_bytes: int


def memory_limit(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryLimit | None:
    """The tightest memory limit among this process's control group and those above it.

    None where there is no limit, and where control groups are not mounted.
    """
    tightest: MemoryLimit | None = None
    for folder, limit_file, used_file, cache_key in _folders(proc, cgroups):
        limit = _read_limit(folder, limit_file, used_file, cache_key)
        if limit is not None and (tightest is None or limit.total_bytes < tightest.total_bytes):
            tightest = limit
    return tightest


def _folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str, str]]:
    """Folders of this process's groups, with the names that version 2 or version 1 gives to what we need there."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str, str]] = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            root, files = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's and not exist here: then the root is the container's own group.
        folder = root / group.lstrip("/")
        inside = [folder, *folder.parents]
        found.extend((each, *files) for each in inside[: inside.index(root) + 1])
    return found


def _read_limit(folder: Path, limit_file: str, used_file: str, cache_key: str) -> MemoryLimit | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 62:  # version 1 says "no limit" with a number near 2**63
            return None
        used = int((folder / used_file).read_text())
        statistics = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        logger.debug("cannot read the memory limit in %s: %s", folder, problem)
        return None
    return MemoryLimit(int(limit), max(0, used - int(statistics.get(cache_key, 0))))
