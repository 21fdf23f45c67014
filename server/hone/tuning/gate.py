"""Between "built" and "serving": are the outputs right, and is it faster. Verdicts are values with all their numbers.

An output element passes when it differs from the baseline's by at most `tolerance * max(|expected|, scale)`, where
`scale` is the root mean square of the expected output, at most 1: elements near zero are held to the size of their
neighbours, and those of large outputs to an absolute difference. Where the arithmetic inside has low precision,
rounding errors of many layers add up like noise: there a tolerance bounds their root mean square, and ten times it the
largest. Noise of that size has no such element in a million, and a wrong kernel stays within neither. Integers and
booleans are compared exactly; NaN and infinities must be in the same places. Where an output is nothing but those on
all input sets, nothing was compared, and nothing passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.tuning.measure import Comparison, NotMeasured
from hone.types import BYTES, NUMPY_DTYPES, Array

#: Largest normalized difference by the datatype of the output. Reordered sums and approximations of exp, erf and tanh
#: stay well below these; a wrong kernel does not.
TOLERANCES = {"FP64": 1e-6, "FP32": 1e-3, "FP16": 1e-2, "BF16": 4e-2}
#: The same when the arithmetic inside is less precise than the outputs, by the precision asked for.
PRECISION_TOLERANCES = {"bf16": 4e-2, "f16": 1e-2, "tf32": 4e-3, "int8": 1e-1}
#: In these a tolerance is of the root mean square; so many times it is what a single element may be off.
_NOISY, _PEAK = frozenset({"bf16"}), 10.0
_FLOATS = frozenset(TOLERANCES)
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """One output of one input set. `reason` is empty where it passed."""

    output: str
    inputs: str
    max_error: float
    """Largest normalized difference, or, where noise is allowed, the larger of the root mean square of the differences
    and a tenth of the largest; for integers and booleans 1 where any element differs."""
    tolerance: float
    reason: str = ""
    is_evidence: bool = True
    """Whether a number was compared, or there was none to compare. Without any, a wrong kernel passes too."""

    @property
    def passed(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        told = {"output": self.output, "inputs": self.inputs, "max_error": self.max_error, "tolerance": self.tolerance}
        return {**told, "reason": self.reason} if self.reason else told


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one specialization. `reason` is empty where it passed."""

    reason: str
    checks: tuple[OutputCheck, ...] = ()
    comparison: Comparison | None = None
    margin: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.reason

    @property
    def is_certain(self) -> bool:
        """Whether a refusal would be the same on another day: outputs are wrong, or it surely is not faster."""
        if any(not check.passed for check in self.checks) or _never_compared(self.checks):
            return True
        measured = self.comparison
        return measured is not None and not measured.provisional and measured.is_not_faster(self.margin)

    @property
    def max_error(self) -> float:
        return max((check.max_error for check in self.checks), default=0.0)

    @property
    def tolerance(self) -> float:
        """That of the output with the largest error."""
        return max(self.checks, key=lambda check: check.max_error, default=_NO_CHECK).tolerance

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "reason": self.reason,
            "max_error": self.max_error,
            "tolerance": self.tolerance,
            "margin": self.margin,
            "checks": [check.to_json() for check in self.checks if not check.passed] or len(self.checks),
            **(self.comparison.to_json() if self.comparison is not None else {}),
        }


def tolerance_of(datatype: str, precision: str, setting: float | None) -> float:
    """The model's own setting where it has one; else by the output's datatype and the precision inside, whichever
    allows more. 0 for exact datatypes, which no setting changes."""
    if datatype not in _FLOATS:
        return 0.0
    if setting is not None:
        return setting
    return max(TOLERANCES[datatype], PRECISION_TOLERANCES.get(precision, 0.0))


