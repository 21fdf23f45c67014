"""What tuning may take: seconds a model, a share of the cores, memory, and when it steps aside for requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hone.tuning.activity import Activity

GIB = 1 << 30
#: Of a tuning process itself, with TVM and a model.
OWN_BYTES = GIB
#: What nvcc takes for one kernel, by the GPU's architecture: CUTLASS 3.x is by far the largest.
_COMPILER_BYTES = {"sm_90a": 4 * GIB, "sm_100a": 4 * GIB}
_SMALL_COMPILER_BYTES = GIB * 3 // 2
_MAX_COMPILERS = 2
#: Of a GPU's free memory, what is left for serving.
GPU_RESERVE_BYTES = GIB
#: Of free memory, what stays free beside tuning.
_RESERVE_BYTES = GIB // 2


def compiler_bytes(architecture: str) -> int:
    """Memory of one compiler of kernels for a GPU's architecture, such as "sm_90a"."""
    return _COMPILER_BYTES.get(architecture, _SMALL_COMPILER_BYTES)


def num_compilers(architecture: str, memory_bytes: int | None, num_threads: int) -> int:
    """How many may run side by side within so much memory, at least one."""
    fitting = _MAX_COMPILERS
    if memory_bytes is not None:
        fitting = (memory_bytes - OWN_BYTES) // compiler_bytes(architecture)
    return max(1, min(_MAX_COMPILERS, fitting, num_threads))


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the tuning of one model version."""

    seconds: float = 1200.0
    """Seconds that its children may run (time in which they are paused does not count)."""
    cpu_share: float = 0.5
    """Share of the cores that compiling may use; at least one core, and less than all where there are several."""
    memory_bytes: int = 4 * GIB
    """Resident memory of a child with everything it started."""
    memory_is_set: bool = False
    """Whether somebody asked for that very number; else jobs for GPUs may take what one of their compilers needs."""
    nice: int = 19
    pause: bool = True
    """Step aside while requests are in flight."""
    silence_seconds: float = 300.0
    """A child that tells no progress for so long hangs."""

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds: expected 0 or more, found {self.seconds:g}")
        if not 0 < self.cpu_share <= 1:
            raise ValueError(f"cpu_share: expected a share in (0, 1], found {self.cpu_share:g}")
        if self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes: expected more than 0, found {self.memory_bytes}")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice: expected 0 to 19, found {self.nice}")
        if self.silence_seconds <= 0:
            raise ValueError(f"silence_seconds: expected more than 0, found {self.silence_seconds:g}")

    def memory_of_job(self, architecture: str, free_bytes: int | None) -> int:
        """The limit for a job: that of the settings; for GPUs, where nobody set it, enough for one compiler as far as
        so much is free (None: not known)."""
        if self.memory_is_set or not architecture.startswith("sm_"):
            return self.memory_bytes
        enough = max(self.memory_bytes, 2 * OWN_BYTES + compiler_bytes(architecture))
        if free_bytes is None:
            return enough
        return max(self.memory_bytes, min(enough, free_bytes - _RESERVE_BYTES))

    def build_threads(self, num_cores: int) -> int:
        """Threads for compiling: fewer than cores, where there is more than one."""
        return max(1, min(int(num_cores * self.cpu_share), num_cores - 1))


class Starvation:
    """Tells when a child of idle priority gets next to nothing of the time that it asks for: others take all there is,
    and it would never end. Then another child is to take its slices (see `Pacer`)."""

    def __init__(self, *, min_share: float = 0.1, window_seconds: float = 60.0) -> None:
        self._min_share = min_share
        self._window_seconds = window_seconds
        self._ran = self._waited = 0.0

    def step(self, ran: float, waited: float) -> bool:
        """Seconds since its start that the child ran, and that it waited for a processor."""
        asked = (ran - self._ran) + (waited - self._waited)
        if asked < self._window_seconds:
            return False
        share = (ran - self._ran) / asked
        self._ran, self._waited = ran, waited
        return share < self._min_share


class Pacer:
    """Says when a child is to be stopped for the sake of requests, and when to go on.

    It is for children that cannot have idle priority, or that starved with it. Such a child runs while serving is
    quiet. While it is busy the child runs in short slices, which add up to `min_share` of that time: so its work is
    done within `1 / min_share` times what it takes on an idle machine, however busy serving is, give or take what the
    operating system's scheduler takes from a process of low priority.
    """

    def __init__(
        self,
        read: Callable[[], Activity],
        *,
        min_share: float = 0.4,
        quiet_seconds: float = 0.05,
        slice_seconds: float = 0.1,
    ) -> None:
        if not 0 < min_share <= 1:
            raise ValueError(f"min_share: expected a share in (0, 1], found {min_share:g}")
        self._read = read
        self._min_share = min_share
        self._quiet_seconds = quiet_seconds
        self._slice_seconds = slice_seconds
        self._last_read: Activity | None = None
        self._last_seconds: float | None = None
        self._busy_until = float("-inf")
        self._owed = 0.0
        """Seconds of running that the child is behind its share."""
        self.paused = False

    def step(self, now: float) -> bool:
        """Whether the child is to be stopped from `now` (seconds of any steady clock) until the next step."""
        elapsed = max(0.0, now - self._last_seconds) if self._last_seconds is not None else 0.0
        self._last_seconds = now
        activity = self._read()
        if activity.num_in_flight or (self._last_read is not None and activity != self._last_read):
            self._busy_until = now + self._quiet_seconds
        self._last_read = activity
        if now >= self._busy_until:
            self._owed = 0.0
            self.paused = False
            return False
        self._owed += elapsed * (self._min_share if self.paused else self._min_share - 1.0)
        # A slice begins when a whole one is owed and ends when the debt is paid.
        slice_owed = self._slice_seconds * (1.0 - self._min_share)
        self.paused = self._owed < slice_owed if self.paused else self._owed <= 0.0
        return self.paused
