"""Are tuned models faster on a CPU? `make bench-cpu`: ONNX Runtime, OpenVINO and hone side by side.

Each model is tuned with `hone tune`, all into one kernels cache that starts empty, at each precision with a budget of
its own. Then every engine runs the same inputs in a process of its own, with as many threads each; they take turns, so
that what disturbs one disturbs all, and while one has its turn the others sleep. A model that was not promoted counts
with its baseline's time, and the table says why. Results go into benchmarks/results/cpu.json after each model, from
where `--resume` goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import note
from benchmarks.cpu_models import BATCHES, MODELS, CpuModel, find_model, provide
from benchmarks.cpu_tuning import Tuned, save_inputs, tune
from benchmarks.processes import ROOT, BenchmarkError, Child, child
from benchmarks.report import describe_machine

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
OPENVINO_PYTHON = ROOT / ".venv-openvino" / "bin" / "python"
PRECISIONS = ("f32", "bf16")
#: Where noise was the reason of a refusal, as a server does once it rests.
_NUM_RETRIES = 2
#: Between turns: the threads of the last one stop spinning.
_REST_SECONDS = 0.05


@dataclass(frozen=True)
class Contender:
    """`name` is its column: the engine and the precision."""

    name: str
    engine: str
    precision: str


CONTENDERS = (
    Contender("onnxruntime", "onnxruntime", "f32"),
    Contender("openvino_f32", "openvino", "f32"),
    Contender("openvino_bf16", "openvino", "bf16"),
    Contender("hone_f32", "hone", "f32"),
    Contender("hone_bf16", "hone", "bf16"),
)
BASELINE = "onnxruntime"
#: Name of a geometric mean -> whose time is divided by whose.
MEANS = {
    "f32_vs_onnxruntime": ("onnxruntime", "hone_f32"),
    "f32_vs_openvino": ("openvino_f32", "hone_f32"),
    "bf16_vs_onnxruntime": ("onnxruntime", "hone_bf16"),
    "bf16_vs_openvino": ("openvino_bf16", "hone_bf16"),
}


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of turns for each batch, and seconds of a turn."""

    rounds: Mapping[int, int]
    seconds: float


FULL = Effort({1: 15, 8: 7}, 0.25)
QUICK = Effort({1: 4, 8: 2}, 0.1)


class Worker:
    """An engine with one model, in its process."""

    def __init__(self, started: Child) -> None:
        self._child = started

    def wait_ready(self) -> None:
        self._child.read_line()

    def run(self, batch: int, seconds: float) -> float:
        """Median nanoseconds of a call in this turn."""
        pipe = self._child.process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"batch": batch, "seconds": seconds}) + "\n")
        pipe.flush()
        return float(median(json.loads(self._child.read_line())["ns"]))


@contextlib.contextmanager
def workers(
    model: CpuModel, path: Path, tuned: Mapping[str, Tuned], cache: Path, folder: Path, threads: int
) -> Iterator[dict[str, tuple[Worker, list[int]]]]:
    """A worker for each contender that has something of its own to run, and the batches that it runs."""
    inputs = save_inputs(model, BATCHES, folder / "inputs")
    with contextlib.ExitStack() as stack:
        running: dict[str, tuple[Worker, list[int]]] = {}
        for contender in CONTENDERS:
            batches = list(BATCHES)
            job: dict[str, Any] = {
                "engine": contender.engine,
                "precision": contender.precision,
                "threads": threads,
                "model": str(path),
            }
            python = sys.executable
            if contender.engine == "openvino":
                python = str(OPENVINO_PYTHON)
            if contender.engine == "hone":
                outcome = tuned.get(contender.precision)
                batches = sorted(outcome.artifacts) if outcome else []
                if not outcome or not batches:
                    continue
                job |= {"cache": str(cache), "artifacts": {str(batch): outcome.artifacts[batch] for batch in batches}}
            job["inputs"] = {str(batch): inputs[str(batch)] for batch in batches}
            command = [python, "-m", "benchmarks.cpu_worker", json.dumps(job)]
            started = stack.enter_context(child(contender.name, command, _environment(), pipe=True, keep_input=True))
            running[contender.name] = (Worker(started), batches)
        for worker, _ in running.values():
            worker.wait_ready()
        yield running


