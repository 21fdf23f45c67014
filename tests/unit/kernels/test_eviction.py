"""The least recently used goes first; what is loaded, here or elsewhere, stays; clocks may jump."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from hone.kernels import Entry, KernelsCache, MissReason, eviction, holds
from hone.kernels import store as store_module
from hone.kernels.folder import CacheFolder
from hone.kernels.staging import move_away
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, child, key, staged

SIZE = 10_000


class FakeClock:
    """Nanoseconds that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * 10**9

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def cache(root, clock):
    opened = KernelsCache(root, now_ns=clock)
    yield opened
    opened.close()


def publish(cache: KernelsCache, number: int, **manifest) -> Entry:
    entry = cache.publish("artifacts", key(number), DEVICE, {"a": bytes(SIZE)}, manifest)
    assert isinstance(entry, Entry)
    return entry


def present(cache: KernelsCache) -> set[int]:
    digests = {entry.name.digest for entry in cache.entries()}
    return {number for number in range(100) if key(number) in digests}


def limit(num_entries: int) -> int:
    """Room for so many entries: their manifests take some too."""
    return num_entries * SIZE + SIZE // 2


def test_the_least_recently_used_go(cache, clock):
    for number in range(6):
        clock.now_ns += 1000
        publish(cache, number)
    clock.now_ns += 1000
    cache.get("artifacts", key(0), DEVICE)
    report = cache.evict(limit(3))
    assert present(cache) == {0, 4, 5}
    assert report.num_evicted == 3
    assert report.freed_bytes > 3 * SIZE
    assert report.size_bytes <= limit(3)
    assert cache.statistics.snapshot().evictions == {"artifacts": 3}
    assert staged(cache.root) == []
    assert cache.verify().num_sound == 3


def test_all_kinds_count_together(cache, clock):
    for kind, scope in (("constants", ""), ("kernels", ARCHITECTURE), ("decisions", DEVICE), ("artifacts", DEVICE)):
        clock.now_ns += 1000
        cache.publish(kind, key(1), scope, {"a": bytes(SIZE)}, {})
    cache.evict(limit(2))
    assert {entry.name.kind for entry in cache.entries()} == {"decisions", "artifacts"}


def test_nothing_goes_while_there_is_room(cache):
    for number in range(3):
        publish(cache, number)
    report = cache.evict(limit(3))
    assert report.num_evicted == 0
    assert report.num_entries == 3
    assert cache.evict().num_evicted == 0, "no limit, nothing goes"


def test_publishing_keeps_under_the_limit(root):
    cache = KernelsCache(root, size_limit_bytes=limit(4))
    for number in range(20):
        publish(cache, number)
    assert 19 in present(cache)
    assert sum(entry.size_bytes for entry in cache.entries()) <= limit(4)
    assert cache.statistics.snapshot().evictions["artifacts"] >= 16


def test_what_another_server_published_counts_too(root):
    other = KernelsCache(root)
    for number in range(10):
        publish(other, number)
    cache = KernelsCache(root, size_limit_bytes=limit(4))
    publish(cache, 50)
    assert sum(entry.size_bytes for entry in cache.entries()) <= limit(4)
    assert 50 in present(cache)


def test_tending_brings_what_others_published_under_the_limit_and_into_the_statistics(root):
    cache, unlimited = KernelsCache(root, size_limit_bytes=limit(4)), KernelsCache(root)
    for each in (cache, unlimited):
        each.tend()
        assert each.statistics.snapshot().num_entries == 0
    other = KernelsCache(root)
    for number in range(10):
        publish(other, number)
    unlimited.tend()
    assert unlimited.statistics.snapshot().num_entries == 10
    cache.tend()
    counts = cache.statistics.snapshot()
    assert counts.evictions["artifacts"] == 6
    assert counts.num_entries == 4 and counts.size_bytes == sum(entry.size_bytes for entry in cache.entries())


