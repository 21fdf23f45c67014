"""Times kernels on a GPU, beside a server that uses it. In the tuning child only, which has a context of its own.

A kernel is warmed, then timed in bursts of launches (captured as a graph, so that the host's time does not count), on
operands that rotate through more memory than the last cache holds. Each burst stands between two of a reference kernel:
what counts is the ratio, as clocks change with heat and load. A kernel that breaks the device takes this process's
context along: it is blocked, and the process has to end.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_runtime import CudaError
from hone.errors import EngineError
from hone.tuning.activity import Activity
from hone.tuning.budget import GPU_RESERVE_BYTES
from hone.tuning.kernel_trials import KernelTrials

_log = logging.getLogger(__name__)

_NS = 1_000_000_000
#: Of a burst: a graph of more takes long to make.
_MAX_LAUNCHES = 4096
Call = Callable[[Sequence[Any]], None]
"""Launches a kernel on one set of operands."""


@dataclass(frozen=True, slots=True)
class ProfilerLimits:
    """What measuring may take."""

    candidate_seconds: float = 5.0
    """Of one candidate; one that is not done then is given up, and one that never ends is blocked."""
    burst_seconds: float = 0.05
    """The longest stretch of launches: requests in flight wait so long at most."""
    sample_seconds: float = 0.002
    """What a sample should fill, of short kernels."""
    reserve_bytes: int = GPU_RESERVE_BYTES
    """Of the device's free memory, what is left for serving."""
    num_rounds: int = 5
    max_sets: int = 4096
    cut: float = 1.5
    """After its first round, who takes so many times the best's time is measured no further."""


