"""The kernel map of what serves now, out of the artifact that tuning kept: nothing is run for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.dashboard.cache_summary import content_of
from hone.kernels import CacheUnsafe, KernelsCache


def read_map(root: Path, digest: str) -> dict[str, Any] | None:
    """The map of an artifact in the cache; None where it is gone, or has none that can be read: others' artifacts may
    be imported into a cache. Reads the cache's folder: for a thread of its own."""
    try:
        cache = KernelsCache(root, create=False)
    except CacheUnsafe:
        return None
    try:
        entries = cache.entries() if cache.exists else []
        content = next(
            (content_of(one.name, one) for one in entries if (one.name.kind, one.name.digest) == ("artifacts", digest)),
            {},
        )
    except CacheUnsafe:
        return None
    finally:
        cache.close()
    lines = content.get("kernel_map")
    if not isinstance(lines, list) or not all(map(_is_line, lines)):
        return None
    return _told(digest, content, lines)


def _is_line(line: Any) -> bool:
    """Whether it is what `tuning.kernel_map` tells of a kernel or function."""
    return (
        isinstance(line, Mapping)
        and all(isinstance(line.get(name), str) for name in ("what", "template", "rule"))
        and isinstance(line.get("parameters"), Mapping)
        and isinstance(line.get("num_calls"), int)
        and all(line.get(name) is None or _is_number(line[name]) for name in ("call_ns", "limit_ns", "operations"))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _told(digest: str, content: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares are of an inference as the gate timed it, or of the calls' sum where that is longer: alone, with their
    operands in the cache, kernels may be quicker than in their place, and slower where nothing else warms it up."""
    verdict = content.get("verdict")
    tuned_ms = verdict.get("tuned_ms") if isinstance(verdict, Mapping) else None
    tuned_ms = tuned_ms if _is_number(tuned_ms) else None
    times = [line["call_ns"] * line["num_calls"] / 1e3 if line.get("call_ns") else None for line in lines]
    measured = sum(time for time in times if time is not None)
    whole = max(measured, (tuned_ms or 0.0) * 1e3) or 1.0
    key = content.get("key")
    return {
        "artifact": digest,
        "precision": key.get("precision") if isinstance(key, Mapping) else None,
        "tuned_us": tuned_ms * 1e3 if tuned_ms else None,
        "measured_us": measured,
        "rest_us": max(0.0, whole - measured),
        "rest_share": max(0.0, whole - measured) / whole,
        "groups": [_group(line, time, whole) for line, time in zip(lines, times, strict=True)],
    }


def _group(line: Mapping[str, Any], microseconds: float | None, whole: float) -> dict[str, Any]:
    call_ns, limit_ns, work = line.get("call_ns"), line.get("limit_ns"), line.get("operations")
    return {
        "what": line["what"],
        "template": line["template"] or line["rule"],
        "parameters": line["parameters"],
        "num_calls": line["num_calls"],
        "microseconds": microseconds,
        "share": None if microseconds is None else microseconds / whole,
        "gflops": work / call_ns if work and call_ns else None,
        "of_roofline": limit_ns / call_ns if limit_ns and call_ns else None,
    }