def test_tending_an_unreadable_cache_is_told_and_raises_nothing(root, monkeypatch, caplog):
    cache = KernelsCache(root)
    monkeypatch.setattr(
        "hone.kernels.upkeep.listing", lambda folder: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    cache.tend()
    assert "Input/output error" in caplog.text


def test_what_was_just_published_stays_though_all_else_is_held(root):
    cache = KernelsCache(root, size_limit_bytes=limit(2))
    for number in (1, 2):
        assert cache.hold(publish(cache, number))
    publish(cache, 3)
    assert present(cache) == {1, 2, 3}


def test_what_is_held_stays(cache, clock):
    entries = []
    for number in range(4):
        clock.now_ns += 1000
        entries.append(publish(cache, number))
    assert cache.hold(entries[0])
    assert cache.hold(entries[0])
    assert cache.evict(limit(1)).num_held == 1
    assert present(cache) == {0}
    cache.release(entries[0])
    cache.evict(0)
    assert present(cache) == {0}, "held twice, released once"
    cache.release(entries[0])
    cache.evict(0)
    assert present(cache) == set()
    with pytest.raises(KeyError):
        cache.release(entries[0])


def test_what_another_cache_object_holds_stays(cache, root):
    entry = publish(cache, 1)
    other = KernelsCache(root)
    assert other.hold(other.get("artifacts", key(1), DEVICE))
    assert cache.evict(0).num_evicted == 0
    other.close()
    assert cache.evict(0).num_evicted == 1
    assert not cache.hold(entry)


HOLD = """
cache = KernelsCache(root)
entry = cache.get("artifacts", key(1), DEVICE, hold=True)
say(entry.digest == key(1))
hear()
cache.release(entry)
say("released")
hear()
"""


def test_what_another_process_holds_stays(cache, root):
    publish(cache, 1)
    publish(cache, 2)
    with child(HOLD, root) as holder:
        holder.hears("True")
        assert cache.evict(0).num_held == 1
        assert present(cache) == {1}
        holder.tell("release")
        holder.hears("released")
        cache.evict(0)
        assert present(cache) == set()


def test_what_a_killed_process_held_is_free(cache, root):
    publish(cache, 1)
    with child(HOLD, root) as holder:
        holder.hears("True")
        holder.kill()
        cache.evict(0)
        assert present(cache) == set()


def test_an_artifact_in_use_keeps_what_it_requires(cache, clock):
    kernel = cache.publish("kernels", key(7), ARCHITECTURE, {"kernel.so": bytes(SIZE)}, {})
    clock.now_ns += 1000
    cache.publish("kernels", key(8), ARCHITECTURE, {"kernel.so": bytes(SIZE)}, {})
    requires = [{"kind": "kernels", "scope": ARCHITECTURE, "digest": key(7)}, {"kind": "odd"}, 5]
    artifact = publish(cache, 1, requires=requires)
    assert cache.hold(artifact)
    cache.evict(0)
    assert kernel.path.exists()
    assert present(cache) == {1, 7}
    cache.release(artifact)
    cache.evict(0)
    assert present(cache) == set()


def test_holding_what_went_says_so(cache):
    entry = publish(cache, 1)
    cache.evict(0)
    assert not cache.hold(entry)
    again = publish(cache, 1)
    assert again.inode == entry.inode or not cache.hold(entry), "another entry at the same place is another"


def test_what_is_used_during_an_eviction_stays(cache, monkeypatch):
    """The list was made a moment ago; a use since then must be seen."""
    publish(cache, 1)
    publish(cache, 2)
    real = eviction._required_by_held

    def use_meanwhile(entries, holds):
        cache.get("artifacts", key(1), DEVICE)
        return real(entries, holds)

    monkeypatch.setattr(eviction, "_required_by_held", use_meanwhile)
    cache.evict(limit(1))
    assert 1 in present(cache)


def test_a_clock_set_back_does_not_make_the_used_look_old(cache, clock):
    for number in range(3):
        clock.now_ns += 1000
        publish(cache, number)
    clock.now_ns -= 3600 * 10**9
    cache.get("artifacts", key(0), DEVICE)
    publish(cache, 3)
    cache.evict(limit(2))
    assert present(cache) == {0, 3}


def test_a_clock_set_forward_and_back_keeps_the_order(cache, clock):
    publish(cache, 0)
    clock.now_ns += 10 * 365 * 86400 * 10**9
    publish(cache, 1)
    clock.now_ns -= 10 * 365 * 86400 * 10**9
    for number in (2, 3):
        publish(cache, number)
    cache.get("artifacts", key(0), DEVICE)
    cache.evict(limit(2))
    assert present(cache) == {0, 3}


def test_a_clock_that_stands_still_keeps_the_order(cache):
    for number in range(5):
        publish(cache, number)
    cache.get("artifacts", key(0), DEVICE)
    cache.evict(limit(2))
    assert present(cache) == {0, 4}


def test_the_order_outlives_the_process(cache, root, clock):
    for number in range(3):
        publish(cache, number)
    clock.now_ns -= 10**18
    after_restart = KernelsCache(root, now_ns=clock)
    after_restart.get("artifacts", key(0), DEVICE)
    after_restart.evict(limit(1))
    assert present(cache) == {0}


@pytest.mark.parametrize("stamp_ns", [0, (1 << 62) + 1])
def test_a_spoilt_clock_file_spoils_nothing_for_long(cache, clock, stamp_ns):
    publish(cache, 1)
    os.utime(cache.path / "clock", ns=(stamp_ns, stamp_ns))
    publish(cache, 2)
    (listed,) = [entry for entry in cache.entries() if entry.name.digest == key(2)]
    assert listed.used_ns == clock.now_ns
    (cache.path / "clock").unlink()
    publish(cache, 3)
    assert present(cache) == {1, 2, 3}


def test_an_entry_without_a_manifest_goes_first(cache):
    broken = publish(cache, 1)
    publish(cache, 2)
    cache.get("artifacts", key(1), DEVICE)
    (broken.path / "manifest.json").unlink()
    cache.evict(limit(1))
    assert present(cache) == {2}


def test_getting_while_another_evicts_is_a_hit_or_absent(root):
    """No half-removed entry is ever taken for a corrupt one."""
    cache = KernelsCache(root)
    evictor = KernelsCache(root)
    stop = threading.Event()

    def evict_all() -> None:
        while not stop.is_set():
            evictor.evict(0)

    thread = threading.Thread(target=evict_all)
    thread.start()
    try:
        for _ in range(150):
            cache.publish("artifacts", key(1), DEVICE, {"a": b"a", "b": b"b"}, {})
            entry = cache.get("artifacts", key(1), DEVICE, hold=True)
            if isinstance(entry, Entry):
                assert entry.files["b"].read_bytes() == b"b", "held: it stays"
                cache.release(entry)
            else:
                assert entry.reason is MissReason.ABSENT
    finally:
        stop.set()
        thread.join()
    assert {reason for _, reason in cache.statistics.snapshot().misses} <= {"absent"}


def test_someone_who_only_looks_is_no_reason_to_miss(root, monkeypatch):
    """An eviction asks of each artifact whether it is held: who wants to hold it then waits until it has its answer."""
    cache = KernelsCache(root)
    evictor = KernelsCache(root)
    entry = publish(cache, 1)
    waiting = threading.Event()
    monkeypatch.setattr(holds.time, "sleep", lambda _seconds: waiting.set())
    found = []
    thread = threading.Thread(target=lambda: found.append(cache.get("artifacts", key(1), DEVICE, hold=True)))
    with evictor._store.holds.exclusively(entry.path) as inode:
        assert inode == entry.inode
        thread.start()
        assert waiting.wait(30)
    thread.join()
    assert found == [entry]
    cache.close()


def test_someone_who_stopped_while_looking_is_not_waited_for_long(root, monkeypatch):
    cache = KernelsCache(root)
    evictor = KernelsCache(root)
    entry = publish(cache, 1)
    monkeypatch.setattr(holds, "_PATIENCE_SECONDS", 0.05)
    with evictor._store.holds.exclusively(entry.path):
        assert cache.get("artifacts", key(1), DEVICE, hold=True).reason is MissReason.ABSENT
    assert isinstance(cache.get("artifacts", key(1), DEVICE, hold=True), Entry)
    cache.close()


def test_an_entry_that_was_replaced_is_not_removed_for_the_old_one(root, monkeypatch):
    cache = KernelsCache(root)
    old = publish(cache, 1)
    real = fcntl.flock

    def replace_first(descriptor, operation):
        monkeypatch.undo()
        cache.publish("artifacts", key(1), DEVICE, {"a": b"new"}, {}, replace=True)
        return real(descriptor, operation)

    monkeypatch.setattr(holds.fcntl, "flock", replace_first)
    with cache._store.holds.exclusively(old.path) as inode:
        assert inode is None


def test_an_entry_that_was_replaced_while_it_was_got_is_not_held_as_the_old_one(root, monkeypatch):
    cache = KernelsCache(root)
    publish(cache, 1)
    real = store_module.read_entry

    def replace_first(path, name):
        monkeypatch.undo()
        cache.publish("artifacts", key(1), DEVICE, {"a": b"new"}, {}, replace=True)
        return real(path, name)

    monkeypatch.setattr(store_module, "read_entry", replace_first)
    assert cache.get("artifacts", key(1), DEVICE, hold=True).reason is MissReason.ABSENT
    assert cache._store.holds.num_held == 0


def test_what_came_meanwhile_is_put_back(root):
    """A damaged entry is taken away by what was seen of it; a good one that took its place is not."""
    cache = KernelsCache(root)
    entry = publish(cache, 1)
    folder = CacheFolder(root)
    assert not move_away(entry.path, folder, inode=entry.path.stat().st_ino + 1)
    assert cache.get("artifacts", key(1), DEVICE) == entry
    assert move_away(entry.path, folder, inode=entry.path.stat().st_ino)
    assert not cache.get("artifacts", key(1), DEVICE)
    assert staged(root) == []