@dataclass(frozen=True, slots=True)
class Timing:
    """`ns` of a launch, brought to the reference's usual time. `by` says what was timed: a "graph", or single
    "launches" where capturing was refused."""

    ns: float
    num_rounds: int
    by: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Not measured, and why."""

    reason: str


class DeviceLost(EngineError):
    """The device is of no use to this process any more: a new one has to go on."""


@dataclass(eq=False, slots=True)
class Subject:
    """A kernel to measure: its digest, how it is launched, and its operands, once or many times over."""

    digest: str
    call: Call
    sets: Sequence[Sequence[Any]]
    _graph: int = 0
    _num_launches: int = 0
    _by: str = ""
    _usual_ns: list[float] = field(default_factory=list)


class Profiler:
    """One device's; for one thread. `activity` says what serving does meanwhile."""

    def __init__(
        self,
        device: CudaDevice,
        trials: KernelTrials,
        *,
        activity: Callable[[], Activity] = lambda: Activity(0, 0),
        limits: ProfilerLimits = ProfilerLimits(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        device.bind()
        self.device, self.trials, self.limits = device, trials, limits
        self._activity, self._clock, self._sleep = activity, clock, sleep
        cuda = device.cuda
        self.stream = cuda.create_stream()
        self._first, self._last = cuda.create_event(), cuda.create_event()
        self.l2_bytes = cuda.l2_bytes(device.ordinal)

    def close(self) -> None:
        cuda = self.device.cuda
        cuda.destroy_event(self._first)
        cuda.destroy_event(self._last)
        cuda.destroy_stream(self.stream)

    @property
    def room_bytes(self) -> int:
        """What may be taken of the device's memory now; below 0 where the reserve for serving is not even free."""
        free, _ = self.device.cuda.free_and_total_bytes()
        return free - self.limits.reserve_bytes

    def num_sets(self, set_bytes: int) -> int | Skipped:
        """How many times operands of so many bytes are wanted: over twice the last cache, as far as memory goes."""
        room = self.room_bytes
        if set_bytes > room:
            return Skipped(
                f"its operands take {_mib(set_bytes)}, and {_mib(max(0, room))} of the GPU's memory are free beside"
                f" the {_mib(self.limits.reserve_bytes)} kept for serving"
            )
        wanted = 1 + -(-2 * self.l2_bytes // max(1, set_bytes))
        return max(1, min(wanted, self.limits.max_sets, room // max(1, set_bytes)))

    def run_once(self, subject: Subject) -> Skipped | None:
        """Launch on the first operands and wait. Raises DeviceLost."""
        with self.trials.trying(subject.digest):
            return self._attempt(subject, lambda: subject.call(subject.sets[0]))

    def measure(
        self, subject: Subject, reference: Subject | None = None, best_ns: float = float("inf")
    ) -> Timing | Skipped:
        """Time a kernel that has run once, in turns with the reference (which has been measured before). Raises
        DeviceLost."""
        deadline = self._clock() + self.limits.candidate_seconds
        with self.trials.trying(subject.digest):
            try:
                prepared = self._prepare(subject)
                if prepared is not None:
                    return prepared
                return self._rounds(subject, reference, best_ns, deadline)
            finally:
                self._forget(subject)

    def settle(self, reference: Subject) -> Timing | Skipped:
        """Measure the reference itself, and keep its launches at hand. Raises DeviceLost."""
        with self.trials.trying(reference.digest):
            prepared = self._prepare(reference)
            if prepared is not None:
                return prepared
            times: list[float] = []
            deadline = self._clock() + self.limits.candidate_seconds
            while len(times) < self.limits.num_rounds and (not times or self._clock() < deadline):
                times.append(self._burst(reference))
            reference._usual_ns = [statistics.median(times)]
            return Timing(reference._usual_ns[0], len(times), reference._by)

    def release(self, reference: Subject) -> None:
        self._forget(reference)

    # --- rounds

    def _rounds(self, subject: Subject, reference: Subject | None, best_ns: float, deadline: float) -> Timing | Skipped:
        times: list[float] = []
        while len(times) < self.limits.num_rounds:
            if reference is None:
                times.append(self._burst(subject))
            else:
                before = self._burst(reference)
                taken = self._burst(subject)
                after = self._burst(reference)
                times.append(taken / ((before + after) / 2) * reference._usual_ns[0])
            if min(times) > self.limits.cut * best_ns:
                break
            if self._clock() > deadline:
                break
        return Timing(statistics.median(times), len(times), subject._by)

    def _prepare(self, subject: Subject) -> Skipped | None:
        """Find out how many launches a burst has, and capture them."""
        once = self._single(subject)
        if isinstance(once, Skipped):
            return once
        most = self.limits.burst_seconds * _NS / max(once, 1.0)
        enough = self.limits.sample_seconds * _NS / max(once, 1.0)
        subject._num_launches = max(1, int(min(most, max(enough, len(subject.sets)), _MAX_LAUNCHES)))
        cuda = self.device.cuda
        if subject._num_launches == 1:
            subject._by = "launches"
            return None
        try:
            cuda.begin_capture(self.stream)
            try:
                self._launch(subject)
            finally:
                subject._graph = cuda.end_capture(self.stream)
            subject._by = "graph"
        except Exception as problem:  # what compiled code raises, or CUDA's refusal to capture
            self._check(subject, problem)
            self._forget(subject)  # a graph of some of the launches would be timed for all of them
            _log.info("kernel %s is timed by single launches: %s", subject.digest[:12], problem)
            subject._by = "launches"
        return None

    def _single(self, subject: Subject) -> float | Skipped:
        """Nanoseconds of one launch, with caches and code warm."""
        cuda = self.device.cuda
        refused = self._attempt(subject, lambda: subject.call(subject.sets[0]))
        if refused is not None:
            return refused

        def launch() -> None:
            cuda.record(self._first, self.stream)
            subject.call(subject.sets[-1])
            cuda.record(self._last, self.stream)

        refused = self._attempt(subject, launch)
        if refused is not None:
            return refused
        self._rest()
        return cuda.elapsed_ns(self._first, self._last)

    def _burst(self, subject: Subject) -> float:
        """Nanoseconds a launch, of one burst. Raises DeviceLost."""
        cuda = self.device.cuda

        def launch() -> None:
            cuda.record(self._first, self.stream)
            if subject._graph:
                cuda.replay(subject._graph, self.stream)
            else:
                self._launch(subject)
            cuda.record(self._last, self.stream)

        refused = self._attempt(subject, launch)
        if refused is not None:  # it ran before: the device is not what it was
            raise DeviceLost(f"kernel {subject.digest[:12]} ran before and now does not: {refused.reason}")
        self._rest()
        return cuda.elapsed_ns(self._first, self._last) / subject._num_launches

    def _launch(self, subject: Subject) -> None:
        with self.device.launching_on(self.stream):
            for at in range(subject._num_launches):
                subject.call(subject.sets[at % len(subject.sets)])

    def _forget(self, subject: Subject) -> None:
        if subject._graph:
            graph, subject._graph = subject._graph, 0
            self.device.cuda.destroy_graph(graph)

    def _rest(self) -> None:
        """After a burst: as long again, where requests are in flight."""
        if self._activity().num_in_flight:
            self._sleep(self.limits.burst_seconds)

    # --- what may go wrong

    def _attempt(self, subject: Subject, launch: Callable[[], None]) -> Skipped | None:
        """Launch and wait until it is done: within the candidate's time, else the device is taken for hung."""
        try:
            with self.device.launching_on(self.stream):
                self.device.cuda.clear_error()
                launch()
            self._wait(subject)
        except DeviceLost:
            raise
        except Exception as problem:  # compiled code raises whatever tvm-ffi makes of it
            self._check(subject, problem)
            return Skipped(_first_line(problem))
        return None

    def _wait(self, subject: Subject) -> None:
        """Until the stream is done; by asking, since a wait for a kernel that never ends never ends."""
        cuda = self.device.cuda
        done = cuda.create_event()
        lost = False
        try:
            cuda.record(done, self.stream)
            deadline = self._clock() + self.limits.candidate_seconds
            while not cuda.has_happened(done):
                if self._clock() > deadline:
                    lost = True
                    reason = f"it ran for more than {self.limits.candidate_seconds:g} s"
                    self.trials.block(subject.digest, reason)
                    raise DeviceLost(f"kernel {subject.digest[:12]} hangs on the GPU: {reason}")
                self._sleep(0.0)
        finally:
            if not lost:
                cuda.destroy_event(done)

    def _check(self, subject: Subject, problem: Exception) -> None:
        """Whether the device survived. Raises DeviceLost where it did not."""
        try:
            self.device.cuda.synchronize(self.stream)
        except CudaError as after:
            problem, poisoned = after, after.is_poisoning
        else:
            poisoned = isinstance(problem, CudaError) and problem.is_poisoning
        if poisoned:
            self.trials.block(subject.digest, f"it broke the GPU's context: {_first_line(problem)}")
            raise DeviceLost(
                f"kernel {subject.digest[:12]} broke the GPU's context: {_first_line(problem)}"
            ) from problem


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
