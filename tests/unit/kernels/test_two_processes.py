"""Two servers on one folder: each thing is built once, and both end up with it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hone.kernels import Built, CacheBusy, Entry, KernelsCache
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, child, key, staged

BUILD = """
cache = KernelsCache(root)
say("ready")
hear()
num_built = 0
def build():
    global num_built
    num_built += 1
    return Built({"kernel.so": os.urandom(100_000)}, {"builder": os.getpid()})
inodes = []
for number in range(40):
    entry = cache.get_or_build("kernels", key(number), ARCHITECTURE, build)
    inodes.append(entry.inode)
say(num_built)
say(" ".join(map(str, inodes)))
"""


def test_each_thing_is_built_once(root):
    with child(BUILD, root) as one, child(BUILD, root) as other:
        both = (one, other)
        for builder in both:
            builder.hears("ready")
        for builder in both:
            builder.tell("go")
        built = [int(builder.read()) for builder in both]
        inodes = [builder.read() for builder in both]
        for builder in both:
            builder.finish()
    assert sum(built) == 40
    assert inodes[0] == inodes[1]
    assert staged(root) == []


HOLD_LOCK = """
cache = KernelsCache(root)
with cache.lock("artifacts", key(1), DEVICE):
    say("locked")
    hear()
say("unlocked")
hear()
"""


def test_a_lock_is_waited_for_no_longer_than_told(root, cache):
    with child(HOLD_LOCK, root) as other:
        other.hears("locked")
        with (
            pytest.raises(CacheBusy, match="another process"),
            cache.lock("artifacts", key(1), DEVICE, timeout_seconds=0.05),
        ):
            pass
        with cache.lock("artifacts", key(2), DEVICE, timeout_seconds=0):
            pass
        with cache.lock("decisions", key(1), DEVICE, timeout_seconds=0):
            pass
        other.tell()
        other.hears("unlocked")
        with cache.lock("artifacts", key(1), DEVICE, timeout_seconds=10):
            pass


def test_waiting_for_a_lock_ends_when_cancelled(root, cache):
    cancelled = threading.Event()
    with child(HOLD_LOCK, root) as other:
        other.hears("locked")
        threading.Timer(0.1, cancelled.set).start()
        with pytest.raises(CacheBusy), cache.lock("artifacts", key(1), DEVICE, cancelled=cancelled.is_set):
            pass


def test_the_lock_of_a_killed_process_is_free(root, cache):
    with child(HOLD_LOCK, root) as other:
        other.hears("locked")
        other.kill()
        with cache.lock("artifacts", key(1), DEVICE, timeout_seconds=10):
            pass


def test_the_lock_of_a_stopped_process_is_not(root, cache):
    with child(HOLD_LOCK, root) as other:
        other.hears("locked")
        os.kill(other.process.pid, signal.SIGSTOP)
        with pytest.raises(CacheBusy), cache.lock("artifacts", key(1), DEVICE, timeout_seconds=0.2):
            pass


def test_who_waited_takes_what_the_other_built(root, cache):
    """The look after the lock: without it this would build again."""
    rival = KernelsCache(root)
    waiting = threading.Event()
    calls = []

    def cancelled() -> bool:
        waiting.set()  # asked only while waiting
        return False

    def build() -> Built:
        calls.append(1)
        return Built({"a": b"second"}, {})

    result = []
    with rival.lock("kernels", key(1), ARCHITECTURE):
        thread = threading.Thread(
            target=lambda: result.append(
                cache.get_or_build("kernels", key(1), ARCHITECTURE, build, cancelled=cancelled)
            )
        )
        thread.start()
        assert waiting.wait(30)
        entry = rival.publish("kernels", key(1), ARCHITECTURE, {"a": b"first"}, {})
    thread.join(30)
    assert isinstance(entry, Entry)
    assert result == [entry]
    assert calls == []


def test_old_lock_files_go_and_held_ones_stay(root, cache):
    with cache.lock("artifacts", key(1), DEVICE), cache.lock("artifacts", key(2), DEVICE):
        pass
    locks = root / "v1" / "locks"
    with child(HOLD_LOCK, root) as other:
        other.hears("locked")
        for path in locks.iterdir():
            os.utime(path, (0, 0))
        cache.evict()
        assert [path.name for path in locks.glob("artifacts-*")] == [f"artifacts-{DEVICE}-{key(1)}.lock"]
        with pytest.raises(CacheBusy), cache.lock("artifacts", key(1), DEVICE, timeout_seconds=0):
            pass
