"""A tuning process that gives way: its threads yield every half millisecond while serving is busy.

Idle priority alone does not do it. Linux's scheduler (EEVDF, since 6.6) owes a thread of idle priority its small share,
too, and the debt goes with the thread from processor to processor and through its sleep. A thread of the server that
wakes on a processor where such a debt is open is not eligible, and waits until the next tick: 4 ms at 250 Hz. With a
yield the debt is forfeited (since 6.18), or paid within half a millisecond.

Each running thread gets a timer whose signal is handled by the C library's `sched_yield` itself, so that native code
yields, too, without the interpreter. Threads that sleep are left alone. Compilers bring their
own (`preload`). See docs/decisions/0011-yielding.md.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hone.tuning.activity import Activity

_log = logging.getLogger(__name__)

INTERVAL_NS = 500_000
#: Between two looks at which threads run; and how long after its last request serving counts as busy.
_LOOK_SECONDS = 0.05
_BUSY_SECONDS = 0.25
#: Of the time between two looks, what a thread must have run at least.
_LEAST_RUN_SHARE = 0.02
#: Low bits of the number of a thread's CPU clock, as Linux makes it.
_CPU_CLOCK_OF_THREAD = 6
_SIGNAL = signal.SIGRTMIN + 7
_SIGEV_THREAD_ID = 4
_SA_RESTART = 0x10000000
_TASKS = Path("/proc/self/task")


class _Sigaction(ctypes.Structure):
    """`struct sigaction` of the C libraries of 64-bit Linux; the set of signals has 1,024 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Sigevent(ctypes.Structure):
    """`struct sigevent`, 64 bytes in all."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_int * 11),
    )


class _Timerspec(ctypes.Structure):
    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class ThreadTimers:
    """Timers that make threads of this process yield, by thread. Not to be used by two threads at once."""

    def __init__(self, interval_ns: int = INTERVAL_NS) -> None:
        """Raises OSError where the system has no such timers."""
        self._interval_ns = interval_ns
        self._timers: dict[int, ctypes.c_void_p] = {}
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            handler = ctypes.cast(self._libc.sched_yield, ctypes.c_void_p)
            self._create, self._set, self._delete = (
                self._libc.timer_create,
                self._libc.timer_settime,
                self._libc.timer_delete,
            )
        except AttributeError as problem:
            raise OSError(f"the C library has no timers for threads: {problem}") from problem
        action = _Sigaction(handler=handler.value, flags=_SA_RESTART)
        self._call(self._libc.sigaction, ctypes.c_int(_SIGNAL), ctypes.byref(action), None)

    @property
    def threads(self) -> frozenset[int]:
        return frozenset(self._timers)

    def keep(self, threads: frozenset[int]) -> None:
        """These threads have timers from now on, and no others. One that has ended gets none."""
        for thread in self._timers.keys() - threads:
            self._call(self._delete, self._timers.pop(thread))
        for thread in threads - self._timers.keys():
            event = _Sigevent(signal=_SIGNAL, notify=_SIGEV_THREAD_ID, thread=thread)
            timer = ctypes.c_void_p()
            with suppress(OSError):  # it has ended meanwhile, or may have no more timers
                self._call(self._create, ctypes.c_int(time.CLOCK_MONOTONIC), ctypes.byref(event), ctypes.byref(timer))
                self._timers[thread] = timer
                when = _Timerspec(0, self._interval_ns, 0, self._interval_ns)
                self._call(self._set, timer, ctypes.c_int(0), ctypes.byref(when), None)

    @staticmethod
    def _call(function: Callable[..., int], *arguments: object) -> None:
        if function(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class RunningThreads:
    """Which threads of this process, but for the calling one, run or wait for a processor."""

    def __init__(self) -> None:
        self._ran_ns: dict[int, int] = {}

    def look(self) -> frozenset[int]:
        """Those that want to run now, or ran since the last look: while this one has the interpreter's lock, all that
        wait for it seem to sleep."""
        ran_ns, found = {}, []
        for task in _TASKS.iterdir():
            thread = int(task.name)
            with suppress(OSError, ValueError):  # ended meanwhile
                stat = (task / "stat").read_bytes()
                ran_ns[thread] = ran = time.clock_gettime_ns(~thread << 3 | _CPU_CLOCK_OF_THREAD)
                if (
                    stat[stat.rindex(b")") + 2 :][:1] == b"R"
                    or ran - self._ran_ns.get(thread, ran) > _LEAST_RUN_SHARE * _LOOK_SECONDS * 1e9
                ):
                    found.append(thread)
        self._ran_ns = ran_ns
        return frozenset(found) - {threading.get_native_id()}


def give_way(read: Callable[[], Activity]) -> None:
    """From now on threads yield while serving is busy, as `read` tells of it. A thread of its own looks after that."""
    try:
        timers = ThreadTimers()
    except OSError as problem:
        _log.info("threads do not yield to serving: %s", problem)
        return
    threading.Thread(target=_watch, args=(read, timers), name="yield", daemon=True).start()


def _watch(read: Callable[[], Activity], timers: ThreadTimers) -> None:
    running = RunningThreads()
    last, busy_until = read(), 0.0
    while True:
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        activity = read()
        if activity != last or activity.num_in_flight:
            last, busy_until = activity, now + _BUSY_SECONDS
        timers.keep(running.look() if now < busy_until else frozenset())
