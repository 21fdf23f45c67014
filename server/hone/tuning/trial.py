"""A tuned engine on trial against the baseline, for one signature: the gate's evidence, gathered in the child."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hone.errors import HoneError
from hone.specialization import Signature
from hone.tuning.activity import Activity
from hone.tuning.domains import NoDomain
from hone.tuning.gate import OutputCheck, check_outputs
from hone.tuning.inputs import Domains, InputSet, aligned_copy, draw_many, first_rows, narrower, pad_rows, rotation
from hone.tuning.measure import (
    Clock,
    Comparison,
    Inputs,
    LocalRunner,
    Patience,
    Plan,
    Reference,
    compare,
    wait_for_idle_threads,
)
from hone.tuning.samples import repeated_rows
from hone.types import BYTES, Array, EngineInstance, TensorSpec

_NUM_SYNTHETIC = 4
_MAX_SAMPLES = 4
#: Baselines may be random (noise in a graph): run twice, their outputs must agree.
_REPEATABLE = "the same inputs twice"


@dataclass(frozen=True, slots=True)
class NoTrial:
    """There is nothing to put the engine on trial with; the reason says what would help."""

    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Input sets that the baseline takes, with what it makes of them."""

    sets: tuple[InputSet, ...]
    expected: tuple[list[Array], ...]
    domains: Domains | None
    """Where synthetic inputs were drawn from; None where only real data can be had."""


def gather(
    baseline: EngineInstance,
    outputs: Sequence[TensorSpec],
    signature: Signature,
    domains: Domains | NoDomain,
    samples: Sequence[InputSet],
    *,
    batching: bool,
) -> Evidence | NoTrial:
    """Real data first, then made-up inputs. Raises nothing: what the baseline refuses is no evidence."""
    texts = [spec.name for spec in outputs if spec.datatype == BYTES]
    if texts:
        return NoTrial(f"output '{texts[0]}' holds texts, which are not compared")
    real = _adapted(samples, signature, batching=batching)[:_MAX_SAMPLES]
    tries = [] if isinstance(domains, NoDomain) else [domains, *narrower(domains)]
    names = [spec.name for spec in outputs]
    reason = domains.reason if isinstance(domains, NoDomain) else "no inputs could be made up"
    sets, expected = _accepted(baseline, names, real)
    for attempt in tries:
        synthetic = draw_many(attempt, _NUM_SYNTHETIC)
        try:
            made = [list(baseline.run(one.arrays, names)) for one in synthetic]
        except HoneError as problem:
            reason = f"the baseline refuses made-up inputs ({problem}); give model_warmup data"
            continue
        return Evidence((*sets, *synthetic), (*expected, *made), attempt)
    if not sets:
        return NoTrial(reason)
    return Evidence(tuple(sets), tuple(expected), None)


def _accepted(
    baseline: EngineInstance, names: Sequence[str], sets: Sequence[InputSet]
) -> tuple[list[InputSet], list[list[Array]]]:
    kept, expected = [], []
    for one in sets:
        try:
            expected.append(list(baseline.run(one.arrays, names)))
        except HoneError:
            continue
        kept.append(one)
    return kept, expected


def _adapted(samples: Sequence[InputSet], signature: Signature, *, batching: bool) -> list[InputSet]:
    """Samples of this signature; of another batch size too, their rows repeated or cut."""
    found = []
    for sample in samples:
        arrays = sample.arrays
        if batching and signature.rows:
            if not all(array.ndim and array.shape[0] for array in arrays.values()):
                continue
            arrays = repeated_rows(arrays, signature.rows)
        if signature.fits(arrays):
            found.append(InputSet(sample.name, dict(arrays)))
    return found


