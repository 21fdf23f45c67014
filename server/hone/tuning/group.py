"""A process group as one thing: who is in it, how much memory it holds, and how to be sure that it is gone."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = resource.getpagesize()
#: Field of /proc/PID/stat behind the command's closing parenthesis: state. statm: resident pages.
_STATE, _RESIDENT = 0, 1
#: What looking at a process says that has gone meanwhile, or is another user's.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def members(group: int) -> list[int]:
    """Processes of the group that have not ended (those that ended and wait to be reaped hold no memory). Raises
    OSError where this process has no descriptor left to look."""
    found = []
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                pid = int(entry.name)
                with suppress(*_GONE):
                    if os.getpgid(pid) == group and _state(pid) not in "ZX":
                        found.append(pid)
    return found


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of the processes together; pages that they share count for each. Raises as `members` does."""
    total = 0
    for pid in pids:
        with suppress(*_GONE):
            total += int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[_RESIDENT])
    return total * _PAGE_BYTES


def give_idle_priority(pid: int) -> bool:
    """Have a process, and all it will start, run only where nobody else wants to. False where that is not allowed.

    Any task of ordinary priority takes the processor from such a one at once; from one of nice 19 only at the end of
    its turn, milliseconds later.
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        return False
    return True


def thread_times(pids: list[int]) -> dict[int, tuple[float, float]]:
    """Of each thread of these processes, seconds that it ran and that it waited for a processor; none where the kernel
    does not tell. Raises as `members` does."""
    times = {}
    for pid in pids:
        with suppress(*_GONE), os.scandir(_PROC / str(pid) / "task") as threads:
            for thread in threads:
                with suppress(*_GONE, ValueError):
                    ran, waited, _ = Path(thread.path, "schedstat").read_text(encoding="ascii").split()
                    times[int(thread.name)] = int(ran) / 1e9, int(waited) / 1e9
    return times


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended, without reaping it: its number stays taken."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(group: int, timeout_seconds: float) -> list[int]:
    """Kill the group and wait until it is gone. Returns who is still there at the timeout (processes that the kernel
    cannot interrupt), nobody as a rule.

    The group's leader must be a child of this process that has not been reaped, so that its number is not another's.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = 0.001
    while True:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # again each time: a member may have been starting another
        left = members(group)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def reap_adopted(group: int) -> None:
    """Reap members whose parents ended before them, where this process is the one that inherits them (as process 1 of
    a container does). The leader must have been reaped."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _state(pid: int) -> str:
    stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return stat[stat.rindex(")") + 2 :].split(" ", 1)[_STATE]
