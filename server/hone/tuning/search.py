"""Which candidate of a template is fastest for a workload, on this machine. In the child only.

Candidates are built, compared with the template's own first guess, and timed a few times; the best few are then timed
in turns, so that what disturbs one disturbs all. They come best guess first, so a search ends when a number of them in
a row was no better: fewer for short kernels, where there is little to win. The ranking is kept as a decision: no model
asks again.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi

from hone.compiler.build import BuildFailed
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import BuiltKernel, Candidate, Template
from hone.compiler.templates.registry import template_for, template_named
from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm import aligned_empty
from hone.kernels import DecisionKey, DeviceKey, Entry, KernelsCache
from hone.tuning.artifacts import Sources, toolchain_of
from hone.types import NUMPY_DTYPES, Array

_log = logging.getLogger(__name__)

_FINALISTS = 4
_FINAL_ROUNDS = 9
_FIRST_TIMES = 3
_SAMPLE_NS = 500_000
_MAX_REPEATS = 1000
#: Candidates in a row that may be no better, by the nanoseconds of the best.
_PATIENCE = ((20_000, 5), (100_000, 10), (500_000, 20), (float("inf"), 40))
_BETTER = 0.98
#: Candidates compute the same sums in other orders.
_TOLERANCE = 1e-3
_DTYPES = {dtype.name: dtype for datatype, dtype in NUMPY_DTYPES.items() if datatype != "BYTES"}


@dataclass(slots=True)
class SearchCounts:
    """What searching took, for metrics."""

    num_built: int = 0
    num_measured: int = 0
    num_failed: int = 0
    num_remembered: int = 0
    """Workloads whose decision was in the cache."""
    build_seconds: float = 0.0
    measure_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranked:
    candidate: Candidate
    ns: float

    def fields(self) -> dict[str, Any]:
        return {**self.candidate.fields(), "ns": self.ns}


@dataclass(slots=True)
class Search:
    """Decides workloads for one device. `tell` hears what is tried, and the best so far."""

    cache: KernelsCache
    device: DeviceKey
    target: CpuTarget
    sources: Sources
    counts: SearchCounts = field(default_factory=SearchCounts)
    clock: Callable[[], int] = time.perf_counter_ns
    _known: dict[str, Candidate] = field(default_factory=dict)
    _winners: dict[str, list[Candidate]] = field(default_factory=dict)

    def decide(
        self,
        workloads: Mapping[Workload, int],
        seconds: float,
        tell: Callable[[float, str], None],
    ) -> dict[str, Candidate]:
        """The best candidate by the workload's digest. Workloads left when the time is up take their template's first
        guess, and are decided another time."""
        deadline = time.monotonic() + seconds
        found: dict[str, Candidate] = {}
        # The heaviest first: time may run out.
        ordered = sorted(workloads, key=lambda workload: -workloads[workload] * _size_of(workload))
        for i, workload in enumerate(ordered):
            tell(i / len(ordered), f"searching {workload}")
            candidate = self._recall(workload)
            left = deadline - time.monotonic()
            if candidate is None and left > 0:
                share = max(1.0, 2 * left / (len(ordered) - i))
                candidate = self._search(workload, min(left, share), lambda text, i=i: tell(i / len(ordered), text))  # type: ignore[misc]
            if candidate is not None:
                found[workload.digest] = candidate
        return found

    def _recall(self, workload: Workload) -> Candidate | None:
        if workload.digest in self._known:
            return self._known[workload.digest]
        entry = self.cache.get("decisions", self._key(workload).digest, self.device.digest)
        if not isinstance(entry, Entry):
            return None
        try:
            best = json.loads(entry.files["ranking.json"].read_bytes())["ranking"][0]
            candidate = Candidate.from_fields(best)
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None  # evicted meanwhile, or not understood: searched again
        if template_named(candidate.template) is None:
            return None
        self.counts.num_remembered += 1
        self._remember(workload, candidate)
        return candidate

    def _remember(self, workload: Workload, candidate: Candidate) -> None:
        self._known[workload.digest] = candidate
        winners = self._winners.setdefault(workload.op, [])
        if candidate not in winners:
            winners.insert(0, candidate)

    def _ordered(self, template: Template, workload: Workload) -> list[Candidate]:
        """The template's first guess, then what won for others of the operator (another batch size, say), then the
        rest in the template's order."""
        candidates = list(template.candidates(workload, self.target))
        winners = [candidate for candidate in self._winners.get(workload.op, ()) if candidate in candidates]
        return list(dict.fromkeys([*candidates[:1], *winners, *candidates]))

    def _search(self, workload: Workload, seconds: float, tell: Callable[[str], None]) -> Candidate | None:
        template = template_for(workload, self.target)
        if template is None:
            return None
        deadline = time.monotonic() + seconds
        data = _Data(workload)
        candidates = self._ordered(template, workload)
        tried: list[tuple[float, Candidate, BuiltKernel]] = []
        expected: Array | None = None
        complete = True
        best_ns, num_no_better = float("inf"), 0
        for i, candidate in enumerate(candidates):
            if tried and time.monotonic() > deadline:
                complete = False
                break
            if num_no_better >= next(patience for ns, patience in _PATIENCE if best_ns <= ns):
                break
            best = f", best {best_ns / 1e3:.1f} us" if tried else ""
            tell(f"searching {workload}: candidate {i + 1} of {len(candidates)}{best}")
            kernel = self._build(template, workload, candidate)
            if kernel is None:
                continue
            output = self._run(kernel, data)
            if output is None or (expected is not None and not _close(expected, output)):
                self.counts.num_failed += 1
                continue
            expected = output if expected is None else expected
            ns = min(self._time(kernel, data) for _ in range(_FIRST_TIMES))
            tried.append((ns, candidate, kernel))
            num_no_better = 0 if ns < _BETTER * best_ns else num_no_better + 1
            best_ns = min(best_ns, ns)
            self.counts.num_measured += 1
        if not tried:
            return None
        ranking = self._final(sorted(tried, key=lambda one: one[0]), data)
        self._remember(workload, ranking[0].candidate)
        if complete:
            self._keep(workload, ranking)
        return ranking[0].candidate

    def _build(self, template: Template, workload: Workload, candidate: Candidate) -> BuiltKernel | None:
        began = time.monotonic()
        try:
            kernel = template.build(workload, candidate, self.target)
        except BuildFailed as problem:
            _log.info("candidate %s of %s: %s", candidate, workload, problem)
            self.counts.num_failed += 1
            return None
        finally:
            self.counts.build_seconds += time.monotonic() - began
        self.counts.num_built += 1
        return kernel

    def _final(self, tried: Sequence[tuple[float, Candidate, BuiltKernel]], data: _Data) -> list[Ranked]:
        """The finalists in turns, by their medians; the others behind them, as they were."""
        finalists = tried[:_FINALISTS]
        times: list[list[float]] = [[] for _ in finalists]
        for i in range(_FINAL_ROUNDS if len(finalists) > 1 else 1):
            turn = list(enumerate(finalists))
            for at, (_, _, kernel) in turn if i % 2 == 0 else reversed(turn):
                times[at].append(self._time(kernel, data))
        ranked = [
            Ranked(candidate, statistics.median(taken))
            for (_, candidate, _), taken in zip(finalists, times, strict=True)
        ]
        ranked.sort(key=lambda one: one.ns)
        return ranked + [Ranked(candidate, ns) for ns, candidate, _ in tried[_FINALISTS:]]

    def _run(self, kernel: BuiltKernel, data: _Data) -> Array | None:
        data.output[...] = 0
        try:
            kernel(*data.tensors)
        except Exception as problem:  # compiled code raises whatever tvm-ffi makes of it
            _log.info("kernel %s failed: %s", kernel.digest, problem)
            return None
        return data.output.copy()

    def _time(self, kernel: BuiltKernel, data: _Data) -> float:
        """Nanoseconds of a call."""
        began = time.monotonic()
        started = self.clock()
        kernel(*data.tensors)
        once = max(1, self.clock() - started)
        repeats = max(1, min(_MAX_REPEATS, _SAMPLE_NS // once))
        started = self.clock()
        for _ in range(repeats):
            kernel(*data.tensors)
        taken = (self.clock() - started) / repeats
        self.counts.measure_seconds += time.monotonic() - began
        return taken

    def _keep(self, workload: Workload, ranking: Sequence[Ranked]) -> None:
        key = self._key(workload)
        told = {"workload": str(workload), "ranking": [one.fields() for one in ranking]}
        data = json.dumps(told, indent=2).encode()
        self.cache.publish("decisions", key.digest, self.device.digest, {"ranking.json": data}, {"key": key.fields})

    def _key(self, workload: Workload) -> DecisionKey:
        return DecisionKey(
            workload={**workload.fields(), "threads": self.target.num_threads},
            templates_sha256=self.sources.templates_sha256,
            precision="f32",
            device=self.device.digest,
            toolchain=toolchain_of(self.device),
        )


class _Data:
    """Random tensors for a workload: its inputs, then its output."""

    def __init__(self, workload: Workload) -> None:
        generator = np.random.default_rng(0)
        self.inputs = [_random(tensor, generator) for tensor in workload.inputs]
        self.output = aligned_empty(workload.output.shape, _DTYPES[workload.output.dtype])
        self.tensors = [tvm_ffi.from_dlpack(array) for array in (*self.inputs, self.output)]


def _random(tensor: TensorType, generator: np.random.Generator) -> Array:
    dtype = _DTYPES[tensor.dtype]
    array = aligned_empty(tensor.shape, dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        array[...] = generator.integers(0, 2, tensor.shape)
    else:
        array[...] = generator.uniform(0.1, 1.0, tensor.shape)
    return array


def _close(expected: Array, found: Array) -> bool:
    want, got = expected.astype(np.float64), found.astype(np.float64)
    scale = float(np.sqrt(np.mean(np.square(want)))) if want.size else 0.0
    return bool(np.all(np.abs(want - got) <= _TOLERANCE * np.maximum(np.abs(want), scale)))


def _size_of(workload: Workload) -> int:
    return workload.output.num_elements * max((tensor.num_elements for tensor in workload.inputs[1:2]), default=1)
