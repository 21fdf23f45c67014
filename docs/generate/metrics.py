"""Writes docs/metrics_reference.md: `python -m docs.generate.metrics >docs/metrics_reference.md`.

Names, types, labels and help texts are those of the families that the server exports, which are filled here with one
sample of everything, so that labels show. A test keeps the file current.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Metric

from hone.kernels import MissReason
from hone.kernels.statistics import CacheCounts
from hone.metrics import Metrics
from hone.metrics.devices import device_names, host_families
from hone.tuning.book import TunerCounters
from hone.tuning.metrics import TuningCollector

INTRODUCTION = """\
# Metrics reference

Made by `.venv/bin/python -m docs.generate.metrics >docs/metrics_reference.md` from the code; do not edit.

Every family that `/metrics` may have. What they mean together, when they appear and how to ask them is in
[metrics.md](metrics.md). A histogram has `_bucket` (with the label `le`), `_sum` and `_count`. `nv_...` names are
Triton's, `hone_...` are hone's own. The series of the first two sections have a label `_<tag>` as well for each of a
model's `metric_tags`, and `gpu_uuid` where a model runs on a known GPU.
"""

_BUCKET = {
    "signature": "IN:FP32[1,4]",
    "device": "cpu",
    "engine": "tvm",
    "generation": 1,
    "provisional": False,
    "speedup": 1.5,
    "max_error": 0.0,
}
_STATUS = {"model": "m", "version": "1", "state": "tuned", "progress": 1.0, "buckets": [_BUCKET]}


class OneOfEach:
    """Tuning in which everything has happened once; see `hone.tuning.metrics.Tuning`."""

    num_queued = 1
    num_spared = 1
    num_declined: Mapping[tuple[str, int], int] = {("m", 1): 1}
    cache_limit_bytes: int | None = 1
    counters = TunerCounters(jobs=Counter({("done", ""): 1}), specializations=Counter({"passed": 1}))

    def statuses(self) -> list[dict[str, Any]]:
        return [_STATUS]

    @property
    def cache_statistics(self) -> Any:
        return self

    def snapshot(self) -> CacheCounts:
        kind = "artifacts"
        return CacheCounts(
            hits={kind: 1},
            misses={(kind, MissReason.ABSENT.value): 1},
            publishes={(kind, "published"): 1},
            evictions={kind: 1},
            num_discarded=0,
            num_swept=0,
            size_bytes=1,
            num_entries=1,
        )


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    """As it is scraped."""
    type: str
    documentation: str
    labels: Mapping[str, list[str]]
    """Label -> values, all of them where the samples show more than one."""


def family_of(metric: Metric) -> Family:
    """Of a family with samples, which are made when asked for."""
    values: dict[str, list[str]] = {}
    for sample in metric.samples:
        for name, value in sample.labels.items():
            if name != "le" and value not in values.setdefault(name, []):
                values[name].append(value)
    # hone's own counters are written in prometheus-client's form, Triton's are not: see `hone.metrics.exposition`.
    suffix = "_total" if metric.type == "counter" and metric.name.startswith("hone_") else ""
    return Family(metric.name + suffix, metric.type, metric.documentation, dict(sorted(values.items())))


def model_families() -> list[Family]:
    """Of one model version on which everything was counted once."""
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
    statistics = metrics.model("m", "1", response_cache=True)
    for protocol, engine in (("http", "onnxruntime"), ("grpc", "tvm")):
        statistics.record_request(protocol, 1, 1, 1, 1, 1, 1, engine)
        statistics.record_execution(1, 1, 1, 1, engine)
    try:
        machine = {family.name for family in host_families()}
        return [family_of(family) for family in metrics.collect() if family.name not in machine]
    finally:
        metrics.close()


def machine_families() -> list[Family]:
    """Whether or not this machine has a GPU."""
    found = []
    for metric in (*device_names(), *host_families()):
        labels = {"gpu_uuid": [""]} if metric.name.startswith(("nv_gpu_", "nv_energy_")) else {}
        found.append(Family(metric.name, metric.type, metric.documentation, labels))
    return found


def tuning_families() -> list[Family]:
    return [family_of(metric) for metric in TuningCollector(OneOfEach()).collect()]


def table(title: str, families: Iterable[Family]) -> list[str]:
    lines = ["", f"## {title}", "", "| name | type | labels | what it is |", "|---|---|---|---|"]
    for family in families:
        labels = "<br>".join(_label(name, values) for name, values in family.labels.items())
        lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |")
    return lines


def _label(name: str, values: list[str]) -> str:
    if len(values) < 2:
        return f"`{name}`"
    return f"`{name}`: " + ", ".join(f"`{value}`" if value else "empty" for value in values)


def reference() -> str:
    """The whole page."""
    models = model_families()
    tuning = tuning_families()
    cache = [family for family in tuning if family.name.startswith("hone_cache_")]
    lines = [INTRODUCTION.rstrip("\n")]
    lines += table("Requests and executions", (family for family in models if family.type != "histogram"))
    lines += table("Latency histograms", (family for family in models if family.type == "histogram"))
    lines += table("The machine", machine_families())
    lines += table("Tuning", (family for family in tuning if family not in cache))
    lines += table("The kernels cache", cache)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
