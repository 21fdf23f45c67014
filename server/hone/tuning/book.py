"""The tuner's book: a record for every served version, counters, and the snapshots of both that others may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import ModelNotFound
from hone.specialization import VersionRef
from hone.tuning.cache_counts import CacheTraffic
from hone.tuning.jobs import PLAIN, Task
from hone.tuning.record import Record, unbroken

Place = tuple[str, int]
"""Model and version, as users name them."""


@dataclass(slots=True)
class TunerCounters:
    """For metrics: written by the tuner's thread, read by any."""

    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By outcome, and a word for the reason."""
    specializations: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    report: dict[str, float] = field(default_factory=dict)
    """Sums of what children report: candidates built, measured and failed, seconds of compiling and measuring."""
    num_promotions: int = 0
    num_rollbacks: Counter[str] = field(default_factory=Counter)
    """By cause."""
    num_quarantines: int = 0
    promote_seconds: float = 0.0
    """Loading, warming and checking before swaps."""
    swap_seconds: float = 0.0
    child_seconds: float = 0.0
    cache: CacheTraffic = field(default_factory=CacheTraffic)
    """What tuning processes did with the cache."""
    peak_bytes: int = 0

    def add_report(self, report: object) -> None:
        for name, value in report.items() if isinstance(report, Mapping) else ():
            if isinstance(value, (int, float)):
                self.report[str(name)] = self.report.get(str(name), 0) + value


class Book:
    """Written by the tuner's thread alone; `status`, `statuses` and `place_of` may be asked by any."""

    def __init__(self, utc: Callable[[], str], listener: Callable[[dict[str, Any]], None]) -> None:
        self.records: dict[VersionRef, Record] = {}
        self.counters = TunerCounters()
        self.hear = listener
        self._utc = utc
        self._snapshots: dict[Place, dict[str, Any]] = {}

    # --- any thread

    def status(self, place: Place) -> dict[str, Any]:
        """Raises NotFound where the version has gone meanwhile."""
        found = self._snapshots.get(place)
        if found is None:
            raise ModelNotFound(*place)
        return found

    def statuses(self) -> list[dict[str, Any]]:
        return list(self._snapshots.values())

    def place_of(self, model: str, version: str) -> Place:
        """Where no version is named, the newest. Raises NotFound."""
        number = int(version[:20]) if version.isascii() and version.isdecimal() else None
        found = [place for place in list(self._snapshots) if place[0] == model and (not version or place[1] == number)]
        if not found:
            raise ModelNotFound(model, number)
        return max(found)

    # --- the tuner's thread

    def at(self, place: Place) -> Record | None:
        return next((r for ref, r in self.records.items() if (ref.model, ref.version) == place), None)

    def tell(self, record: Record) -> None:
        """Publish what the record says now."""
        ref = record.version.ref
        if self.records.get(ref) is record:
            self._snapshots[ref.model, ref.version] = record.to_json()

    def note(self, record: Record, event: str, **fields: Any) -> None:
        """Add a line to the record's history."""
        line = {"at": self._utc(), "event": event, **fields}
        if "reason" in line:
            line["reason"] = unbroken(line["reason"])
        record.history.append(line)
        self.hear({"model": record.version.ref.model, **line})

    def remove(self, ref: VersionRef) -> None:
        self.records.pop(ref, None)
        if self.at((ref.model, ref.version)) is None:
            self._snapshots.pop((ref.model, ref.version), None)

    def fail(self, record: Record, device: str, tasks: Sequence[Task], reason: str) -> None:
        """These tasks came to nothing; a generation that serves already stays."""
        for task in tasks:
            bucket = record.bucket(device, task.signature)
            if bucket is not None and task.digest == bucket.plain:
                self.note(record, "failed", signature=task.signature.text, reason=f"{PLAIN}: {reason}")
            elif bucket is not None and (not bucket.generation or bucket.serves_plain):
                bucket.outcome, bucket.reason = "failed", reason
                self.note(record, "failed", signature=task.signature.text, reason=reason)
        self.tell(record)
