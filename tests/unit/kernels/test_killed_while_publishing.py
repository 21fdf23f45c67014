"""A process killed at any step of publishing leaves a whole entry or none, and nothing in the next one's way."""

from __future__ import annotations

import signal

import pytest

from hone.kernels import Entry, KernelsCache, MissReason
from hone.kernels.staging import STALE_SECONDS, STEPS
from tests.unit.kernels.support import DEVICE, child, key, make_old, staged

PUBLISH = """
stop_at = sys.argv[2]
def on_step(step):
    if step == stop_at:
        say(step)
        hear()  # until killed
cache = KernelsCache(root, on_step=on_step)
files = {"module.so": b"code" * 100_000, "b.json": b"{}"}
with cache.lock("artifacts", key(1), DEVICE):
    cache.publish("artifacts", key(1), DEVICE, files, {"n": 1})
"""

#: From here on the entry has its name.
VISIBLE = ("renamed", "published")


@pytest.mark.parametrize("step", STEPS)
def test_the_entry_is_whole_or_absent(root, step):
    with child(PUBLISH, root, step) as publisher:
        publisher.hears(step)
        cache = KernelsCache(root)
        while_alive = cache.get("artifacts", key(1), DEVICE)
        publisher.kill()
        assert publisher.process.returncode == -signal.SIGKILL
    found = cache.get("artifacts", key(1), DEVICE)
    if step in VISIBLE:
        assert isinstance(while_alive, Entry)
        assert found == while_alive
        assert found.files["module.so"].read_bytes() == b"code" * 100_000
    else:
        assert while_alive.reason is found.reason is MissReason.ABSENT
    assert cache.verify().problems == ()

    # the dead one's lock is free, its leftovers are in nobody's way
    with cache.lock("artifacts", key(1), DEVICE, timeout_seconds=10):
        entry = cache.publish("artifacts", key(1), DEVICE, {"module.so": b"new"}, {"n": 2})
    assert isinstance(entry, Entry)
    assert entry.manifest["n"] == (1 if step in VISIBLE else 2)


@pytest.mark.parametrize("step", STEPS)
def test_leftovers_are_swept_when_old(root, step):
    with child(PUBLISH, root, step) as publisher:
        publisher.hears(step)
        publisher.kill()
    left = staged(root)
    assert len(left) == (0 if step in VISIBLE else 1)
    KernelsCache(root)
    assert staged(root) == left, "young ones stay: their writer may be about to lock them"
    for path in left:
        make_old(path, STALE_SECONDS + 10)
    cache = KernelsCache(root)
    assert staged(root) == []
    assert cache.statistics.snapshot().num_swept == len(left)


@pytest.mark.parametrize("age", [STALE_SECONDS + 10, -STALE_SECONDS - 10], ids=["old", "from-the-future"])
@pytest.mark.parametrize("step", ["staged", "manifest-written"])
def test_a_living_publisher_is_never_swept(root, step, age):
    """Not even when the machine's clock jumped an hour meanwhile."""
    with child(PUBLISH, root, step) as publisher:
        publisher.hears(step)
        (left,) = staged(root)
        make_old(left, age)
        cache = KernelsCache(root)
        cache.evict()
        assert staged(root) == [left]
        publisher.tell("go on")
        publisher.finish()
    assert isinstance(cache.get("artifacts", key(1), DEVICE), Entry)
    assert staged(root) == []


def test_leftovers_from_the_future_are_swept_too(root):
    with child(PUBLISH, root, "staged") as publisher:
        publisher.hears("staged")
        publisher.kill()
    (left,) = staged(root)
    make_old(left, -10 * STALE_SECONDS)
    KernelsCache(root)
    assert staged(root) == []
