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
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # What was read from files and is not in use goes when others want its place.
        lines = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
        found.append(max(0, int(limit) - int(used) + int(lines.get("inactive_file", 0))))
    return min(found, default=None)


def free_gib() -> float:
    free = free_bytes()
    return float("inf") if free is None else free / _GIB


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
