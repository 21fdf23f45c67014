"""The stream behind the page: one look a second while somebody watches, told to each watcher as what has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from hone.dashboard.readings import Readings

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
#: Events that a slow reader may be behind before it is dropped (it comes back by itself, and gets a snapshot).
MAX_BEHIND = 16
MAX_WATCHERS = 64
#: Looks that go on when the last watcher has left, so that the chart outlives a reload of the page.
_LINGERING_LOOKS = 30

#: Part of what is told of a model -> the restricted group that it belongs to.
GROUP_OF_PART = {"index": "model-repository", "stats": "statistics", "tuning": "tuning", "history": "tuning"}

Parts = dict[str, Any]
Groups = frozenset[str]
"""Groups of endpoints that a watcher lacks the key of."""


class TooManyWatchers(Exception):
    """No further stream is opened."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All there is to tell at one moment: of the server, and of each model by name, in parts."""

    server: dict[str, Any]
    models: Mapping[str, Parts]


@dataclass(eq=False, slots=True)
class Watcher:
    """One open page. Its queue ends with None."""

    locked: Groups
    queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_BEHIND + 1))


class Monitor:
    """Belongs to the event loop. `look` makes the picture of now; it is called while somebody watches, else never."""

    def __init__(self, look: Callable[[float, float], Any], readings: Readings) -> None:
        """`look(now, elapsed)` returns an awaitable Picture; see `Readings` for the two times."""
        self._look = look
        self.readings = readings
        self._picture = Picture({}, {})
        self._watchers: set[Watcher] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._looked_at = 0.0
        self._closed = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def is_looking(self) -> bool:
        return self._ticker is not None and not self._ticker.done()

    async def watch(self, locked: Groups) -> AsyncIterator[bytes]:
        """Server-sent events: a snapshot, then changes. Raises TooManyWatchers before the first."""
        if len(self._watchers) >= MAX_WATCHERS or self._closed:
            raise TooManyWatchers
        watcher = Watcher(locked)
        self._watchers.add(watcher)
        try:
            async with self._beginning:  # several pages may open at once
                if not self.is_looking:
                    await self._take()
                    self._ticker = asyncio.create_task(self._run())
            yield event("snapshot", self.snapshot(locked))
            while (told := await watcher.queue.get()) is not None:
                yield told
        finally:
            self._watchers.discard(watcher)

    def snapshot(self, locked: Groups) -> dict[str, Any]:
        """The last picture, as far as these keys go."""
        return {
            "time": time.time(),
            "server": self._picture.server,
            "models": {name: visible(parts, locked) for name, parts in self._picture.models.items()},
        }

    async def fresh(self, locked: Groups) -> dict[str, Any]:
        """A snapshot of now."""
        async with self._beginning:
            if not self.is_looking:
                await self._take()
        return self.snapshot(locked)

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        for watcher in list(self._watchers):
            _end(watcher)

    async def _run(self) -> None:
        lingered = 0
        while lingered < _LINGERING_LOOKS:
            await asyncio.sleep(INTERVAL_SECONDS)
            lingered = 0 if self._watchers else lingered + 1
            before = self._picture
            try:
                await self._take()
            except Exception:
                # A look that fails must not end the streams for good: the next one may succeed.
                _log.exception("the dashboard could not look at the server")
                continue
            self._tell(before, self._picture)

    async def _take(self) -> None:
        now = time.monotonic()
        self._picture = await self._look(time.time(), now - self._looked_at)
        self._looked_at = now

    def _tell(self, before: Picture, now: Picture) -> None:
        told: dict[Groups, bytes] = {}
        for watcher in list(self._watchers):
            if watcher.locked not in told:
                told[watcher.locked] = event("delta", changes(before, now, watcher.locked))
            if watcher.queue.qsize() >= MAX_BEHIND:
                _end(watcher)
                self._watchers.discard(watcher)
            else:
                watcher.queue.put_nowait(told[watcher.locked])


def changes(before: Picture, now: Picture, locked: Groups) -> dict[str, Any]:
    """What `now` has that `before` had not, models that are gone by name."""
    models: dict[str, Parts] = {}
    for name, parts in now.models.items():
        old = before.models.get(name, {})
        changed = {part: value for part, value in parts.items() if part not in old or differs(old[part], value)}
        changed |= {part: None for part in old if part not in parts}
        if shown := visible(changed, locked):
            models[name] = shown
    told: dict[str, Any] = {"time": time.time()}
    if models:
        told["models"] = models
    if gone := [name for name in before.models if name not in now.models]:
        told["gone"] = gone
    if now.server != before.server:
        told["server"] = now.server
    return told


def differs(old: Any, new: Any) -> bool:
    """Snapshots that nobody made anew are the same objects, which is quicker to see than that they are equal."""
    return old is not new and old != new


def visible(parts: Mapping[str, Any], locked: Iterable[str]) -> Parts:
    return {part: value for part, value in parts.items() if GROUP_OF_PART[part] not in locked}


def event(name: str, document: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), orjson.dumps(document))


def _end(watcher: Watcher) -> None:
    """What it has not read yet is of no use: it starts from a snapshot when it comes back."""
    while not watcher.queue.empty():
        watcher.queue.get_nowait()
    watcher.queue.put_nowait(None)
