"""Who may have how much of the memory that somebody set for tuning, where several kinds of device share it."""

from __future__ import annotations

from collections.abc import Callable, Collection


class MemoryShares:
    """Belongs to the tuner's thread.

    A child is promised its memory when it begins, and may count on it to its end, whatever begins later: one that is
    alone is promised all, and others wait until it ends. None waits for ever: a child that begins while others wait is
    promised only its part, so that what it leaves is enough for them. Beyond what it was promised, a child may have
    what others leave, but then makes way (by being ended) for those that only take what they were promised.
    """

    def __init__(self, total_bytes: int, num_kinds: int, resident_bytes: Callable[[str], int]) -> None:
        """`num_kinds` of device share `total_bytes`; `resident_bytes` are those of a kind's child with all it started,
        0 where there is none."""
        self._total_bytes = total_bytes
        self._part_bytes = total_bytes // num_kinds
        self._resident_bytes = resident_bytes
        self._promised: dict[str, int] = {}

    def has_room(self, kind: str, busy: Collection[str]) -> bool:
        """Whether a job for a kind of device may begin, beside those of the kinds that are `busy`."""
        taken = (max(self._part_bytes, self._taken_bytes(other)) for other in busy if other != kind)
        return self._total_bytes - sum(taken) >= self._part_bytes

    def promise(self, kind: str, num_sharing: int) -> int:
        """What a child that begins now may have: its part among `num_sharing` kinds of device that there is work for,
        as far as others leave it so much."""
        left = self._total_bytes - sum(self._taken_bytes(other) for other in self._promised if other != kind)
        promised = max(self._part_bytes, min(self._total_bytes // num_sharing, left))
        self._promised[kind] = promised
        return promised

    def release(self, kind: str) -> None:
        """Its child is gone."""
        self._promised.pop(kind, None)

    def others_bytes(self, kind: str) -> int:
        """What the children of other kinds of device have now."""
        return sum(self._resident_bytes(other) for other in self._promised if other != kind)

    def _taken_bytes(self, kind: str) -> int:
        return max(self._promised.get(kind, 0), self._resident_bytes(kind))
