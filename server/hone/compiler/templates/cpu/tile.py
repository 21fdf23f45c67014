"""How good a tile of accumulators is, before anything is measured."""

from __future__ import annotations


def tile_cost(vectors: int, scalars: int) -> float:
    """Cycles per multiply-add of a tile of `vectors` x `scalars` accumulators, and its traffic.

    A step issues vectors*scalars multiply-adds on two units, and loads both sides on two ports; with less than eight
    independent accumulators the units wait for their own latency of four cycles. Loads also compete for the front end:
    of tiles that keep the units busy, those with fewer loads were measured to be faster. Larger tiles read less again.
    """
    accumulators = vectors * scalars
    cycles = max(accumulators / 2, (vectors + scalars) / 2, 4.0) + 0.1 * (vectors + scalars)
    traffic = 0.5 / scalars + 0.05 / vectors
    return cycles / accumulators + traffic