def check_output(
    name: str, datatype: str, expected: Array, found: Array, tolerance: float, inputs: str, *, noisy: bool = False
) -> OutputCheck:
    """Compare one output with the baseline's. `inputs` names the input set; `noisy`: see the module's docstring."""

    def refused(reason: str, error: float = np.inf) -> OutputCheck:
        return OutputCheck(name, inputs, _limited(error), tolerance, f"output '{name}' on {inputs}: {reason}")

    if found.shape != expected.shape:
        return refused(f"expected shape {list(expected.shape)}, found {list(found.shape)}")
    if datatype == BYTES:
        return refused("texts are not compared")
    if found.dtype != NUMPY_DTYPES[datatype]:
        return refused(f"expected {datatype}, found {found.dtype.name}")
    if datatype not in _FLOATS:
        num_wrong = int(np.count_nonzero(found != expected))
        if num_wrong:
            return refused(f"{num_wrong} of {found.size} elements differ, and {datatype} is compared exactly", 1.0)
        return OutputCheck(name, inputs, 0.0, tolerance)
    want, got = _wide(expected), _wide(found)
    if not np.array_equal(np.isnan(want), np.isnan(got)):
        return refused(
            f"expected {np.count_nonzero(np.isnan(want))} NaN, found {np.count_nonzero(np.isnan(got))}"
            f" or elsewhere than expected"
        )
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)) or not np.array_equal(want[np.isinf(want)], got[np.isinf(want)]):
        return refused("infinities are not where they are expected")
    want, got = want[finite], got[finite]
    if not want.size:
        return OutputCheck(name, inputs, 0.0, tolerance, is_evidence=not finite.size)
    scale = min(1.0, float(np.sqrt(np.mean(np.square(want)))))
    errors = np.abs(got - want) / np.maximum(np.maximum(np.abs(want), scale), _TINY)
    worst = int(np.argmax(errors))
    single = tolerance * _PEAK if noisy else tolerance
    noise = float(np.sqrt(np.mean(np.square(errors)))) if noisy else 0.0
    error = max(noise, float(errors[worst]) * tolerance / single) if single else float(errors[worst])
    if errors[worst] > single:
        return refused(
            f"{np.count_nonzero(errors > single)} of {finite.size} elements are off by more than {single:g}, the"
            f" worst by {errors[worst]:.3g} (expected {want[worst]:.6g}, found {got[worst]:.6g})",
            error,
        )
    if noise > tolerance:
        return refused(
            f"the root mean square of its differences is {noise:.3g}, more than {tolerance:g} (the worst element is off"
            f" by {errors[worst]:.3g})",
            error,
        )
    return OutputCheck(name, inputs, error, tolerance)


def check_outputs(
    names: Sequence[str],
    datatypes: Mapping[str, str],
    expected: Sequence[Array],
    found: Sequence[Array],
    *,
    precision: str,
    tolerance: float | None,
    inputs: str,
) -> list[OutputCheck]:
    """All outputs of one input set, in the order of `names`."""
    return [
        check_output(
            name,
            datatypes[name],
            want,
            got,
            tolerance_of(datatypes[name], precision, tolerance),
            inputs,
            noisy=precision in _NOISY,
        )
        for name, want, got in zip(names, expected, found, strict=True)
    ]


def judge(checks: Sequence[OutputCheck], measured: Comparison | NotMeasured | None, margin: float) -> Verdict:
    """Outputs first; speed only of what is right. `measured` is None where the outputs already said no."""
    wrong = next((check for check in checks if not check.passed), None)
    if wrong is not None:
        return Verdict(wrong.reason, tuple(checks), None, margin)
    if not checks:
        return Verdict("its outputs were checked on no input set", (), None, margin)
    if blind := _never_compared(checks):
        return Verdict(
            f"output '{blind}' is NaN or infinite throughout on all input sets, so nothing was compared: give inputs"
            " that it is finite on (`model_warmup` in the configuration)",
            tuple(checks),
            None,
            margin,
        )
    if measured is None:
        return Verdict("it was not measured", tuple(checks), None, margin)
    if isinstance(measured, NotMeasured):
        return Verdict(measured.reason, tuple(checks), None, margin)
    return Verdict(_speed_reason(measured, margin), tuple(checks), measured, margin)


def _never_compared(checks: Sequence[OutputCheck]) -> str:
    """An output of which no number was compared on any input set; empty where there is none."""
    seen = {check.output for check in checks if check.is_evidence}
    return next((check.output for check in checks if check.output not in seen), "")


def _speed_reason(measured: Comparison, margin: float) -> str:
    if measured.is_faster(margin):
        return ""
    times = (
        f"baseline {measured.baseline_ns.value / 1e6:.4g} ms, tuned {measured.candidate_ns.value / 1e6:.4g} ms,"
        f" speed-up {measured.speedup:.3g}, over {measured.num_rounds} rounds"
    )
    if measured.is_not_faster(margin):
        return f"not faster by {margin:.0%}: {times}"
    return f"not surely faster by {margin:.0%}: {times}, at worst {1.0 / measured.ratio.high:.3g}"


def _wide(array: Array) -> Array:
    return array.astype(np.float64)


def _limited(error: float) -> float:
    """JSON knows no infinity."""
    return float(min(error, 1e300))


_NO_CHECK = OutputCheck("", "", 0.0, 0.0)
