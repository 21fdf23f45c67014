"""What the cache remembers of the gate's verdicts, so that nothing is built or measured twice.

An artifact's manifest carries the verdict that it passed with. A refusal has no artifact, so it is an entry of its own
among the decisions; so is the verdict of a later measurement, since what is published never changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.kernels import JSON, Entry, KernelsCache, digest_of

#: Outcome of a refusal that somebody asked to forget.
_WITHDRAWN = "withdrawn"

State = Literal["absent", "passed", "unproven", "refused", "unsupported", "quarantined"]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is known of a specialization. `unproven` ones were imported, and go through the whole gate here."""

    state: State
    reason: str = ""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    entry: Entry | None = None

    @property
    def provisional(self) -> bool:
        return self.verdict.get("provisional") is True


class Verdicts:
    """Verdicts on specializations for one kind of device; `scope` is the digest of its key."""

    def __init__(self, cache: KernelsCache, scope: str) -> None:
        self._cache = cache
        self._scope = scope

    def recall(self, digest: str) -> Recalled:
        """Cheapest first; reads and hashes an artifact's files, and loads nothing."""
        reason = self._cache.quarantined(digest, self._scope)
        if reason is not None:
            return Recalled("quarantined", reason)
        refusal = self._read(_refusal_key(digest))
        if refusal is not None and refusal.get("outcome") != _WITHDRAWN:
            state: State = "unsupported" if refusal.get("outcome") == "unsupported" else "refused"
            return Recalled(state, str(refusal.get("reason", "")), _mapping(refusal.get("verdict")))
        entry = self._cache.get("artifacts", digest, self._scope)
        if not isinstance(entry, Entry):
            return Recalled("absent", entry.reason.value)
        verdict = self._read(_measured_key(digest)) or _mapping(entry.manifest.get("verdict"))
        if not entry.proven or not verdict:
            return Recalled("unproven", "it was imported", verdict, entry)
        return Recalled("passed", "", verdict, entry)

    def keep_refusal(self, digest: str, outcome: str, reason: str, verdict: Mapping[str, JSON]) -> None:
        """Remember that this specialization was refused here, or cannot be made."""
        self._write(_refusal_key(digest), {"outcome": outcome, "reason": reason, "verdict": verdict})

    def withdraw(self, digest: str) -> None:
        """Forget a refusal, where there is one: the specialization may be made and measured again."""
        key = _refusal_key(digest)
        if self._read(key) is not None:
            self._write(key, {"outcome": _WITHDRAWN})

    def keep_measured(self, digest: str, verdict: Mapping[str, JSON]) -> None:
        """Remember a later verdict on an artifact, in place of that in its manifest."""
        self._write(_measured_key(digest), dict(verdict))

    def _read(self, key: Mapping[str, JSON]) -> dict[str, Any] | None:
        entry = self._cache.get("decisions", digest_of(key), self._scope)
        if not isinstance(entry, Entry) or "verdict.json" not in entry.files:
            return None
        try:
            told = json.loads(entry.files["verdict.json"].read_bytes())
        except (OSError, ValueError):
            return None  # evicted or damaged meanwhile: as if it were not there
        return told if isinstance(told, dict) else None

    def _write(self, key: Mapping[str, JSON], told: Mapping[str, JSON]) -> None:
        data = json.dumps(told, indent=2, sort_keys=True, allow_nan=False).encode()
        files = {"verdict.json": data}
        self._cache.publish("decisions", digest_of(key), self._scope, files, {"key": key}, replace=True)


def _refusal_key(digest: str) -> dict[str, JSON]:
    return {"kind": "decisions", "what": "refusal", "artifact": digest}


def _measured_key(digest: str) -> dict[str, JSON]:
    return {"kind": "decisions", "what": "measured", "artifact": digest}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
