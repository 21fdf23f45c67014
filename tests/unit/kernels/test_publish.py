"""An entry appears whole or not at all, once, and explains itself."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from hone.kernels import Built, Entry, Failure, FailureReason, KernelsCache, Miss, MissReason, digest_of
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, key, staged, warnings_of

KINDS = [("kernels", ARCHITECTURE), ("decisions", DEVICE), ("artifacts", DEVICE), ("constants", "")]


@pytest.mark.parametrize(("kind", "scope"), KINDS)
def test_what_was_published_is_got(cache, kind, scope, tmp_path):
    source = tmp_path / "built.so"
    source.write_bytes(b"code" * 1000)
    published = cache.publish(kind, key(1), scope, {"module.so": source, "notes.json": b"{}"}, {"speedup": 1.5})
    assert isinstance(published, Entry)
    got = cache.get(kind, key(1), scope)
    assert got == published
    assert got.files["module.so"].read_bytes() == b"code" * 1000
    assert got.files["notes.json"].read_bytes() == b"{}"
    assert got.manifest == {"speedup": 1.5}
    assert got.size_bytes == 4002
    assert got.proven
    assert staged(cache.root) == []


def test_where_entries_lie(cache):
    for kind, scope in KINDS:
        cache.publish(kind, key(1), scope, {"a": b"a"}, {})
    found = sorted(str(path.parent.relative_to(cache.root)) for path in cache.root.rglob("manifest.json"))
    assert found == sorted(
        [
            f"v1/kernels/{ARCHITECTURE}/{key(1)}",
            f"v1/{DEVICE}/decisions/{key(1)}",
            f"v1/{DEVICE}/artifacts/{key(1)}",
            f"v1/constants/{key(1)}",
        ]
    )


def test_the_manifest_is_json_with_size_and_hash_of_every_file(cache):
    entry = cache.publish("artifacts", key(1), DEVICE, {"module.so": b"code", "b.json": b""}, {"tuned_ms": 1.25})
    told = json.loads((entry.path / "manifest.json").read_text())
    assert told["files"] == {
        "module.so": {"size": 4, "sha256": hashlib.sha256(b"code").hexdigest()},
        "b.json": {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()},
    }
    assert (told["schema"], told["kind"], told["scope"], told["digest"]) == (1, "artifacts", DEVICE, key(1))
    assert told["content"] == {"tuned_ms": 1.25}


def test_nobody_else_can_read_what_is_kept(cache):
    before = os.umask(0)
    try:
        cache.publish("artifacts", key(1), DEVICE, {"module.so": b"code"}, {})
    finally:
        os.umask(before)
    for path in [cache.path, *cache.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_entry_that_is_there_is_not_written_again(cache):
    first = cache.publish("artifacts", key(1), DEVICE, {"a": b"first"}, {})
    second = cache.publish("artifacts", key(1), DEVICE, {"a": b"second"}, {})
    assert second.inode == first.inode
    assert second.files["a"].read_bytes() == b"first"
    assert cache.statistics.snapshot().publishes == {("artifacts", "published"): 1, ("artifacts", "present"): 1}


def test_replacing_makes_room(cache):
    first = cache.publish("decisions", key(1), DEVICE, {"a": b"provisional"}, {"provisional": True})
    assert cache.hold(first)
    second = cache.publish("decisions", key(1), DEVICE, {"a": b"measured"}, {"provisional": False}, replace=True)
    assert second.inode != first.inode
    assert cache.get("decisions", key(1), DEVICE).files["a"].read_bytes() == b"measured"
    assert staged(cache.root) == []
    cache.release(first)
    assert not cache.hold(first), "the old one is gone"


def test_a_rival_that_is_faster_wins_and_that_is_success(root):
    rival = KernelsCache(root)
    won = []

    def on_step(step: str) -> None:
        if step == "synced":
            won.append(rival.publish("artifacts", key(1), DEVICE, {"a": b"rival"}, {}))

    cache = KernelsCache(root, on_step=on_step)
    entry = cache.publish("artifacts", key(1), DEVICE, {"a": b"ours"}, {})
    assert entry == won[0]
    assert cache.statistics.snapshot().publishes == {("artifacts", "present"): 1}
    assert staged(root) == []


def test_a_damaged_entry_is_replaced(cache, root):
    cache.publish("artifacts", key(1), DEVICE, {"a": b"good"}, {})
    (cache.get("artifacts", key(1), DEVICE).path / "a").write_bytes(b"evil")
    entry = cache.publish("artifacts", key(1), DEVICE, {"a": b"good"}, {})
    assert isinstance(entry, Entry)
    assert cache.get("artifacts", key(1), DEVICE).files["a"].read_bytes() == b"good"
    assert staged(root) == []


def test_eight_threads_publish_one_entry(cache):
    start = threading.Barrier(8)
    results = []

    def work() -> None:
        start.wait()
        results.append(cache.publish("artifacts", key(1), DEVICE, {"a": b"x" * 100_000}, {}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry.inode for entry in results}) == 1
    assert cache.statistics.snapshot().publishes[("artifacts", "published")] == 1
    assert staged(cache.root) == []


def test_the_key_in_a_manifest_must_be_of_the_digest(cache):
    fields = {"graph": "abc", "shape": [1, 2]}
    entry = cache.publish(
        "artifacts", digest_of(fields), DEVICE, {"a": b"a"}, {"key": {"shape": (1, 2), "graph": "abc"}}
    )
    assert isinstance(entry, Entry)
    with pytest.raises(ValueError, match="key in the manifest"):
        cache.publish("artifacts", key(2), DEVICE, {"a": b"a"}, {"key": fields})
    assert staged(cache.root) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "/a", ".hidden", "manifest.json", "a\0b", "ä", "a b", "x" * 101]
)
def test_files_with_odd_names_are_refused(cache, name):
    with pytest.raises(ValueError, match="cannot be a file"):
        cache.publish("artifacts", key(1), DEVICE, {name: b"a"}, {})
    assert cache.entries() == []


@pytest.mark.parametrize(
    ("kind", "digest", "scope", "told"),
    [
        ("weights", key(1), DEVICE, "unknown"),
        ("artifacts", "abc", DEVICE, "no digest"),
        ("artifacts", key(1).upper(), DEVICE, "no digest"),
        ("artifacts", key(1), "", "device key"),
        ("artifacts", key(1), "../up", "device key"),
        ("artifacts", key(1), "kernels", "device key"),
        ("artifacts", key(1), ".staging", "device key"),
        ("kernels", key(1), "a/b", "architecture"),
        ("kernels", key(1), "x" * 65, "architecture"),
        ("constants", key(1), DEVICE, "no scope"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(cache, kind, digest, scope, told):
    with pytest.raises(ValueError, match=told):
        cache.get(kind, digest, scope)
    with pytest.raises(ValueError, match=told):
        cache.publish(kind, digest, scope, {"a": b"a"}, {})


def test_what_is_not_json_is_refused_before_anything_is_copied(cache, tmp_path):
    with pytest.raises(TypeError, match=r"content\.x: object"):
        cache.publish("artifacts", key(1), DEVICE, {"a": tmp_path / "absent"}, {"x": object()})


def test_a_source_that_is_gone_is_a_failure(cache, tmp_path, caplog):
    failure = cache.publish("artifacts", key(1), DEVICE, {"a": tmp_path / "absent"}, {})
    assert not failure
    assert failure.reason is FailureReason.ERROR
    assert str(tmp_path / "absent") in failure.detail
    assert len(warnings_of(caplog)) == 1
    assert staged(cache.root) == []


def test_more_than_the_whole_cache_may_have_is_not_written(root):
    cache = KernelsCache(root, size_limit_bytes=1000)
    failure = cache.publish("artifacts", key(1), DEVICE, {"a": b"x" * 1001}, {})
    assert isinstance(failure, Failure)
    assert failure.reason is FailureReason.TOO_LARGE


def test_get_or_build_builds_what_is_not_there(cache):
    calls = []

    def build() -> Built:
        calls.append(1)
        return Built({"a": b"built"}, {"n": 1})

    first = cache.get_or_build("kernels", key(1), ARCHITECTURE, build)
    second = cache.get_or_build("kernels", key(1), ARCHITECTURE, build)
    assert calls == [1]
    assert first == second


def test_a_failed_build_is_told_and_tried_again(cache):
    failure = Failure(FailureReason.ERROR, "compiler said no")
    assert cache.get_or_build("kernels", key(1), ARCHITECTURE, lambda: failure) is failure
    assert isinstance(cache.get_or_build("kernels", key(1), ARCHITECTURE, lambda: Built({"a": b""}, {})), Entry), (
        "nobody still holds the lock"
    )


def test_a_build_that_raises_lets_go_of_the_lock(cache):
    def build() -> Built:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_build("kernels", key(1), ARCHITECTURE, build)
    with cache.lock("kernels", key(1), ARCHITECTURE, timeout_seconds=0):
        pass


def test_nothing_published_is_a_miss(cache):
    assert cache.get("artifacts", key(1), DEVICE) == Miss(MissReason.ABSENT)
    assert cache.statistics.snapshot().misses == {("artifacts", "absent"): 1}


def test_everything_is_on_the_disk_before_it_has_its_name(root, monkeypatch):
    """In the order that a power failure needs: contents, then the folder's names, then the name of the entry."""
    events = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    cache = KernelsCache(root, on_step=events.append)
    monkeypatch.setattr(os, "fsync", fsync)
    entry = cache.publish("artifacts", key(1), DEVICE, {"a.so": b"a", "b.so": b"b"}, {})
    renamed = events.index("renamed")
    before = [event.rsplit("/", 1)[-1] for event in events[:renamed]]
    staging = next(event.rsplit("/", 2)[-2] for event in events if event.endswith("/a.so"))
    for name in ("a.so", "b.so", "manifest.json"):
        assert before.index(name) < before.index(staging), name
    assert str(entry.path.parent.parent) in events[:renamed], "the new folders above it"
    assert str(entry.path.parent) in events[renamed : events.index("published")]
