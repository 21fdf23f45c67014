"""After the promotion: is it still right, and still faster, on live requests?

Serving hands over a small sample of executions. Each is run again on the baseline, off the request path: outputs that
disagree roll the generation back at once. While nothing else runs, the same inputs are timed on both, one after the
other; a generation that is slower over at least 30 such pairs, with 99 % confidence, is rolled back too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hone.errors import DeviceLost, HoneError
from hone.specialization import Signature, VersionRef
from hone.tuning.activity import Activity
from hone.tuning.capture import Capture
from hone.tuning.confidence import median_of
from hone.tuning.gate import check_outputs
from hone.tuning.inputs import first_rows, pad_rows
from hone.tuning.ports import Promotion
from hone.types import Array, Engine, EngineInstance

_log = logging.getLogger(__name__)

Cause = Literal["error", "outputs", "latency"]

#: A pair is what is slower when its ratio says so; the numbers of pairs at which one looks, and how often one errs in
#: all: the looks share the error, each getting a quarter of what the one before got (1/4 + 1/16 + ... < 1/2).
MIN_PAIRS = 30
_ERROR = 0.01
_MAX_PAIRS = 960


@dataclass(frozen=True, slots=True)
class WatchOptions:
    sample_interval_seconds: float = 2.0
    max_share: float = 0.01
    """Share of time that running samples again may take."""
    probation_seconds: float = 600.0
    """A generation that did nothing wrong for so long has passed, however few its requests."""


@dataclass(slots=True, eq=False)
class Watched:
    """One promoted generation. `engine` is the tuned one; instances are made on the watching thread, when needed."""

    ref: VersionRef
    generation: int
    signature: Signature
    device: str
    artifact: str
    baseline: Engine
    engine: Engine
    precision: str
    tolerance: float | None
    batching: bool
    mark: int = 0
    """What a thread notes while it runs it; see `running`."""
    since: float = 0.0
    next_sample: float = 0.0
    on_probation: bool = True
    ratios: list[float] = field(default_factory=list)
    next_look: int = MIN_PAIRS
    error_left: float = _ERROR
    instances: tuple[EngineInstance, EngineInstance] | None = None

    def both(self) -> tuple[EngineInstance, EngineInstance]:
        """The baseline's instance, and the tuned one's."""
        if self.instances is None:
            self.instances = (self.baseline.instantiate(), self.engine.instantiate())
        return self.instances


@dataclass(frozen=True, slots=True)
class Incident:
    """A generation that must not serve. It has been rolled back already."""

    watched: Watched
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class _Sample:
    watched: Watched
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Watch:
    """See `ports.Watcher` for what executor threads call; the rest belongs to the tuner's thread."""

    def __init__(
        self,
        promotion: Promotion,
        *,
        options: WatchOptions = WatchOptions(),
        activity: Callable[[], Activity] = lambda: Activity(0, 0),
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], int] = time.perf_counter_ns,
        capture: Capture | None = None,
        running: Callable[[int], AbstractContextManager[None]] = lambda mark: nullcontext(),
    ) -> None:
        """Inside `running(mark)` the watching thread runs the specialization of that mark."""
        self._promotion = promotion
        self.capture = capture or Capture(clock)
        """Executions of the baseline (generation 0) are handed on to it."""
        self._options = options
        self._activity = activity
        self._clock = clock
        self._timer = timer
        self._running = running
        self.num_declined: Counter[tuple[str, int]] = Counter()
        """Executions that tuned engines left to the baseline, by model and version."""
        self._watched: dict[tuple[VersionRef, int], Watched] = {}
        self._samples: deque[_Sample] = deque(maxlen=4)
        self._incidents: deque[Incident] = deque()
        self._lock = threading.Lock()  # of a generation's removal, so that one failure is told once

    # --- called by executor threads

    def failed(self, ref: VersionRef, generation: int, reason: str) -> None:
        self._give_up(ref, generation, "error", f"it failed on a request: {reason}")

    def declined(self, ref: VersionRef, generation: int) -> None:
        with self._lock:
            self.num_declined[ref.model, ref.version] += 1

    def wants_sample(self, ref: VersionRef, generation: int) -> bool:
        if not generation:
            return self.capture.wants(ref)
        watched = self._watched.get((ref, generation))
        return watched is not None and not self._samples and self._clock() >= watched.next_sample

    def sampled(
        self, ref: VersionRef, generation: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        if not generation:
            self.capture.add(ref, inputs)
            return
        watched = self._watched.get((ref, generation))
        if watched is not None:
            watched.next_sample = self._clock() + self._options.sample_interval_seconds
            self._samples.append(_Sample(watched, inputs, outputs))

    # --- called by the tuner's thread

    def begin(self, watched: Watched) -> None:
        watched.since = watched.next_sample = self._clock()
        self._watched[watched.ref, watched.generation] = watched

    def end(self, ref: VersionRef, generation: int | None = None) -> list[Watched]:
        """Watch a generation, or all of a version, no longer; they were not at fault."""
        gone = [key for key in list(self._watched) if key[0] == ref and generation in (None, key[1])]
        return [watched for key in gone if (watched := self._watched.pop(key, None)) is not None]

    def watched(self) -> list[Watched]:
        return list(self._watched.values())

    def step(self, *, idle: bool) -> tuple[list[Incident], list[Watched]]:
        """Look at one sample, where there is one; pairs are timed only when `idle` (no tuning child runs).

        What was rolled back since, and what passed its probation.
        """
        while self._samples:
            sample = self._samples.popleft()
            watched = sample.watched
            with self._promotion.lease(watched.ref, watched.generation) as held:
                if held and (watched.ref, watched.generation) in self._watched:
                    self._examine(sample, idle=idle)
                    break
        now = self._clock()
        passed = [
            watched
            for watched in self.watched()  # a copy: executor threads give up on some meanwhile
            if watched.on_probation
            and (len(watched.ratios) >= MIN_PAIRS or now - watched.since >= self._options.probation_seconds)
        ]
        for watched in passed:
            watched.on_probation = False
        incidents = []  # last: what is taken out here must reach the caller
        while self._incidents:
            incidents.append(self._incidents.popleft())
        return incidents, passed

    def _examine(self, sample: _Sample, *, idle: bool) -> None:
        watched = sample.watched
        began = self._clock()
        names = sorted(sample.outputs)
        try:
            with self._running(watched.mark):
                baseline, tuned = watched.both()
            expected = baseline.run(sample.inputs, names)
        except HoneError as problem:
            _log.info("a sample of %s could not be run on the baseline: %s", watched.ref.model, problem)
            return
        datatypes = {spec.name: spec.datatype for spec in watched.baseline.outputs}
        checks = check_outputs(
            names,
            datatypes,
            expected,
            [sample.outputs[name] for name in names],
            precision=watched.precision,
            tolerance=watched.tolerance,
            inputs="a live request",
        )
        wrong = next((check for check in checks if not check.passed), None)
        if wrong is not None and not _is_finite(sample.inputs):
            # Else anybody could take tuning off a model with one such request.
            _log.info(
                "%s generation %d answers NaN or infinity in a request unlike its baseline, which ONNX leaves open: %s",
                watched.ref.model,
                watched.generation,
                wrong.reason,
                extra={"model": watched.ref.model},
            )
            return
        if wrong is not None:
            self._give_up(watched.ref, watched.generation, "outputs", wrong.reason)
            return
        if idle:
            try:
                with self._running(watched.mark):
                    self._pair(watched, baseline, tuned, sample.inputs, names)
            except DeviceLost:
                return  # not its fault
            except HoneError as problem:
                self._give_up(watched.ref, watched.generation, "error", f"it failed on a live request: {problem}")
                return
        cost = self._clock() - began
        watched.next_sample = self._clock() + max(self._options.sample_interval_seconds, cost / self._options.max_share)

    def _pair(
        self,
        watched: Watched,
        baseline: EngineInstance,
        tuned: EngineInstance,
        inputs: Mapping[str, Array],
        names: list[str],
    ) -> None:
        """Time both, warm, in turns; counted only if serving did nothing meanwhile."""
        num_rows = next(iter(inputs.values())).shape[0] if watched.batching else 0
        rows = watched.signature.rows

        def run_tuned() -> None:
            if num_rows and num_rows < rows:
                first_rows(tuned.run(pad_rows(inputs, rows), names), num_rows)
            else:
                tuned.run(inputs, names)

        subjects: list[Callable[[], object]] = [lambda: baseline.run(inputs, names), run_tuned]
        before = self._activity()
        if before.num_in_flight:
            return
        times = [0, 0]
        for side in (0, 1) if len(watched.ratios) % 2 == 0 else (1, 0):
            subjects[side]()
            started = self._timer()
            subjects[side]()
            times[side] = max(1, self._timer() - started)
        if self._activity() != before:
            return
        watched.ratios.append(times[1] / times[0])
        if len(watched.ratios) >= watched.next_look:
            self._look(watched)

    def _look(self, watched: Watched) -> None:
        error, watched.error_left = watched.error_left / 2, watched.error_left / 2
        watched.next_look = 2 * len(watched.ratios)
        found = median_of(watched.ratios, error)
        if found.low > 1.0:
            self._give_up(
                watched.ref,
                watched.generation,
                "latency",
                f"slower than the baseline on live requests: {found.value:.3g} times as long over"
                f" {len(watched.ratios)} pairs, at least {found.low:.3g} times",
            )
        elif len(watched.ratios) >= _MAX_PAIRS:
            watched.ratios.clear()
            watched.next_look, watched.error_left = MIN_PAIRS, _ERROR

    def _give_up(self, ref: VersionRef, generation: int, cause: Cause, reason: str) -> None:
        with self._lock:
            watched = self._watched.pop((ref, generation), None)
        if watched is None:
            return
        self._promotion.roll_back(ref, generation)
        self._incidents.append(Incident(watched, cause, reason))


def _is_finite(arrays: Mapping[str, Array]) -> bool:
    """Whether no float of a request is NaN or infinite."""
    floats = (array for array in arrays.values() if array.dtype.name.startswith(("float", "bfloat")))
    return all(
        bool(np.isfinite(array if array.dtype.kind == "f" else array.astype(np.float32)).all()) for array in floats
    )


def copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What `Watcher.sampled` wants of views that others reuse."""
    return {name: np.array(array, copy=True, order="C") for name, array in arrays.items()}
