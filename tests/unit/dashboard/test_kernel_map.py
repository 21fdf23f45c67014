"""The kernel map as the page gets it: out of the artifact's manifest, with shares of what the gate timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hone.dashboard.kernel_map import read_gpu_maps, read_map
from hone.kernels import DeviceKey, Entry, KernelsCache, digest_of

DEVICE = digest_of({"device": "test"})
KERNEL = {"what": "conv2d 1x1", "template": "cpu.conv", "parameters": {"tile": 4}, "rule": ""}
FUNCTION = {"what": "flatten", "template": "", "parameters": {}, "rule": "element-wise"}


def line(**fields: Any) -> dict[str, Any]:
    return {"num_calls": 1, "call_ns": None, "limit_ns": None, "operations": None, **fields}


def publish(root: Path, **content: Any) -> str:
    cache = KernelsCache(root)
    try:
        key = {"kind": "artifacts", "precision": "f32", "number": len(cache.entries())}
        digest = digest_of(key)
        published = cache.publish("artifacts", digest, DEVICE, {"m.so": b"y"}, {"key": key, **content})
        assert isinstance(published, Entry)
        return digest
    finally:
        cache.close()


def test_times_shares_and_distance_from_the_limit(tmp_path: Path) -> None:
    kernel = line(**KERNEL, num_calls=3, call_ns=2000.0, limit_ns=500.0, operations=8000.0)
    digest = publish(tmp_path, kernel_map=[kernel, line(**FUNCTION)], verdict={"tuned_ms": 0.012})
    publish(tmp_path, kernel_map=[])
    told = read_map(tmp_path, digest)
    assert told is not None
    assert (told["artifact"], told["precision"], told["tuned_us"]) == (digest, "f32", 12.0)
    assert (told["measured_us"], told["rest_us"], told["rest_share"]) == (6.0, 6.0, 0.5)
    first, second = told["groups"]
    assert first == {
        "what": "conv2d 1x1",
        "note": "",
        "template": "cpu.conv",
        "parameters": {"tile": 4},
        "num_calls": 3,
        "microseconds": 6.0,
        "share": 0.5,
        "gflops": 4.0,
        "of_roofline": 0.25,
    }
    assert (second["template"], second["microseconds"], second["share"]) == ("element-wise", None, None)


def test_kernels_that_are_slower_alone_have_no_more_than_all_of_the_time(tmp_path: Path) -> None:
    lines = [line(**KERNEL, call_ns=9000.0), line(**KERNEL, call_ns=3000.0)]
    told = read_map(tmp_path, publish(tmp_path, kernel_map=lines, verdict={"tuned_ms": 0.006}))
    assert told is not None
    assert [group["share"] for group in told["groups"]] == [0.75, 0.25]
    assert told["rest_share"] == 0.0


@pytest.mark.parametrize("content", [{}, {"kernel_map": None}])
def test_artifacts_without_a_map_have_none(tmp_path: Path, content: dict[str, Any]) -> None:
    assert read_map(tmp_path, publish(tmp_path, **content)) is None


@pytest.mark.parametrize(
    "broken",
    [
        "conv2d",
        None,
        {},
        {"what": 5},
        {"parameters": None},
        {"num_calls": "3"},
        {"call_ns": "fast"},
        {"limit_ns": [1]},
        {"operations": {}},
        {"note": ["padded"]},
    ],
    ids=str,
)
def test_maps_of_imported_artifacts_that_are_none(tmp_path: Path, broken: Any) -> None:
    """`cache import` brings manifests that others wrote."""
    wrong = {**line(**KERNEL), **broken} if broken and isinstance(broken, dict) else broken
    digest = publish(tmp_path, kernel_map=[line(**KERNEL), wrong])
    assert read_map(tmp_path, digest) is None


@pytest.mark.parametrize("verdict", [None, 5, {"tuned_ms": "fast"}, {"tuned_ms": None}])
def test_a_verdict_that_tells_no_time_is_none(tmp_path: Path, verdict: Any) -> None:
    told = read_map(tmp_path, publish(tmp_path, kernel_map=[line(**KERNEL, call_ns=9000.0)], verdict=verdict))
    assert told is not None
    assert (told["tuned_us"], told["groups"][0]["share"]) == (None, 1.0)


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    assert read_map(tmp_path / "nothing", "0" * 64) is None
    publish(tmp_path)
    assert read_map(tmp_path, "0" * 64) is None


# --- what was tuned on GPUs

A100, H100 = (
    DeviceKey({"kind": "gpu", "name": name, "architecture": architecture})
    for name, architecture in (("NVIDIA A100", "sm_80"), ("NVIDIA H100", "sm_90a"))
)
GRAPH, SIGNATURE = "a" * 64, {"x": ["FP32", [1, 8]]}
SOURCES = {"templates_sha256": "t" * 64, "pipeline_sha256": "p" * 64}


def publish_for(root: Path, device: DeviceKey = A100, kind: str = "cuda", tuned_ms: float = 0.05, **fields: Any) -> str:
    """An artifact with one kernel; `fields` are of its key."""
    key = {
        "kind": "artifacts", "graph_sha256": GRAPH, "signature": SIGNATURE, "precision": "tf32", "flags": [],
        "device": device.digest, **SOURCES, **fields,
    }  # fmt: skip
    digest = digest_of(key)
    cache = KernelsCache(root)
    try:
        cache.describe(device)
        told = {"target": {"kind": kind}, "verdict": {"tuned_ms": tuned_ms, "baseline_ms": 0.1}}
        told["kernel_map"] = [line(**KERNEL, call_ns=2000.0, note="padded from conv2d 1x1x3")]  # type: ignore[assignment]
        assert isinstance(
            cache.publish("artifacts", digest, device.digest, {"m.so": b"y"}, {"key": key, **told}), Entry
        )
        return digest
    finally:
        cache.close()


def gpu_maps(root: Path, *serving: str) -> list[dict[str, Any]]:
    return read_gpu_maps(root, GRAPH, SIGNATURE, sources=SOURCES, serving=serving)


def test_what_gpus_run_is_told_without_one(tmp_path: Path) -> None:
    digest = publish_for(tmp_path)
    for other in ({"graph_sha256": "b" * 64}, {"signature": {"x": ["FP32", [2, 8]]}}):
        publish_for(tmp_path, **other)
    publish_for(tmp_path, kind="cpu")
    (told,) = gpu_maps(tmp_path)
    assert (told["artifact"], told["device"], told["gpu"]) == (digest, "NVIDIA A100, sm_80", True)
    assert (told["serves"], told["current"], told["plain"]) == (False, True, False)
    assert (told["tuned_us"], told["baseline_us"]) == (50.0, 100.0)
    assert (told["groups"][0]["note"], told["groups"][0]["share"]) == ("padded from conv2d 1x1x3", 0.04)
    same = read_map(tmp_path, digest)
    assert same is not None
    assert same.items() <= told.items()


def test_each_gpu_and_precision_has_one_map_and_what_serves_comes_first(tmp_path: Path) -> None:
    old = publish_for(tmp_path, pipeline_sha256="o" * 64)
    plain = publish_for(tmp_path, flags=["margin=0.03", "plain"])
    searched = publish_for(tmp_path, flags=["margin=0.03"])
    half = publish_for(tmp_path, precision="f16")
    other = publish_for(tmp_path, H100)
    assert {one["artifact"] for one in gpu_maps(tmp_path)} == {searched, half, other}
    serving = gpu_maps(tmp_path, plain)
    assert {one["artifact"] for one in serving} == {plain, half, other}
    assert (serving[0]["artifact"], serving[0]["serves"], serving[0]["plain"]) == (plain, True, True)
    (left,) = [one for one in gpu_maps(tmp_path, old) if one["artifact"] == old]
    assert (left["serves"], left["current"]) == (True, False)


def test_without_a_cache_there_are_no_maps(tmp_path: Path) -> None:
    assert gpu_maps(tmp_path / "nothing") == []
