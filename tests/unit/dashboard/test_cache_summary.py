"""The cache as the page sees it: entries by kind, and who shares which kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.dashboard.cache_summary import summarize
from hone.kernels import Entry, KernelsCache, digest_of

DEVICE = digest_of({"device": "test"})
ARCHITECTURE = "x86-64-v4-0123456789ab"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[KernelsCache]:
    opened = KernelsCache(tmp_path / "cache")
    yield opened
    opened.close()


def kernel(cache: KernelsCache, number: int) -> str:
    key = {"kind": "kernels", "template": "cpu.conv", "workload": {"op": "conv2d", "number": number}}
    digest = digest_of(key)
    assert isinstance(cache.publish("kernels", digest, ARCHITECTURE, {"k.so": b"x" * 100}, {"key": key}), Entry)
    return digest


def artifact(cache: KernelsCache, graph: str, kernels: list[str]) -> str:
    key = {"kind": "artifacts", "graph_sha256": graph}
    digest = digest_of(key)
    content = {"key": key, "kernels": kernels}
    assert isinstance(cache.publish("artifacts", digest, DEVICE, {"m.so": b"y" * 10}, content), Entry)
    return digest


def test_kernels_of_several_models_are_shared(cache: KernelsCache, tmp_path: Path):
    common, own = kernel(cache, 1), kernel(cache, 2)
    artifact(cache, "a" * 64, [common, own])
    artifact(cache, "b" * 64, [common])
    told = summarize(tmp_path / "cache", {"a" * 64: "first"})
    assert {kind: counts["num_entries"] for kind, counts in told["kinds"].items()} == {"kernels": 2, "artifacts": 2}
    assert told["num_entries"] == 4
    assert told["size_bytes"] == sum(counts["size_bytes"] for counts in told["kinds"].values()) >= 220
    assert (told["num_used_kernels"], told["num_shared_kernels"]) == (2, 1)
    (shared,) = told["shared"]
    assert shared["digest"] == common
    assert shared["models"] == ["first", f"graph {'b' * 12}"]
    assert shared["template"] == "cpu.conv"
    assert shared["workload"]["number"] == 1


def test_what_cannot_be_read_is_passed_over(cache: KernelsCache, tmp_path: Path):
    digest = artifact(cache, "a" * 64, [kernel(cache, 1)])
    (entry,) = (listed for listed in cache.entries() if listed.name.digest == digest)
    (entry.path / "manifest.json").write_text("{")
    told = summarize(tmp_path / "cache", {})
    assert told["num_entries"] == 2
    assert told["num_used_kernels"] == 0


def test_what_is_kept_out_is_named(cache: KernelsCache, tmp_path: Path):
    digest = artifact(cache, "a" * 64, [])
    cache.quarantine(digest, DEVICE, "outputs were wrong")
    told = summarize(tmp_path / "cache", {})
    assert told["quarantined"] == [{"digest": digest, "reason": "outputs were wrong"}]


def test_no_cache_yet(tmp_path: Path):
    assert summarize(tmp_path / "nothing", {})["exists"] is False
    assert not (tmp_path / "nothing").exists()
