"""Following the repository in poll mode: what changed on disk is loaded, what vanished is unloaded."""

from __future__ import annotations

import asyncio
import logging

from hone.errors import HoneError
from hone.repository import RepositoryPoller
from hone.serving.lifecycle import ModelLifecycle
from hone.serving.registry import ModelRegistry

_log = logging.getLogger(__name__)


class RepositoryFollower:
    """Polls on a worker thread; one bad model never keeps the others from being seen."""

    def __init__(
        self,
        poller: RepositoryPoller,
        lifecycle: ModelLifecycle,
        registry: ModelRegistry,
        *,
        interval_seconds: float,
    ) -> None:
        self._poller = poller
        self._lifecycle = lifecycle
        self._registry = registry
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.step()
            except Exception:
                _log.exception("polling the repository failed; trying again in %g s", self._interval_seconds)

    async def step(self) -> None:
        """One look at the repository, and the loads and unloads that follow from it."""
        entries = {name: self._registry.entry(name) for name in self._registry.names()}
        loaded = {name: entry.fingerprint for name, entry in entries.items() if entry is not None and entry.wanted}
        result = await asyncio.to_thread(self._poller.poll, loaded)
        for name, reason in result.problems.items():
            entry = self._registry.ensure(name)
            if entry.problem != reason:
                _log.warning("model %s: %s", name, reason, extra={"model": name})
            entry.problem, entry.wanted = reason, True
        changes = [self._forget(name) for name in result.unload] + [self._load(name) for name in result.load]
        await asyncio.gather(*changes)

    async def _load(self, name: str) -> None:
        try:
            await self._lifecycle.load(name)
        except HoneError as problem:
            _log.warning("model %s: %s", name, problem, extra={"model": name})

    async def _forget(self, name: str) -> None:
        _log.info("model %s is gone from the repository", name, extra={"model": name})
        await self._lifecycle.forget(name)
