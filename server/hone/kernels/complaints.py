"""What the cache tells an operator: each thing once, for a full disk must not fill the log too."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from hone.kernels.entry import EntryName, Failure, FailureReason, Miss, MissReason, failure_of

logger = logging.getLogger("hone.kernels.cache")

#: Entries whose misses are told of, each once: a thousand broken ones are told well enough.
_MAX_TOLD = 1000

_CURES = {
    FailureReason.FULL: "make room there",
    FailureReason.READ_ONLY: "make it writable for this user",
    FailureReason.FOREIGN: "see to who owns it",
}


class Complaints:
    """Thread-safe."""

    def __init__(self, root: Path, spare: Path | None) -> None:
        self._root = root
        self._spare = spare
        self._lock = threading.Lock()
        self._told: set[FailureReason] = set()
        self._told_misses: set[tuple[EntryName, MissReason]] = set()

    def trouble(self, problem: OSError) -> None:
        self.failure(failure_of(problem))

    def failure(self, failure: Failure) -> None:
        """Once for each reason, until it is over."""
        with self._lock:
            if failure.reason in self._told:
                return
            self._told.add(failure.reason)
        cure = _CURES.get(failure.reason, "see what is wrong with it")
        logger.warning(
            "kernels cache: cannot keep what is learned in %s (%s: %s); serving goes on without%s. To have it"
            " remembered, %s, or give another folder with --kernels-cache",
            self._root,
            failure.reason.value,
            failure.detail,
            f": until this server stops, what is learned is kept in {self._spare}" if self._spare else "",
            cure,
        )

    def over(self, num_entries: int) -> None:
        """What could not be kept is kept now; the next trouble is news again."""
        with self._lock:
            self._told.clear()
        logger.info("kernels cache: %s can be written again; %d entries are remembered now", self._root, num_entries)

    def miss(self, name: EntryName, miss: Miss) -> None:
        """Once for each entry and reason."""
        if miss.reason is MissReason.ABSENT or len(self._told_misses) >= _MAX_TOLD:
            return
        with self._lock:
            new = (name, miss.reason) not in self._told_misses
            self._told_misses.add((name, miss.reason))
        if new:
            logger.warning("kernels cache: %s is not used: %s (%s)", name, miss.reason.value, miss.detail)
