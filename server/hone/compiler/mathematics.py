"""Transcendental functions of float32 as arithmetic, so that loops over them vectorise.

LLVM calls the C library for each lane of `exp`, `tanh`, `erf`, `log` and `sigmoid`: 20 to 60 cycles an item. Here they
are polynomials fitted for float32 (errors of at most 4 units in the last place, measured in the tests), with the
C library's answers for NaN, infinities, overflow and denormal results. Other dtypes keep the library's functions.

TVM's code generator simplifies each named value with the values before it put in, and what it then looks at grows by a
power for each function in another one's argument: of tanh, two take a second, three four seconds, four hours. So
`schedules.inline` sees to it that values are stored before; beyond two the C library is called, and beyond three
nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi.structural import WalkResult, structural_map, structural_walk

_LOG2_E = 1.4426950408889634
#: ln 2 in two parts: the first has few bits, so that a whole number times it is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4
_EXP_MAX, _EXP_MIN = 88.72283905206835, -104.0
#: exp(r) on [-ln2/2, ln2/2]
_EXP = (1.0, 1.0, 0.4999999206, 0.16666419814, 0.04166822813, 0.00837484582, 0.00138367921)
#: tanh(x)/x in x*x, |x| < 0.625
_TANH = (1.0, -0.3333326052, 0.1333112746, -0.0537210625, 0.0205909722, -0.0056599725)
#: erf(x)/x in x*x, |x| < 1
_ERF = (
    1.128379167058,
    -0.3761263843464,
    0.1128378197389,
    -0.0268654000294,
    0.0052209453966,
    -0.0008482828327,
    0.0001125694419,
    -0.0000096415056,
)
#: exp(x*x) erfc(x) in 1/(1+x), 1 <= x <= 4.2
_ERFCX = (-0.00032972674, 0.57190185964, 0.48901830398, 0.67200634909, -1.39706908757, 0.79710403279, -0.12068111049)
#: erf(x / sqrt(2)) = x P(x*x) / Q(x*x), |x| < 5.501, where it is 1 in float32.
_GELU_P = (0.7978845443, 0.0677222058, 0.009347078875, 0.0003365862374, 1.258145377e-05, 4.476737913e-08)
_GELU_Q = (1.0, 0.251543536, 0.02863959996, 0.001881855036, 7.316860436e-05, 1.182251218e-06)
_GELU_MAX = 5.501
#: (log(1+m) - m + m*m/2) / m**3 on [sqrt(1/2)-1, sqrt(2)-1]
_LOG = (
    0.333333184,
    -0.249999889,
    0.200033847,
    -0.166706318,
    0.141662895,
    -0.123092898,
    0.123506159,
    -0.125546396,
    0.0656346907,
)


#: So many functions may stand in each other's arguments to be expanded, and so many to be built.
MAX_NESTING, MAX_BUILT_NESTING = 2, 3


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


def exp(x: Any) -> Any:
    return _bound(x, _exp)


def exp_nonpositive(x: Any) -> Any:
    """exp of what is not above zero, as softmax needs it: below 1e-38 the answer is zero."""
    return _bound(x, _exp_nonpositive)


def gelu(x: Any) -> Any:
    """x (1 + erf(x / sqrt(2))) / 2, off by at most 3e-7 of x: within twice of what the formula itself rounds away."""
    return _bound(x, _gelu)


def sigmoid(x: Any) -> Any:
    return _bound(x, _sigmoid)


def tanh(x: Any) -> Any:
    return _bound(x, _tanh)


def erf(x: Any) -> Any:
    return _bound(x, _erf)


def log(x: Any) -> Any:
    return _bound(x, _log)


_EXPANSIONS: dict[str, Callable[[Any], Any]] = {
    "tirx.exp": exp,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
    "tirx.log": log,
    "tirx.sigmoid": sigmoid,
}


def expand_transcendentals(func: Any) -> Any:
    """A PrimFunc in which the float32 functions above are arithmetic, as far as they are not too deep in each other.

    Raises ValueError where they are deeper than what can be built.
    """
    if (deepest := nesting(func.body)) > MAX_BUILT_NESTING:
        raise ValueError(f"{deepest} transcendental functions in each other's arguments are too many to compile")
    levels: dict[int, tuple[Any, int]] = {}
    """Of what was expanded: its outermost name (by its address, which it keeps while it is held here), and how deep."""

    def level_of(argument: Any) -> int:
        deepest = 0

        def see(let: Any) -> WalkResult:
            nonlocal deepest
            known = levels.get(let.var.__chandle__())
            if known is None:
                return WalkResult.ADVANCE
            deepest = max(deepest, known[1])
            return WalkResult.SKIP

        structural_walk(argument, (tirx.Let, see), order="pre")
        return deepest

    def expand(call: Any) -> Any:
        if not _is_expanded(call):
            return call
        level = level_of(call.args[0]) + 1
        if level > MAX_NESTING:
            return call
        made = _EXPANSIONS[call.op.name](call.args[0])
        levels[made.var.__chandle__()] = made.var, level
        return made

    return structural_map(func, (tvm.ir.Call, expand))


def nesting(expression: Any) -> int:
    """How many of the functions that are expanded stand in each other's arguments."""
    deepest = 0

    def see(call: Any) -> WalkResult:
        nonlocal deepest
        if not _is_expanded(call):
            return WalkResult.ADVANCE
        deepest = max(deepest, 1 + nesting(call.args[0]))
        return WalkResult.SKIP

    structural_walk(expression, (tvm.ir.Call, see), order="pre")
    return deepest


def _is_expanded(call: Any) -> bool:
    return getattr(call.op, "name", "") in _EXPANSIONS and str(call.ty.dtype) == "float32"


