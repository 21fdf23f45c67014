"""What a handful of noisy measurements allows to say: medians with intervals that assume no distribution.

The interval of a median between order statistics is exact for independent samples of any continuous distribution: the
number of samples below the median is binomial with p = 1/2, which is the sign test turned around (H. A. David and
H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1; W. J. Conover, Practical Nonparametric Statistics, 3rd
edition, section 3.2). Times on a shared machine have long tails and no variance worth the name, so nothing here is
built on means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Median:
    """A median, and bounds of which each holds alone with the confidence asked for (infinite with too few samples)."""

    value: float
    low: float
    high: float


def median_of(samples: Sequence[float], error: float) -> Median:
    """`error` is the probability with which each bound may be wrong. Raises ValueError without samples."""
    if not samples:
        raise ValueError("expected at least one sample, found none")
    ordered = sorted(samples)
    num = len(ordered)
    value = (ordered[(num - 1) // 2] + ordered[num // 2]) / 2
    rank = _rank_of_upper_bound(num, error)
    if rank is None:
        return Median(value, -math.inf, math.inf)
    return Median(value, ordered[num - rank], ordered[rank - 1])


def _rank_of_upper_bound(num: int, error: float) -> int | None:
    """Smallest rank (from 1) whose order statistic is above the median with probability 1 - error or more."""
    # P(fewer than `rank` of the samples are below the median), summed up in exact integers.
    below, allowed = 0, (1.0 - error) * 2.0**num
    for rank in range(1, num + 1):
        below += math.comb(num, rank - 1)
        if below >= allowed:
            return rank
    return None
