"""The matrices of Winograd's minimal filtering F(m, r), from interpolation points.

Toom and Cook: outputs of a filter are coefficients of a product of polynomials, which is known from its values at as
many points (infinity one of them). Transposed, that gives y = A^T [(G g) * (B^T d)] with m + r - 1 multiplications for
m outputs (Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016; Blahut, "Fast Algorithms for Signal
Processing", 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

Matrix = tuple[tuple[Fraction, ...], ...]

#: Points by the number of outputs. Their products are exact in binary; +-3/4 and +-3/2 lose a quarter of what the usual
#: +-1 and +-2 lose to rounding, since values stay closer to one another.
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    3: (Fraction(0), Fraction(1), Fraction(-1), Fraction(2)),
    4: (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)),
}


@dataclass(frozen=True, slots=True)
class Filtering:
    """F(m, r) in one dimension: `output` is A^T (m x n), `filter` G (n x r), `input` B^T (n x n), n = m + r - 1."""

    output: Matrix
    filter: Matrix
    input: Matrix

    @property
    def size(self) -> int:
        return len(self.input)


@cache
def filtering(outputs: int, taps: int = 3) -> Filtering:
    """For a number of outputs in `POINTS`, and a filter of three taps."""
    points = POINTS[outputs]
    n = outputs + taps - 1
    if len(points) != n - 1:
        raise ValueError(f"F({outputs}, {taps}) needs {n - 1} points, there are {len(points)}")
    scales = [prod((p - q for q in points if q != p), start=Fraction(1)) for p in points]
    last = tuple(Fraction(int(i == outputs - 1)) for i in range(outputs))
    return Filtering(
        output=tuple((*(p**i for p in points), last[i]) for i in range(outputs)),
        filter=(
            *(tuple(p**k / scale for k in range(taps)) for p, scale in zip(points, scales, strict=True)),
            tuple(Fraction(int(k == taps - 1)) for k in range(taps)),
        ),
        input=(
            *((*_polynomial([q for q in points if q != p]), Fraction(0)) for p in points),
            _polynomial(points),
        ),
    )


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of prod (x - root), the constant one first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [*(-root * c for c in coefficients), Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return tuple(coefficients)