def measure(running: Mapping[str, tuple[Worker, list[int]]], batch: int, effort: Effort) -> dict[str, list[float]]:
    """Nanoseconds of each round by contender, in turns that change direction every round."""
    names = [name for name, (_, batches) in running.items() if batch in batches]
    taken: dict[str, list[float]] = {name: [] for name in names}
    for i in range(effort.rounds[batch]):
        for name in names if i % 2 == 0 else reversed(names):
            time.sleep(_REST_SECONDS)
            taken[name].append(running[name][0].run(batch, effort.seconds))
    return taken


def row_of(
    model: CpuModel, batch: int, taken: Mapping[str, Sequence[float]], tuned: Mapping[str, Tuned]
) -> dict[str, Any]:
    """Milliseconds and calls by contender, and ratios of times within a round. Who has no engine of its own has the
    baseline's time."""
    samples = {
        one.name: taken.get(one.name) or taken[BASELINE]
        for one in CONTENDERS
        if one.engine != "hone" or one.precision in tuned
    }
    reasons = {
        f"hone_{precision}": outcome.reasons[batch] for precision, outcome in tuned.items() if batch in outcome.reasons
    }
    return {
        "model": model.name,
        "title": model.title,
        "batch": batch,
        "ms": {name: round(median(values) / 1e6, 4) for name, values in samples.items()},
        "per_second": {name: round(batch * 1e9 / median(values), 1) for name, values in samples.items()},
        "speedup": {
            mean: round(median(a / b for a, b in zip(samples[over], samples[ours], strict=True)), 4)
            for mean, (over, ours) in MEANS.items()
            if ours in samples
        },
        "promoted": {f"hone_{precision}": batch in outcome.artifacts for precision, outcome in tuned.items()},
        "reasons": reasons,
        "tuning_seconds": {precision: outcome.seconds for precision, outcome in tuned.items()},
        "first_promotion_seconds": {p: outcome.first_promotion_seconds for p, outcome in tuned.items()},
        "max_error": {p: outcome.gate.get(batch, {}).get("max_error") for p, outcome in tuned.items()},
        "rounds_ms": {name: [round(value / 1e6, 4) for value in values] for name, values in taken.items()},
    }


