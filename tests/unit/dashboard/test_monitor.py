"""The stream: a snapshot, then changes; nothing while nobody looks; nobody who does not read holds up the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hone.dashboard import monitor as module
from hone.dashboard.monitor import MAX_BEHIND, MAX_WATCHERS, Monitor, Picture, TooManyWatchers, changes
from hone.dashboard.readings import Readings

NO_LOCKS: frozenset[str] = frozenset()


class Scene:
    """What there is to look at; how often somebody looked."""

    def __init__(self) -> None:
        self.server: dict[str, Any] = {"ready": True}
        self.models: dict[str, dict[str, Any]] = {"a": {"index": [1], "stats": {"1": 0}, "tuning": {"1": "queued"}}}
        self.num_looks = 0
        self.fails = False

    async def look(self, now: float, elapsed: float) -> Picture:
        self.num_looks += 1
        if self.fails:
            raise OSError("the repository has gone")
        return Picture(dict(self.server), {name: dict(parts) for name, parts in self.models.items()})


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.005)
    return Scene()


@pytest.fixture
async def monitor(scene: Scene) -> AsyncIterator[Monitor]:
    made = Monitor(scene.look, Readings())
    yield made
    made.close()


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def following(stream: AsyncIterator[bytes], wanted: str) -> dict[str, Any]:
    """The next event that tells of this."""
    async with asyncio.timeout(10):
        async for event in stream:
            told = parsed(event)[1]
            if wanted in told:
                return told
    raise AssertionError("the stream ended")


async def test_a_snapshot_then_changes(scene, monitor):
    stream = monitor.watch(NO_LOCKS)
    name, told = parsed(await anext(stream))
    assert name == "snapshot"
    assert told["models"] == scene.models
    scene.models["a"]["stats"] = {"1": 7}
    assert (await following(stream, "models"))["models"] == {"a": {"stats": {"1": 7}}}
    scene.models["b"] = {"index": []}
    assert (await following(stream, "models"))["models"] == {"b": {"index": []}}
    del scene.models["a"]
    assert (await following(stream, "gone"))["gone"] == ["a"]
    scene.server["ready"] = False
    assert (await following(stream, "server"))["server"] == {"ready": False}


async def test_pages_that_open_at_once_share_one_look(scene, monitor, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 600)
    streams = [monitor.watch(NO_LOCKS) for _ in range(3)]
    for event in await asyncio.gather(*(anext(stream) for stream in streams)):
        assert parsed(event)[1]["models"] == scene.models
    assert scene.num_looks == 1


async def test_what_has_not_changed_is_not_told(scene, monitor):
    stream = monitor.watch(NO_LOCKS)
    await anext(stream)
    assert set(parsed(await anext(stream))[1]) == {"time"}


async def test_nothing_is_looked_at_while_nobody_watches(scene, monitor, monkeypatch):
    monkeypatch.setattr(module, "_LINGERING_LOOKS", 2)
    await asyncio.sleep(0)
    assert scene.num_looks == 0
    stream = monitor.watch(NO_LOCKS)
    await anext(stream)
    await stream.aclose()
    assert monitor.num_watchers == 0
    async with asyncio.timeout(10):
        while monitor.is_looking:
            await asyncio.sleep(0.001)
    looks = scene.num_looks
    assert (await monitor.fresh(NO_LOCKS))["models"] == scene.models
    assert scene.num_looks == looks + 1


async def test_keys_that_are_missing_leave_out_their_parts(scene, monitor):
    locked = frozenset({"tuning"})
    stream = monitor.watch(locked)
    assert set(parsed(await anext(stream))[1]["models"]["a"]) == {"index", "stats"}
    scene.models["a"] |= {"tuning": {"1": "tuned"}, "stats": {"1": 1}}
    assert (await following(stream, "models"))["models"] == {"a": {"stats": {"1": 1}}}


async def test_a_slow_reader_is_dropped_and_nobody_else(scene, monitor):
    slow, quick = monitor.watch(NO_LOCKS), monitor.watch(NO_LOCKS)
    await anext(slow)
    await anext(quick)
    for _ in range(MAX_BEHIND + 2):
        await anext(quick)
    assert monitor.num_watchers == 1
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    await anext(quick)


async def test_there_are_not_too_many(scene, monitor):
    streams = [monitor.watch(NO_LOCKS) for _ in range(MAX_WATCHERS)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(TooManyWatchers):
        await anext(monitor.watch(NO_LOCKS))
    await streams[0].aclose()
    await anext(monitor.watch(NO_LOCKS))


async def test_a_look_that_fails_does_not_end_the_stream(scene, monitor, caplog):
    stream = monitor.watch(NO_LOCKS)
    await anext(stream)
    scene.fails = True
    looks = scene.num_looks
    async with asyncio.timeout(10):
        while scene.num_looks < looks + 2:
            await asyncio.sleep(0.001)
    scene.fails = False
    scene.models["a"]["stats"] = {"1": 3}
    assert (await following(stream, "models"))["models"]["a"]["stats"] == {"1": 3}
    assert "could not look" in caplog.text


async def test_closing_ends_every_stream(scene, monitor):
    stream = monitor.watch(NO_LOCKS)
    await anext(stream)
    monitor.close()
    with pytest.raises(StopAsyncIteration):
        while True:
            await anext(stream)
    with pytest.raises(TooManyWatchers):
        await anext(monitor.watch(NO_LOCKS))


def test_a_part_that_went_is_told_as_null():
    before = Picture({}, {"a": {"index": [], "stats": {}}})
    now = Picture({}, {"a": {"index": []}})
    assert changes(before, now, NO_LOCKS)["models"] == {"a": {"stats": None}}