def _exp(x: Any) -> Any:
    # Clamped for the arithmetic only: max(NaN, low) is low, and the selections below put the true answers back.
    clamped = tirx.min(tirx.max(x, f32(_EXP_MIN)), f32(_EXP_MAX))

    def reduced(whole: Any) -> Any:
        rest = clamped - whole * f32(_LN2_HIGH) - whole * f32(_LN2_LOW)
        # Two factors, since one power of two cannot reach both the largest and the denormal results.
        power = whole.astype("int32")
        half = power >> tirx.const(1, "int32")
        return _bound(rest, lambda r: _polynomial(r, _EXP)) * _power_of_two(half) * _power_of_two(power - half)

    result = _bound(tirx.floor(clamped * f32(_LOG2_E) + f32(0.5)), reduced)
    result = tirx.Select(x > f32(_EXP_MAX), f32(float("inf")), result)
    result = tirx.Select(x < f32(_EXP_MIN), f32(0.0), result)
    return tirx.Select(_is_nan(x), x, result)


def _exp_nonpositive(x: Any) -> Any:
    # Selections, not maxima: those would lose a NaN.
    low = f32(-87.0)

    def reduced(clamped: Any) -> Any:
        def whole(n: Any) -> Any:
            rest = clamped - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW)
            return _bound(rest, lambda r: _polynomial(r, _EXP)) * _power_of_two(n.astype("int32"))

        return _bound(tirx.floor(clamped * f32(_LOG2_E) + f32(0.5)), whole)

    result = _bound(tirx.Select(x < low, low, x), reduced)
    return tirx.Select(x < low, f32(0.0), result)


def _sigmoid(x: Any) -> Any:
    # The exponential of what is not above zero cannot overflow.
    def halves(small: Any) -> Any:
        high = f32(1.0) / (f32(1.0) + small)
        return tirx.Select(x < f32(0.0), small * high, high)

    return _bound(_exp_nonpositive(f32(0.0) - x * _sign(x)), halves)


def _gelu(x: Any) -> Any:
    half = x * f32(0.5)

    def gate(clamped: Any) -> Any:
        return _bound(clamped * clamped, lambda s: clamped * _polynomial(s, _GELU_P) / _polynomial(s, _GELU_Q))

    low, high = f32(-_GELU_MAX), f32(_GELU_MAX)
    clamped = tirx.Select(x > high, high, tirx.Select(x < low, low, x))
    return half + half * _bound(clamped, gate)


def _tanh(x: Any) -> Any:
    magnitude = x * _sign(x)
    small = x * _bound(x * x, lambda s: _polynomial(s, _TANH))
    ratio = _bound(f32(0.0) - magnitude - magnitude, _exp_nonpositive)
    large = _bound(ratio, lambda e: (f32(1.0) - e) / (f32(1.0) + e))
    return tirx.Select(magnitude < f32(0.625), small, large * _sign(x))


def _erf(x: Any) -> Any:
    magnitude = x * _sign(x)
    small = x * _bound(x * x, lambda s: _polynomial(s, _ERF))

    def tail(a: Any) -> Any:
        scaled = _bound(f32(1.0) / (f32(1.0) + a), lambda t: _polynomial(t, _ERFCX))
        return f32(1.0) - scaled * _bound(f32(0.0) - a * a, _exp)

    large = _bound(tirx.min(magnitude, f32(4.2)), tail) * _sign(x)
    result = tirx.Select(magnitude < f32(1.0), small, large)
    return tirx.Select(_is_nan(x), x, result)


def _log(x: Any) -> Any:
    # Denormals are scaled up first; exponent and mantissa are then read from the bits.
    tiny = x < f32(1.17549435e-38)
    scaled = tirx.Select(tiny, x * f32(2.0**24), x)
    correction = tirx.Select(tiny, f32(-24.0), f32(0.0))

    def from_bits(bits: Any) -> Any:
        # Biased so that the mantissa lies in [sqrt(1/2), sqrt(2)).
        shifted = bits - tirx.const(0x3F3504F3, "int32")
        exponent = (shifted >> tirx.const(23, "int32")).astype("float32") + correction
        mantissa_bits = (shifted & tirx.const(0x007FFFFF, "int32")) + tirx.const(0x3F3504F3, "int32")
        mantissa = tirx.reinterpret("float32", mantissa_bits) - f32(1.0)

        def series(m: Any) -> Any:
            square = m * m
            high = m - f32(0.5) * square + square * m * _polynomial(m, _LOG)
            return high + exponent * f32(_LN2_LOW) + exponent * f32(_LN2_HIGH)

        return _bound(mantissa, series)

    result = _bound(tirx.reinterpret("int32", scaled), from_bits)
    result = tirx.Select(x == f32(0.0), f32(float("-inf")), result)
    result = tirx.Select(x < f32(0.0), f32(float("nan")), result)
    # infinity and NaN answer themselves
    return tirx.Select(tirx.any(_is_nan(x), x == f32(float("inf"))), x, result)


def _is_nan(x: Any) -> Any:
    return tirx.isnan(x)  # a plain x != x is simplified away


def _sign(x: Any) -> Any:
    return tirx.Select(x < f32(0.0), f32(-1.0), f32(1.0))


def _power_of_two(exponent: Any) -> Any:
    return tirx.reinterpret("float32", (exponent + tirx.const(127, "int32")) << tirx.const(23, "int32"))


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    result = f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + f32(coefficient)
    return result


def _bound(value: Any, body: Callable[[Any], Any]) -> Any:
    """`body` of a name for the value: the expression would otherwise be repeated at each use."""
    name = tirx.Var("t", "float32" if str(value.ty.dtype) == "float32" else "int32")
    return tirx.Let(name, value, body(name))
