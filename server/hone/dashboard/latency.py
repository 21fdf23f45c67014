"""Quantiles out of the histograms that serving keeps anyway."""

from __future__ import annotations

from collections.abc import Sequence

from hone.metrics import ENGINE_BOUNDS_US

_FIRST_LOWER_US = 3.0
"""Stands for the lower edge of the first bucket, whose own is 0 and has no logarithm."""


def quantile_us(counts: Sequence[int], share: float) -> float:
    """The latency that `share` of the hits are at or below, in microseconds; 0.0 where there is no hit.

    `counts` are the hits of each bucket of ENGINE_BOUNDS_US and of the one above them, not cumulative. Within a bucket
    hits are taken to be spread evenly on a logarithmic scale, as the bounds are; above the last bound, that is told.
    """
    total = sum(counts)
    if total == 0:
        return 0.0
    rank = share * total
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(ENGINE_BOUNDS_US):
                return float(ENGINE_BOUNDS_US[-1])
            upper = float(ENGINE_BOUNDS_US[index])
            lower = float(ENGINE_BOUNDS_US[index - 1]) if index else _FIRST_LOWER_US
            within = min(1.0, max(0.0, (rank - below) / count))
            return float(lower * (upper / lower) ** within)
        below += count
    return float(ENGINE_BOUNDS_US[-1])


def summary(counts: Sequence[int]) -> list[float]:
    """[hits, p50, p99], in microseconds."""
    return [sum(counts), round(quantile_us(counts, 0.5), 1), round(quantile_us(counts, 0.99), 1)]


def since(now: Sequence[int], before: Sequence[int] | None) -> list[int]:
    """Hits of each bucket since an earlier reading of the same histogram; all of them where there was none."""
    if before is None:
        return list(now)
    return [new - old for new, old in zip(now, before, strict=True)]
