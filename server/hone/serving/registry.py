"""What is in memory: the versions of each model that answer now, and what is known of those that do not.

Changed on the event loop only; the tuner's thread reads too (`served`, `entry`). A request costs two dictionary
look-ups here, however many models there are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hone.errors import InvalidRequest, ModelNotFound, NoVersionAvailable, ServerStopping, VersionNotReady
from hone.serving.model import ServedModel
from hone.types import IndexEntry


class ModelState(enum.Enum):
    """States of the repository index, as in Triton."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


@dataclass(slots=True)
class VersionStatus:
    """`reason` says why a version is unavailable, or why the last reload of a ready one was refused."""

    state: ModelState
    reason: str = ""


@dataclass(slots=True)
class ModelEntry:
    """All that is known of one model. `problem` is what is wrong with the model as a whole."""

    served: dict[int, ServedModel] = field(default_factory=dict)
    statuses: dict[int, VersionStatus] = field(default_factory=dict)
    problem: str = ""
    fingerprint: str = ""
    """Of the folder's content as it was last read."""
    wanted: bool = False
    """Meant to be served: loaded by request, at start or by polling, and not unloaded since."""
    newest: ServedModel | None = None
    was_whole: bool = False
    """Has served all versions it was meant to, at some time since it was loaded."""

    @property
    def is_down(self) -> bool:
        """Something failed, and what served before does not go on serving."""
        failed = bool(self.problem) or any(s.state is ModelState.UNAVAILABLE for s in self.statuses.values())
        return failed and not (self.served and self.was_whole)


class ModelRegistry:
    def __init__(self) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._accepting = True
        self.on_publish: Callable[[], None] = lambda: None
        """Called after other versions began to answer, or none."""

    # --- request path

    def lease(self, name: str, version: str) -> ServedModel:
        """Begin a lease on a version, the newest ready one for an empty `version`.

        Raises ModelNotFound, NoVersionAvailable, VersionNotReady, InvalidRequest, ServerStopping.
        """
        if not self._accepting:
            raise ServerStopping
        return self.find(name, version).acquire()

    def find(self, name: str, version: str) -> ServedModel:
        """The version that `lease` would lease. Raises as `lease` does."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFound(name)
        if not version:
            if entry.newest is not None:
                return entry.newest
            loading = [number for number, status in entry.statuses.items() if status.state is ModelState.LOADING]
            if loading:
                raise VersionNotReady(name, max(loading))
            raise NoVersionAvailable(name)
        number = parse_version(version)
        served = entry.served.get(number)
        if served is None:
            status = entry.statuses.get(number)
            if status is not None and status.state in (ModelState.LOADING, ModelState.UNLOADING):
                raise VersionNotReady(name, number)
            if not entry.served and entry.statuses:
                raise NoVersionAvailable(name)
            raise ModelNotFound(name, number)
        return served

    def stop(self) -> None:
        """Refuse leases from now on."""
        self._accepting = False

    # --- what is known

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry(self, name: str) -> ModelEntry | None:
        return self._entries.get(name)

    def served(self) -> Iterable[ServedModel]:
        """From any thread."""
        # A copy, made in one step: the event loop may add and remove models meanwhile.
        return [model for entry in list(self._entries.values()) for model in entry.served.values()]

    def all_ready(self) -> bool:
        """Whether no model meant to be served is down. See docs/decisions/0002-readiness.md."""
        return not any(entry.wanted and entry.is_down for entry in self._entries.values())

    def index(self, known: Iterable[str], *, ready_only: bool) -> list[IndexEntry]:
        """The repository index; `known` are models on disk, of which some may never have been loaded."""
        lines = []
        for name in sorted({*known, *self._entries}):
            entry = self._entries.get(name)
            if entry is None or not entry.statuses:
                if not ready_only:
                    problem = entry.problem if entry is not None else ""
                    lines.append(IndexEntry(name, "", ModelState.UNAVAILABLE.value if problem else "", problem))
                continue
            for number, status in sorted(entry.statuses.items()):
                if not ready_only or status.state is ModelState.READY:
                    lines.append(IndexEntry(name, str(number), status.state.value, status.reason or entry.problem))
        return lines

    # --- changes

    def ensure(self, name: str) -> ModelEntry:
        return self._entries.setdefault(name, ModelEntry())

    def publish(self, name: str, served: dict[int, ServedModel]) -> None:
        """Make these versions the ones that answer, in one step."""
        entry = self.ensure(name)
        entry.served = served
        entry.newest = served[max(served)] if served else None
        self.on_publish()

    def forget(self, name: str) -> None:
        self._entries.pop(name, None)


def parse_version(version: str) -> int:
    """Raises InvalidRequest for anything that is not a plain decimal number."""
    if not (version.isascii() and version.isdigit()):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{version}'"
            f" (details: expected a number), version should be an integral value > 0"
        )
    return int(version[:20])
