"""How soon does a dropped model run tuned, and what does the cache save? `make bench-promotion`.

For each model: seconds from the server's start to ready, with and without tuning, and to the first promotion with an
empty kernels cache. Then, for the ResNet-50, a second start on the cache that the first one filled; and a second model
that shares workloads with one that was tuned before: what was measured for it, by the server's own counters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bench import hone_command, note
from benchmarks.processes import ROOT, child, free_ports
from benchmarks.report import describe_machine

RESULTS = ROOT / "benchmarks" / "results" / "promotion.json"
_COUNTERS = ("candidates_built", "candidates_measured", "workloads_remembered", "child_seconds", "promotions")
#: Seconds from a second start to promoted, for the ResNet-50.
_SECOND_START_BAR = 2.0
_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Subject:
    """A model to drop. `bar`: seconds to its first promotion; None where there is none. `limit`: seconds that it gets
    before one goes on without."""

    name: str
    folder: Path
    limit: float
    bar: float | None = None


def chain_model(path: Path) -> None:
    """Sixteen element-wise operators on 1x3x512x512."""
    dims = (1, 3, 512, 512)
    nodes, value = [], "IN"
    for number in range(16):
        out = "OUT" if number == 15 else f"v{number}"
        operator = ("Mul", "Add", "Relu", "Sub", "Abs")[number % 5]
        nodes.append(helper.make_node(operator, [value] if operator in ("Relu", "Abs") else [value, "c"], [out]))
        value = out
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("IN", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, dims)],
        [helper.make_tensor("c", TensorProto.FLOAT, [], [1.25])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True)
    path.write_bytes(model.SerializeToString())


def with_other_weights(source: Path, target: Path, max_batch_size: int) -> None:
    """The same operators and shapes with other weights: another model to every cache that goes by the graph. With a
    larger batch it has workloads of its own beside those that it shares."""
    model = onnx.load(source / "1" / "model.onnx")
    generator = np.random.default_rng(list(target.name.encode()))
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim > 1:
            noise = generator.normal(1.0, 0.05, values.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values * noise, tensor.name))
    (target / "1").mkdir(parents=True)
    onnx.save(model, target / "1" / "model.onnx")
    config = (source / "config.pbtxt").read_text(encoding="utf-8")
    config = re.sub(r'name: "digits"', f'name: "{target.name}"', config, count=1)
    config = re.sub(r"max_batch_size: *[0-9]+", f"max_batch_size: {max_batch_size}", config)
    config = re.sub(r' *label_filename: "[^"]*"\n', "", config)
    (target / "config.pbtxt").write_text(config, encoding="utf-8")


@dataclass(frozen=True)
class Running:
    """A server, and when it was started."""

    began: float
    ready_seconds: float
    port: int
    metrics_port: int

    def status(self, model: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/models/{model}/tuning", timeout=30) as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told

    def counters(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = {}
        for name in _COUNTERS:
            value = re.search(rf"^hone_tuning_{name}_total ([0-9.e+]+)$", text, re.MULTILINE)
            found[name] = float(value[1]) if value else 0.0
        return found

    def until(self, model: str, *, settled: bool, limit: float) -> tuple[float | None, dict[str, Any]]:
        """Seconds from the start to the first promotion (or the end of tuning); None when it was not before `limit`,
        or when tuning ended without one."""
        while True:
            told = self.status(model)
            seconds = time.perf_counter() - self.began
            over = told["state"] not in ("queued", "tuning") and "has not looked" not in told["reason"]
            promoted = any(bucket["engine"] == "tvm" for bucket in told["buckets"])
            if over if settled else promoted:
                return seconds, told
            if over or seconds > limit:
                return None, told
            time.sleep(_TICK_SECONDS)


@contextlib.contextmanager
def serving(repository: Path, *flags: str) -> Iterator[Running]:
    ports = free_ports(3)
    command = [part for part in hone_command(repository, ports) if part != "--tuning=off"]
    began = time.perf_counter()
    with child("hone", [*command, *flags]) as process:
        process.wait_ready(ports[0])
        yield Running(began, time.perf_counter() - began, ports[0], ports[2])


def repository_of(root: Path, subject: Subject) -> Path:
    repository = root / f"repository-{subject.name}"
    shutil.copytree(subject.folder, repository / subject.name)
    config = repository / subject.name / "config.pbtxt"
    if config.is_file():
        text = config.read_text(encoding="utf-8")
        config.write_text(re.sub(r'^name: "[^"]*"', f'name: "{subject.name}"', text, count=1, flags=re.MULTILINE))
    return repository


def drop(root: Path, subject: Subject) -> dict[str, Any]:
    """One model on an empty cache, which it leaves filled in `root`."""
    repository = repository_of(root, subject)
    with serving(repository, "--tuning=off") as running:
        told: dict[str, Any] = {"ready_seconds_off": running.ready_seconds}
    with serving(repository, "--tuning=on", f"--kernels-cache={root / subject.name}") as running:
        told["ready_seconds_on"] = running.ready_seconds
        told["promoted_seconds"], status = running.until(subject.name, settled=False, limit=subject.limit)
        told["settled_seconds"], status = running.until(subject.name, settled=True, limit=subject.limit)
        told |= {"state": status["state"], "buckets": status["buckets"], "counters": running.counters()}
    return told


def second_start(root: Path, subject: Subject) -> dict[str, Any]:
    with serving(
        root / f"repository-{subject.name}", "--tuning=on", f"--kernels-cache={root / subject.name}"
    ) as running:
        promoted, _ = running.until(subject.name, settled=False, limit=60.0)
        return {"ready_seconds": running.ready_seconds, "promoted_seconds": promoted, "counters": running.counters()}


def shared(root: Path, first: Subject, limit: float) -> dict[str, Any]:
    """A model with the operators of `first`, whose cache it gets: once with the same batches, once with one more."""
    told: dict[str, Any] = {}
    for name, max_batch_size in (("same_workloads", 8), ("one_batch_more", 16)):
        repository = root / f"repository-{name}"
        with_other_weights(first.folder, repository / name, max_batch_size)
        with serving(repository, "--tuning=on", f"--kernels-cache={root / first.name}") as running:
            running.until(name, settled=True, limit=limit)
            told[name] = running.counters()
    return told


def line(subject: Subject, told: dict[str, Any]) -> str:
    promoted = told["promoted_seconds"]
    when = f"first promotion after {promoted:.1f} s" if promoted is not None else f"not promoted ({told['state']})"
    bar = ""
    if subject.bar is not None:
        met = promoted is not None and promoted <= subject.bar
        bar = f" (bar {subject.bar:g} s: {'met' if met else 'MISSED'})"
    best = max((bucket["speedup"] or 0.0 for bucket in told["buckets"] if bucket["engine"] == "tvm"), default=0.0)
    faster = f", speed-up {best:.2f}" if best else ""
    return (
        f"{subject.name}: ready after {told['ready_seconds_on']:.2f} s with tuning, {told['ready_seconds_off']:.2f} s"
        f" without; {when}{bar}{faster}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promotion", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of models")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a model without a bar (default: 600)")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/promotion.json, if complete)")
    arguments = parser.parse_args()
    told: dict[str, Any] = {**describe_machine(), "models": {}}
    with tempfile.TemporaryDirectory(prefix="hone-bench-promotion-") as folder:
        root = Path(folder)
        chain_model(root / "chain" / "1" / "model.onnx")
        digits = Subject("digits", ROOT / "model_repo" / "digits", 120.0, bar=30.0)
        resnet = Subject("resnet50", ROOT / "model_repo" / "resnet50", arguments.limit)
        subjects = [
            digits,
            Subject("chain", root / "chain", 120.0, bar=60.0),
            Subject("angle_classifier", ROOT / "real_models" / "angle_classifier", arguments.limit),
            resnet,
        ]
        for subject in subjects:
            if arguments.only and subject.name not in arguments.only:
                continue
            if not (subject.folder / "1" / "model.onnx").is_file():
                print(f"{subject.name}: not measured; `make setup real-models` brings it")
                continue
            note(f"dropping {subject.name}")
            found = told["models"][subject.name] = drop(root, subject)
            print(line(subject, found), flush=True)
            if subject is digits:
                found["shared"] = shared(root, digits, 120.0)
                for name, counters in found["shared"].items():
                    print(
                        f"{digits.name} with other weights, {name.replace('_', ' ')}:"
                        f" {counters['workloads_remembered']:.0f} workloads remembered,"
                        f" {counters['candidates_measured']:.0f} candidates measured"
                    )
            if subject is resnet and found["promoted_seconds"] is not None:
                again = found["second_start"] = second_start(root, subject)
                promoted = again["promoted_seconds"]
                met = promoted is not None and promoted <= _SECOND_START_BAR
                after = f"{promoted:.2f} s" if promoted is not None else "more than a minute"
                print(
                    f"{subject.name}, second start: ready after {again['ready_seconds']:.2f} s, promoted after {after}"
                    f" (bar {_SECOND_START_BAR:g} s: {'met' if met else 'MISSED'}),"
                    f" {again['counters']['child_seconds']:.0f} s of tuning"
                )
    output = arguments.output or (None if arguments.only else RESULTS)
    if output is not None:
        output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
