"""How long a process group ran, and how long it had work and got no processor.

The kernel tells both of each thread (`/proc/PID/task/TID/schedstat`), and only while the thread lives: so one looks now
and then, and adds up what came since. Threads wait for processors side by side. What counts as waiting of the group is
the part of the time in which it ran on no processor although some thread of it wanted one: a child whose one thread
sleeps until its compilers are done waits while those wait, and does not while one of them runs.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Thread -> seconds that it ran, and that it waited for a processor, since it was made.
ThreadTimes = Mapping[int, tuple[float, float]]


class ProcessorTime:
    """Sums over the looks. `ran` are seconds of all threads, `waited` are seconds of the clock."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._seen: ThreadTimes = {}
        self.ran = self.waited = 0.0

    def look(self, now: float, threads: ThreadTimes) -> None:
        """`threads` are those of the group that live now."""
        ran = waited = 0.0
        for thread, (its_ran, its_waited) in threads.items():
            before_ran, before_waited = self._seen.get(thread, (0.0, 0.0))
            if its_ran < before_ran or its_waited < before_waited:  # another has its number now
                before_ran = before_waited = 0.0
            ran += its_ran - before_ran
            waited += its_waited - before_waited
        self.ran += ran
        self.waited += min(waited, max(0.0, now - self._last - ran))
        self._last, self._seen = now, threads
