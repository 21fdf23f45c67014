"""How much memory the machine, or the control group that this process is in, has left."""

from __future__ import annotations

from pathlib import Path

_KIB, _GIB = 1 << 10, 1 << 30


def free_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that may be taken now without swapping: the machine's, or less where control groups say so. None where
    nobody tells."""
    found: list[int] = []
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * _KIB)
    for folder in _groups(proc, group):
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # What was read from files and is not in use goes when others want its place.
            lines = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            found.append(max(0, int(limit) - int(used) + int(lines.get("inactive_file", 0))))
    return min(found, default=None)


def _groups(proc: Path, root: Path) -> list[Path]:
    """The group that this process is in and all that it is within, each of which may have a limit: a service of systemd
    is some groups down from the root, while a container sees its own as the root."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            parts = [part for part in line.removeprefix("0::/").split("/") if part]
            if ".." not in parts:  # as it is for a process outside of what this namespace shows
                return [root.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return [root]


def free_gib() -> float:
    free = free_bytes()
    return float("inf") if free is None else free / _GIB


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
