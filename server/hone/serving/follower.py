"""Following the repository in poll mode: what changed on disk is loaded, what vanished is unloaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from hone.errors import HoneError
from hone.repository import RepositoryPoller
from hone.serving.lifecycle import ModelLifecycle
from hone.serving.registry import ModelRegistry

_log = logging.getLogger(__name__)

_Change: TypeAlias = Callable[[str], Awaitable[None]]


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
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, _Change] = {}

    async def run(self) -> None:
        """Follow until cancelled; then nothing more is begun."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.step()
            except Exception:
                _log.exception("polling the repository failed; trying again in %g s", self._interval_seconds)

    async def step(self) -> None:
        """One look at the repository; begins the loads and unloads that follow from it."""
        entries = {name: self._registry.entry(name) for name in self._registry.names()}
        loaded = {name: entry.fingerprint for name, entry in entries.items() if entry is not None and entry.wanted}
        result = await asyncio.to_thread(self._poller.poll, loaded)
        for name, reason in result.problems.items():
            entry = self._registry.ensure(name)
            if entry.problem != reason:
                _log.warning("model %s: %s", name, reason, extra={"model": name})
            entry.problem, entry.wanted = reason, True
        for name in result.unload:
            self._change(name, self._forget)
        for name in result.load:
            self._change(name, self._load)

    def _change(self, name: str, change: _Change) -> None:
        """Begin a change, or remember it until the one under way has ended: a slow load holds up its own model only."""
        self._next[name] = change
        if name not in self._tasks:
            self._tasks[name] = asyncio.get_running_loop().create_task(self._make_changes(name))

    async def _make_changes(self, name: str) -> None:
        try:
            while change := self._next.pop(name, None):
                await change(name)
        finally:
            del self._tasks[name]

    async def _load(self, name: str) -> None:
        try:
            await self._lifecycle.load(name)
        except HoneError as problem:
            _log.warning("model %s: %s", name, problem, extra={"model": name})

    async def _forget(self, name: str) -> None:
        _log.info("model %s is gone from the repository", name, extra={"model": name})
        await self._lifecycle.forget(name)