def geometric_means(rows: Sequence[Mapping[str, Any]], batch: int) -> dict[str, float]:
    """Of the speed-ups of all models at a batch, where they were measured."""
    means = {}
    for name in MEANS:
        ratios = [row["speedup"][name] for row in rows if row["batch"] == batch and name in row["speedup"]]
        if ratios:
            means[name] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
    return means


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table in milliseconds, and below it why something stayed on its baseline."""
    header = ["model", "batch", *(one.name for one in CONTENDERS), *MEANS]
    lines = [header]
    remarks = []
    for row in rows:
        cells = [row["title"], str(row["batch"])]
        for contender in CONTENDERS:
            starred = "" if row["promoted"].get(contender.name, True) else "*"
            cells.append(f"{row['ms'][contender.name]:.3f}{starred}" if contender.name in row["ms"] else "")
        cells += [f"{row['speedup'][name]:.2f}" if name in row["speedup"] else "" for name in MEANS]
        lines.append(cells)
        remarks += [f"* {row['title']}, batch {row['batch']}, {name}: {why}" for name, why in row["reasons"].items()]
    for batch in BATCHES:
        means = geometric_means(rows, batch)
        if means:
            numbers = [f"{means[name]:.3f}" if name in means else "" for name in MEANS]
            lines.append(["geometric mean", str(batch), *([""] * len(CONTENDERS)), *numbers])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*text, *remarks])


class Results:
    """What was measured so far, on disk after each model. `tuned` is kept too: tuning is the longest part."""

    def __init__(self, path: Path, *, resume: bool, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = dict(about)
        self.rows: list[dict[str, Any]] = []
        self.tuned: dict[str, dict[str, Any]] = {}
        if resume and path.is_file():
            told = json.loads(path.read_text())
            self.rows, self.tuned = told["rows"], told["tuned"]

    def has(self, model: CpuModel, precisions: Sequence[str]) -> bool:
        done = [
            row
            for row in self.rows
            if row["model"] == model.name and set(row["promoted"]) >= {f"hone_{p}" for p in precisions}
        ]
        return len(done) == len(BATCHES)

    def add(self, model: CpuModel, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = [row for row in self.rows if row["model"] != model.name] + list(rows)
        self.write()

    def write(self) -> None:
        ours = {model.name for model in MODELS}
        counted = [row for row in self.rows if row["model"] in ours]
        told = {
            **self._about,
            "geomean": geometric_means(counted, 1),
            "geomean_batch8": geometric_means(counted, 8),
            "num_models": len({row["model"] for row in counted}),
            "rows": self.rows,
            "tuned": self.tuned,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        staged = self._path.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps(told, indent=1) + "\n")
        staged.replace(self._path)


def run(arguments: argparse.Namespace, work: Path) -> str:
    chosen = [find_model(name) for name in arguments.models] or list(MODELS)
    effort = QUICK if arguments.quick else FULL
    results = Results(arguments.results, resume=arguments.resume, about=_about(arguments))
    cache = work / "kernels_cache"
    for model in chosen:
        if arguments.resume and results.has(model, arguments.precisions):
            note(f"{model.title}: measured already")
            continue
        path = provide(model, work / "models")
        tuned: dict[str, Tuned] = {}
        for precision in arguments.precisions:
            key = f"{model.name} {precision}"
            if arguments.resume and key in results.tuned and cache.is_dir():
                tuned[precision] = Tuned.from_json(results.tuned[key])
                continue
            note(f"{model.title}: tuning at {precision}")
            tuned[precision] = tune(model, path, precision, BATCHES, work, cache, arguments.tuning_secs)
            for _ in range(_NUM_RETRIES):
                if not tuned[precision].is_undecided:
                    break
                note(f"{model.title}: noise decided; measuring again")
                again = tune(model, path, precision, BATCHES, work, cache, arguments.tuning_secs)
                tuned[precision] = again.after(tuned[precision])
            results.tuned[key] = tuned[precision].to_json()
            results.write()
        note(f"{model.title}: measuring")
        with workers(model, path, tuned, cache, work, arguments.threads) as running:
            rows = [row_of(model, batch, measure(running, batch, effort), tuned) for batch in BATCHES]
        results.add(model, rows)
        print(format_rows(rows), flush=True)
    return format_rows(results.rows)


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **describe_machine(),
        "threads": arguments.threads,
        "tuning_seconds_at_most": arguments.tuning_secs,
        "quick": arguments.quick,
    }


def _environment() -> dict[str, str]:
    return {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare tuned models with ONNX Runtime and OpenVINO on this CPU.")
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), choices=PRECISIONS, help="only these")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a result")
    parser.add_argument("--resume", action="store_true", help="go on with the results and the cache of an earlier run")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    parser.add_argument("--tuning-secs", type=float, default=240.0, help="a model and precision (default: %(default)g)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-cpu", help="folder for models and cache")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write (default: %(default)s)")
    arguments = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < arguments.threads:
        raise SystemExit(
            f"bench-cpu: {arguments.threads} threads need as many cores, this process may use {len(cores)}"
        )
    os.sched_setaffinity(0, cores[: arguments.threads])  # what tuning and the engines take for the machine
    if not OPENVINO_PYTHON.is_file():
        raise SystemExit("bench-cpu: OpenVINO is not here; `make openvino-tools` brings it")
    if not arguments.resume:
        shutil.rmtree(arguments.work / "kernels_cache", ignore_errors=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    try:
        print(run(arguments, arguments.work))
    except BenchmarkError as problem:
        raise SystemExit(f"bench-cpu: {problem}") from problem


if __name__ == "__main__":
    main()
