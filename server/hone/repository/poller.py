"""Which models to load and unload, from one look at the repository after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hone.errors import RepositoryError
from hone.repository.layout import DUPLICATE, ModelFolder
from hone.repository.repository import ModelRepository


@dataclass(frozen=True, slots=True)
class PollResult:
    """What changed. `problems` says, for every model that is there and cannot be used, why."""

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """What the poller remembers of one name."""

    look: ModelFolder | str | bool | None = False
    """Of the last poll; None where the name was gone, False before the first look."""
    hashed: ModelFolder | None = None
    fingerprint: str = ""
    """Of `hashed`."""
    handed_out: str = ""
    """Fingerprint that was last given out to be loaded, so that a model that failed is not tried until it changes."""


class RepositoryPoller:
    """Compares the repository with what is loaded. It acts on nothing and knows no clock: call `poll` at intervals.

    Every change has to look the same in two successive polls before it is taken: a folder that is being copied, or
    that is gone for the moment between two renames, is left alone. Files are read only when they look different from
    before, and a model is taken only when their content is different.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._seen: dict[str, _Seen] = {}

    def poll(self, loaded: Mapping[str, str]) -> PollResult:
        """Look once. `loaded` maps each model that is served, or was tried, to the fingerprint it was read with.

        Names in `load` are to be read and loaded, those in `unload` to be unloaded, whatever came of them before.
        """
        result = PollResult()
        found = self._repository.scan()
        for name in sorted({*found, *loaded, *self._seen}):
            seen = self._seen.setdefault(name, _Seen())
            look = found.get(name)
            stable, seen.look = look == seen.look, look
            if stable:
                self._settle(name, seen, look, loaded, result)
        return result

    def _settle(
        self, name: str, seen: _Seen, look: ModelFolder | str | None, loaded: Mapping[str, str], result: PollResult
    ) -> None:
        """Decide on a name that looked the same twice."""
        if isinstance(look, ModelFolder):
            self._consider(name, seen, look, loaded, result)
            return
        if look is not None:
            result.problems[name] = look
        if look is None or look == DUPLICATE:
            if name in loaded or seen.handed_out:
                result.unload.append(name)
            seen.handed_out = ""
        if look is None:
            del self._seen[name]

    def _consider(
        self, name: str, seen: _Seen, look: ModelFolder, loaded: Mapping[str, str], result: PollResult
    ) -> None:
        if look != seen.hashed:
            try:
                seen.fingerprint = look.fingerprint
            except RepositoryError as problem:
                result.problems[name] = problem.reason
                return
            seen.hashed = look
        if seen.fingerprint == seen.handed_out:
            return
        seen.handed_out = seen.fingerprint
        if seen.fingerprint != loaded.get(name):
            result.load.append(name)
