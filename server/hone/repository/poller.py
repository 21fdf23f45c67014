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
    had_problem: bool = False
    """Whether a problem was reported since then."""


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

        Names in `load` are to be read and loaded, those in `unload` to be unloaded, whatever came of them before. A
        model whose files are good again after something was wrong with them is in `load` even if what is served is the
        same, so that what was said of it is taken back. An empty fingerprint stands for a model that is not served.
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
        if look is None:
            if name in loaded or seen.handed_out:
                result.unload.append(name)
            del self._seen[name]
            return
        self._report(name, seen, look, result)
        if look == DUPLICATE:
            if loaded.get(name) or seen.handed_out:
                result.unload.append(name)
            seen.handed_out = ""

    def _consider(
        self, name: str, seen: _Seen, look: ModelFolder, loaded: Mapping[str, str], result: PollResult
    ) -> None:
        if look != seen.hashed:
            try:
                seen.fingerprint = look.fingerprint
            except RepositoryError as problem:
                self._report(name, seen, problem.reason, result)
                return
            seen.hashed = look
        untried = seen.fingerprint not in (loaded.get(name), seen.handed_out)
        back_again = seen.handed_out not in ("", seen.fingerprint)
        if untried or back_again or seen.had_problem:
            result.load.append(name)
        seen.handed_out, seen.had_problem = seen.fingerprint, False

    @staticmethod
    def _report(name: str, seen: _Seen, problem: str, result: PollResult) -> None:
        result.problems[name] = problem
        seen.had_problem = True
