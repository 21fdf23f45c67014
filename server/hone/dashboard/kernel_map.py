"""The kernel map of a tuned module, out of the artifact that tuning kept: nothing is run, and no device is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hone.dashboard.cache_summary import content_of
from hone.kernels import CacheUnsafe, KernelsCache

#: Among the flags of an artifact that was made without a search; see `tuning.artifacts.artifact_key`.
_PLAIN = "plain"


class _Kept(NamedTuple):
    """An artifact of the cache. `device` is what people call the kind of device that it is for."""

    digest: str
    device: str | None
    used_ns: int
    content: Mapping[str, Any]


def read_map(root: Path, digest: str) -> dict[str, Any] | None:
    """The map of an artifact in the cache; None where it is gone, or has none that can be read: others' artifacts may
    be imported into a cache. Reads the cache's folder: for a thread of its own."""
    kept = next(iter(_kept(root, digest)), None)
    return None if kept is None else _told(kept)


def read_gpu_maps(
    root: Path,
    graph: str,
    signature: Mapping[str, Sequence[Any]],
    *,
    sources: Mapping[str, str],
    serving: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Maps of what was tuned for a graph (its fingerprint) and a signature (as artifact keys have it) on GPUs, of each
    kind of GPU and precision one: that which serves, else one of this version's own (with these `sources` in its key),
    made with a search rather than without, used last. Others' artifacts may be imported: none is trusted."""
    wanted = {name: list(told) for name, told in signature.items()}
    found: dict[tuple[str, Any], tuple[Any, dict[str, Any]]] = {}
    for kept in _kept(root):
        target, key = kept.content.get("target"), kept.content.get("key")
        if not isinstance(target, Mapping) or target.get("kind") != "cuda" or not isinstance(key, Mapping):
            continue
        if key.get("graph_sha256") != graph or key.get("signature") != wanted:
            continue
        told = _told(kept)
        if told is None:
            continue
        told |= {"serves": kept.digest in serving, "current": all(key.get(one) == sources[one] for one in sources)}
        order = (told["serves"], told["current"], not told["plain"], kept.used_ns)
        place = str(kept.device), told["precision"]
        if place not in found or order > found[place][0]:
            found[place] = order, told
    return [told for _, told in sorted(found.values(), key=lambda one: one[0], reverse=True)]


def _kept(root: Path, digest: str | None = None) -> list[_Kept]:
    """The artifacts in the cache, or the one of that name."""
    try:
        with closing(KernelsCache(root, create=False)) as cache:
            entries = cache.entries() if cache.exists else []
            devices = cache.devices() if cache.exists else {}
    except CacheUnsafe:
        return []
    found = []
    for one in entries:
        if one.name.kind == "artifacts" and digest in (None, one.name.digest):
            device = devices.get(one.name.scope)
            content = content_of(one.name, one)
            found.append(_Kept(one.name.digest, device.name if device else None, one.used_ns, content))
    return found


def _is_line(line: Any) -> bool:
    """Whether it is what `tuning.kernel_map` tells of a kernel or function."""
    return (
        isinstance(line, Mapping)
        and all(isinstance(line.get(name), str) for name in ("what", "template", "rule"))
        and isinstance(line.get("note", ""), str)
        and isinstance(line.get("parameters"), Mapping)
        and isinstance(line.get("num_calls"), int)
        and all(line.get(name) is None or _is_number(line[name]) for name in ("call_ns", "limit_ns", "operations"))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _told(kept: _Kept) -> dict[str, Any] | None:
    """Shares are of an inference as the gate timed it, or of the calls' sum where that is longer: alone, with their
    operands in the cache, kernels may be quicker than in their place, and slower where nothing else warms it up."""
    lines = kept.content.get("kernel_map")
    if not isinstance(lines, list) or not all(map(_is_line, lines)):
        return None
    target, verdict, key = (_mapping(kept.content.get(name)) for name in ("target", "verdict", "key"))
    tuned_ms, baseline_ms = (_number(verdict.get(name)) for name in ("tuned_ms", "baseline_ms"))
    times = [line["call_ns"] * line["num_calls"] / 1e3 if line.get("call_ns") else None for line in lines]
    measured = sum(time for time in times if time is not None)
    whole = max(measured, (tuned_ms or 0.0) * 1e3) or 1.0
    flags = key.get("flags")
    return {
        "artifact": kept.digest,
        "device": kept.device,
        "gpu": target.get("kind") == "cuda",
        "plain": isinstance(flags, list) and _PLAIN in flags,
        "precision": key.get("precision"),
        "tuned_us": tuned_ms * 1e3 if tuned_ms else None,
        "baseline_us": baseline_ms * 1e3 if baseline_ms else None,
        "measured_us": measured,
        "rest_us": max(0.0, whole - measured),
        "rest_share": max(0.0, whole - measured) / whole,
        "groups": [_group(line, time, whole) for line, time in zip(lines, times, strict=True)],
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _group(line: Mapping[str, Any], microseconds: float | None, whole: float) -> dict[str, Any]:
    call_ns, limit_ns, work = line.get("call_ns"), line.get("limit_ns"), line.get("operations")
    return {
        "what": line["what"],
        "note": line.get("note", ""),
        "template": line["template"] or line["rule"],
        "parameters": line["parameters"],
        "num_calls": line["num_calls"],
        "microseconds": microseconds,
        "share": None if microseconds is None else microseconds / whole,
        "gflops": work / call_ns if work and call_ns else None,
        "of_roofline": limit_ns / call_ns if limit_ns and call_ns else None,
    }
