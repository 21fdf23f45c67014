"""The process of a tuning child, seen through its pipes: what it says, what it takes, and how it ended.

What is done about it is in `child`.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from hone.tuning import group
from hone.tuning.processor_time import ProcessorTime
from hone.tuning.wire import LineReader, Message

_log = logging.getLogger(__name__)

_MEMORY_INTERVAL_SECONDS = 0.1
#: Reading the times of some tens of threads takes a millisecond.
_TIMES_INTERVAL_SECONDS = 0.5
#: Seconds that a child gets to leave by itself after its last word, and that its killed group gets to be gone.
_LEAVE_SECONDS = 5.0
_END_SECONDS = 30.0
_TAIL_BYTES = 1 << 14
_CHUNK_BYTES = 1 << 16

JobCause = Literal[
    "",
    "error",
    "garbage",
    "memory",
    "hang",
    "deadline",
    "killed",
    "crash",
    "exit",
    "start",
    "starved",
    "unloaded",
    "replaced",
    "settings",
    "retuned",
    "held",
    "stopped",
    "device lost",
    "cancelled",
]
"""Why a job ended as it did, in a word for metrics; empty for one that was done."""

#: Causes that go with an outcome.
CAUSES: Mapping[str, tuple[JobCause, ...]] = {
    "done": ("",),
    "failed": ("error", "garbage", "memory", "hang", "deadline", "killed", "crash", "exit", "start"),
    "cancelled": ("unloaded", "replaced", "settings", "retuned", "held", "stopped", "device lost"),
    "starved": ("starved",),
}

#: Events with which a child tells that its job is over.
DONE, FAILED = "done", "failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a child. Seconds are those in which it neither was paused nor waited for a processor."""

    seconds: float
    memory_bytes: int
    """Of the child with all it started; where it shares them with others (`others_bytes`), of all together."""
    silence_seconds: float
    promised_bytes: int | None = None
    """What the child may have in any case, whatever others have; None for all."""
    others_bytes: Callable[[], int] = lambda: 0

    @property
    def certain_bytes(self) -> int:
        """What the child may count on."""
        return self.memory_bytes if self.promised_bytes is None else self.promised_bytes

    def bytes_now(self) -> int:
        return max(self.certain_bytes, self.memory_bytes - self.others_bytes())


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a child ended. `reason` is a sentence, empty for a job that was done; `detail` is the end of its stderr."""

    outcome: Literal["done", "failed", "cancelled", "starved"]
    """`starved`: at idle priority it got no processor; what is left is for a child that takes its share."""
    reason: str = ""
    cause: JobCause = ""
    detail: str = ""
    stage: str = ""
    """What the child was at when it ended, in its own words."""
    seconds: float = 0.0
    running_seconds: float = 0.0
    """Without the time in which it was paused or waited for a processor."""
    peak_bytes: int = 0


class ChildProcess:
    """The process, its pipes and what was seen of it."""

    def __init__(
        self,
        command: Sequence[str],
        spec: bytes,
        descriptors: Sequence[int],
        temporary: str,
        clock: Callable[[], float],
    ) -> None:
        """Raises OSError when the process cannot be started."""
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._reader = LineReader()
        self._tail = bytearray()
        self._spec = memoryview(spec)
        self._open: list[int] = []
        try:
            life_read, self._life = self._pipe()
            spec_read, self._spec_write = self._pipe()
            self._events, events_write = self._pipe()
            self._errors, errors_write = self._pipe()
            self._process = subprocess.Popen(
                [*command, str(life_read), str(events_write)],
                stdin=spec_read,
                stdout=errors_write,
                stderr=errors_write,
                pass_fds=(life_read, events_write, *descriptors),
                process_group=0,
                env={**os.environ, "TMPDIR": temporary},
            )
        except BaseException:
            self._selector.close()
            self._close_all()
            raise
        for descriptor in (life_read, spec_read, events_write, errors_write):
            self._shut(descriptor)
        self.pid = self._process.pid
        for descriptor in (self._spec_write, self._events, self._errors):
            os.set_blocking(descriptor, False)
        self._selector.register(self._spec_write, selectors.EVENT_WRITE)
        self._selector.register(self._events, selectors.EVENT_READ)
        self._selector.register(self._errors, selectors.EVENT_READ)
        self.stage = "starting"
        self.paces_itself = False
        self.last_word: Message | None = None
        self._last_word_at = 0.0
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._started = clock()
        self._processors = ProcessorTime(self._started)
        self._last_event_at = 0.0
        self._next_memory = self._next_times = self._started
        self._peak_bytes = self.resident_bytes = 0

    # --- what it says

    def poll(self, timeout: float) -> Iterator[Message]:
        """Wait for something to happen, at most `timeout` seconds; the events that came. Raises Garbage behind them."""
        for key, _ in self._selector.select(timeout):
            if key.fd == self._spec_write:
                self._send()
            elif key.fd == self._errors:
                self._read_errors()
            else:
                yield from self._read_events()

    def _read_events(self) -> Iterator[Message]:
        while data := self._read(self._events):
            for event in self._reader.feed(data):
                self._last_event_at = self.running_seconds()
                self.stage = str(event.get("stage", self.stage))[:200]
                self.paces_itself = event.get("paced", self.paces_itself) is True
                if event["event"] in (DONE, FAILED) and self.last_word is None:
                    self.last_word, self._last_word_at = event, self._clock()
                yield event

    def _read_errors(self) -> None:
        while data := self._read(self._errors):
            self._tail += data
            del self._tail[:-_TAIL_BYTES]

    def _read(self, descriptor: int) -> bytes:
        """What is there; nothing where there is nothing now, and no more where the other end is closed."""
        if descriptor not in self._open:
            return b""
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._forget(descriptor)
        return data

    def _send(self) -> None:
        try:
            self._spec = self._spec[os.write(self._spec_write, self._spec) :]
        except BrokenPipeError:
            self._spec = self._spec[:0]
        if not self._spec:
            self._forget(self._spec_write)

    # --- what becomes of it

    def has_ended(self) -> bool:
        return group.has_ended(self.pid)

    def lingers(self) -> bool:
        """Whether it had the time to leave by itself after its last word."""
        return self._clock() - self._last_word_at > _LEAVE_SECONDS

    def exceeded(self, limits: Limits) -> tuple[str, JobCause]:
        """Which limit it passed, in words and in one; both empty while it passed none."""
        self._look()
        running = self.running_seconds()
        if running > limits.seconds:
            told = f"the tuning process was ended after {running:.1f} s, its time was {limits.seconds:g} s{self._at()}"
            return told, "deadline"
        if running - self._last_event_at > limits.silence_seconds:
            return f"the tuning process hung: no progress for {limits.silence_seconds:g} s{self._at()}", "hang"
        if self.resident_bytes > (limit := limits.bytes_now()):
            told = (
                f"the tuning process took {_mib(self.resident_bytes)} of memory with all it started, its limit is"
                f" {_mib(limit)}{self._at()}"
            )
            return told, "memory"
        return "", ""

    def _look(self) -> None:
        """At what it takes, now and then."""
        now = self._clock()
        if now < self._next_memory:
            return
        self._next_memory = now + _MEMORY_INTERVAL_SECONDS
        with suppress(OSError):  # no descriptor left: what was last seen counts
            members = group.members(self.pid)
            self.resident_bytes = group.resident_bytes(members)
            if now >= self._next_times:
                self._next_times = now + _TIMES_INTERVAL_SECONDS
                self._processors.look(now, group.thread_times(members))
        self._peak_bytes = max(self._peak_bytes, self.resident_bytes)

    @property
    def ran_and_waited(self) -> tuple[float, float]:
        """Seconds that it ran on processors, and that it waited for one, with all it started."""
        return self._processors.ran, self._processors.waited

    def verdict(self) -> JobResult:
        """By its last word."""
        assert self.last_word is not None
        if self.last_word["event"] == DONE:
            return self.result("done", "")
        reason = str(self.last_word.get("reason", "the tuning process gave no reason"))[:2000]
        return self.result("failed", reason, "error")

    def death(self) -> JobResult:
        """It ended without a last word."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        if status.si_code == os.CLD_EXITED:
            return self.result(
                "failed",
                f"the tuning process ended with exit code {status.si_status} before its job was done{self._at()}",
                "exit",
            )
        cause: JobCause = "killed" if status.si_status == signal.SIGKILL else "crash"
        return self.result("failed", f"the tuning process {_killed_by(status.si_status)}{self._at()}", cause)

    def result(
        self, outcome: Literal["done", "failed", "cancelled", "starved"], reason: str, cause: JobCause = ""
    ) -> JobResult:
        self._read_errors()
        return JobResult(
            outcome,
            reason,
            cause,
            self._tail.decode("utf-8", "replace").strip() if outcome == "failed" else "",
            self.stage,
            self._clock() - self._started,
            self.running_seconds(),
            self._peak_bytes,
        )

    # --- what is done to it

    def set_paused(self, paused: bool) -> None:
        if paused == (self._paused_since is not None):
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if paused else signal.SIGCONT)
        now = self._clock()
        if self._paused_since is None:
            self._paused_since = now
        else:
            self._paused_seconds += now - self._paused_since
            self._paused_since = None

    def close(self) -> None:
        """End it and everything it started, and wait until all is gone."""
        try:
            left = group.end(self.pid, _END_SECONDS)
            if left:
                _log.error("tuning processes %s do not end, although they were killed", left)
            if not left or self.pid not in left:
                self._process.wait()
                group.reap_adopted(self.pid)
        finally:
            self._selector.close()
            self._close_all()

    def running_seconds(self) -> float:
        """Since its start, without those in which it was paused or waited for a processor."""
        now = self._clock()
        paused = self._paused_seconds + (now - self._paused_since if self._paused_since is not None else 0.0)
        return now - self._started - paused - self._processors.waited

    def _at(self) -> str:
        return f" (while {self.stage})"

    # --- descriptors

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe()
        self._open += pair
        return pair

    def _shut(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        self._shut(descriptor)

    def _close_all(self) -> None:
        for descriptor in self._open.copy():
            self._shut(descriptor)


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "was killed by SIGKILL, most likely by the kernel because memory ran out"
    return f"died by {name}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