@dataclass(slots=True)
class Trial:
    """Checks and measurements of one tuned engine. Both instances belong to the calling thread."""

    baseline: EngineInstance
    tuned: EngineInstance
    outputs: Sequence[TensorSpec]
    signature: Signature
    evidence: Evidence
    precision: str
    tolerance: float | None
    run_threads: int = 1
    cache_bytes: int = 32 << 20
    activity: Callable[[], Activity] = lambda: Activity(0, 0)
    tell: Callable[[float], None] = lambda share: None
    plan: Plan = field(default_factory=Plan)
    patience: Patience = field(default_factory=Patience)
    """Of all comparisons of one child: what one learned of the load holds for the next."""
    clock: Clock = time.perf_counter_ns
    _rotating: list[Inputs] = field(default_factory=list)
    _reference: Reference | None = None

    def check(self) -> list[OutputCheck]:
        """Compare outputs on every set; ends at the first that is wrong. Raises nothing of the engines."""
        names = [spec.name for spec in self.outputs]
        datatypes = {spec.name: spec.datatype for spec in self.outputs}
        checks: list[OutputCheck] = []
        for one, expected in zip(self.evidence.sets, self.evidence.expected, strict=True):
            subjects: list[tuple[EngineInstance, str]] = [(self.tuned, one.name)]
            if not checks:
                subjects.insert(0, (self.baseline, _REPEATABLE))
            for engine, label in subjects:
                try:
                    found = engine.run(one.arrays, names)
                except HoneError as problem:
                    return [*checks, OutputCheck("", label, 0.0, 0.0, f"it failed on {label}: {problem}")]
                checks += check_outputs(
                    names,
                    datatypes,
                    expected,
                    found,
                    precision=self.precision,
                    tolerance=self.tolerance,
                    inputs=label,
                )
                wrong = next((check for check in checks if not check.passed), None)
                if wrong is not None and label is _REPEATABLE:
                    reason = f"the baseline's own outputs change from run to run ({wrong.reason})"
                    return [replace(wrong, reason=reason)]
                if wrong is not None:
                    return checks
        return checks

    def measure(self) -> Comparison:
        """End to end, for the signature itself. Raises HoneError when an engine fails in the middle."""
        names = [spec.name for spec in self.outputs]
        return self._compare(
            lambda inputs: self.baseline.run(inputs, names), lambda inputs: self.tuned.run(inputs, names), self.plan
        )

    def smallest_padded(self, above: int) -> int:
        """The smallest batch for which padding to this bucket is faster than the baseline, of those above `above`.

        A tuned run costs the same for every batch, and the baseline's grows with it, so the border is searched by
        halving. Returns the bucket itself where padding never pays.
        """
        rows = self.signature.rows
        low, high = above + 1, rows  # `high` always pays: it is the bucket itself
        plan = replace(self.plan, looks=self.plan.looks[:2], seconds=self.plan.seconds / 4)
        while low < high:
            middle = (low + high) // 2
            if self._compare_padded(middle, plan).is_faster(plan.margin):
                high = middle
            else:
                low = middle + 1
        return high

    def _compare_padded(self, num_rows: int, plan: Plan) -> Comparison:
        names = [spec.name for spec in self.outputs]
        rows = self.signature.rows

        def cut(inputs: Inputs) -> dict[str, Array]:
            return {name: array[:num_rows] for name, array in inputs.items()}

        def padded(inputs: Inputs) -> list[Array]:
            return first_rows(self.tuned.run(pad_rows(cut(inputs), rows), names), num_rows)

        return self._compare(lambda inputs: self.baseline.run(cut(inputs), names), padded, plan)

    def _compare(
        self, baseline: Callable[[Inputs], object], candidate: Callable[[Inputs], object], plan: Plan
    ) -> Comparison:
        if self._reference is None:
            self._reference = Reference(self.run_threads)
        runner = LocalRunner(
            baseline,
            candidate,
            self.inputs(),
            activity=self.activity,
            reference=self._reference,
            settle=wait_for_idle_threads,
            clock=self.clock,
        )
        return compare(runner, plan, patience=self.patience, tell=self.tell)

    def inputs(self) -> list[Inputs]:
        if not self._rotating:
            domains = self.evidence.domains
            sets: Sequence[InputSet] = (
                self.evidence.sets if domains is None else rotation(domains, cache_bytes=self.cache_bytes)
            )
            self._rotating = [_aligned(one.arrays) for one in sets]
        return self._rotating


def _aligned(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Copies that begin where serving's buffers begin, at a cache line: an engine that needs alignment copies else."""
    return {name: aligned_copy(array) for name, array in arrays.items()}
