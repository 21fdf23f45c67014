"""A folder that cannot be written serves what is in it; one that cannot be made serves nothing; both with a warning."""

from __future__ import annotations

import os
import subprocess

import pytest

from hone.kernels import Built, Entry, FailureReason, KernelsCache
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, key, mounted, warnings_of


def use_without_writing(cache: KernelsCache) -> None:
    """All that a server does, none of which may raise."""
    failure = cache.publish("artifacts", key(2), DEVICE, {"a": b"a"}, {})
    assert failure.reason is FailureReason.READ_ONLY
    assert (
        cache.get_or_build("kernels", key(2), ARCHITECTURE, lambda: Built({"a": b"a"}, {})).reason
        is FailureReason.READ_ONLY
    )
    with cache.lock("artifacts", key(2), DEVICE):
        pass
    cache.quarantine(key(1), DEVICE, "NaN")
    assert cache.quarantined(key(1), DEVICE) == "NaN", "remembered by this process"
    cache.strike(key(3), DEVICE, "latency", "slow")
    assert cache.quarantined(key(3), DEVICE) is None
    cache.strike(key(3), DEVICE, "latency", "slow again")
    assert cache.quarantined(key(3), DEVICE) == "slow again"


def test_a_read_only_mount(tmp_path, caplog):
    place = tmp_path / "volume"
    with mounted(place, "size=1m,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting takes root; the folder without write permission below stands in for it")
        cache = KernelsCache(place / "cache")
        entry = cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
        damaged = cache.publish("artifacts", key(9), DEVICE, {"a": b"a"}, {})
        damaged.files["a"].write_bytes(b"b")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)

        cache = KernelsCache(place / "cache")
        assert cache.get("artifacts", key(1), DEVICE) == entry
        assert cache.get("artifacts", key(1), DEVICE, hold=True) == entry
        assert cache.get("artifacts", key(9), DEVICE).reason == "corrupt"
        use_without_writing(cache)
        assert cache.evict(0).num_evicted == 0
        cache.release(entry)
        told = [text for text in warnings_of(caplog) if "serving goes on" in text]
        assert len(told) == 1
        assert "read-only" in told[0]

        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        assert isinstance(cache.publish("artifacts", key(2), DEVICE, {"a": b"a"}, {}), Entry), "when it can, it keeps"


def test_a_read_only_mount_without_a_cache(tmp_path, caplog):
    place = tmp_path / "volume"
    with mounted(place, "size=1m,mode=0700,ro") as can_mount:
        if not can_mount:
            pytest.skip("mounting takes root; the folder without write permission below stands in for it")
        cache = KernelsCache(place / "cache")
        assert not cache.get("artifacts", key(1), DEVICE)
        use_without_writing(cache)
        assert len(warnings_of(caplog)) == 1
        assert cache.entries() == []
        assert cache.verify().problems == ()
        assert cache.evict().num_evicted == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only mounts above stand in for it")
def test_a_folder_without_write_permission(tmp_path, caplog):
    cache = KernelsCache(tmp_path / "cache")
    entry = cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    for path in (cache.path, cache.path / ".staging", tmp_path / "cache"):
        path.chmod(0o500)
    try:
        cache = KernelsCache(tmp_path / "cache")
        assert cache.get("artifacts", key(1), DEVICE) == entry
        use_without_writing(cache)
        assert len([text for text in warnings_of(caplog) if "serving goes on" in text]) == 1
    finally:
        for path in (tmp_path / "cache", cache.path, cache.path / ".staging"):
            path.chmod(0o700)
