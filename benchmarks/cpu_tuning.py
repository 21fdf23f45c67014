"""Tunes the models of `make bench-cpu` as a user does: `hone tune` on a model repository, with one kernels cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_models import CpuModel
from benchmarks.processes import ROOT, BenchmarkError

#: Beyond the budget: loading the model, its last measurement, promoting it.
_GRACE_SECONDS = 120.0
_DATATYPES = {"float32": "TYPE_FP32", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}


@dataclass(frozen=True)
class Tuned:
    """What tuning made of one model and precision. `artifacts` are those that were promoted, by batch; `reasons` say
    why the others were not."""

    model: str
    precision: str
    state: str
    seconds: float
    first_promotion_seconds: float | None
    artifacts: dict[int, str]
    reasons: dict[int, str]
    gate: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Milliseconds and errors that the gate measured, by batch."""

    @property
    def is_undecided(self) -> bool:
        """Whether noise, and not the numbers, kept a batch on its baseline."""
        return any(self.gate.get(batch, {}).get("provisional") for batch in self.reasons)

    def after(self, earlier: Tuned) -> Tuned:
        """This outcome with the time that an earlier attempt took."""
        first = earlier.first_promotion_seconds
        return replace(
            self,
            seconds=round(self.seconds + earlier.seconds, 1),
            first_promotion_seconds=self.first_promotion_seconds if first is None else first,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Tuned:
        by_batch = {
            name: {int(batch): value for batch, value in told[name].items()}
            for name in ("artifacts", "reasons", "gate")
        }
        return cls(**{**told, **by_batch})


def tune(
    model: CpuModel, path: Path, precision: str, batches: Sequence[int], folder: Path, cache: Path, seconds: float
) -> Tuned:
    """Tune one model at one precision, for these batches; what the cache holds already is not made again."""
    repository = folder / "repository" / f"{model.name}_{precision}"
    name = _add(repository, model, path, precision, batches)
    command = [sys.executable, "-m", "hone", "tune", name, "--json", "--budget-secs", str(seconds)]
    command += ["--model-repository", str(repository), "--kernels-cache", str(cache)]
    started, began = datetime.now(UTC), time.monotonic()
    # 1 says that not all was tuned, which the outcome tells as well.
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + _GRACE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as problem:
        raise BenchmarkError(f"{name}: tuning did not end {_GRACE_SECONDS:.0f} s after its budget") from problem
    if not done.stdout.strip():
        raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    took = time.monotonic() - began
    (status,) = json.loads(done.stdout.strip().splitlines()[-1])
    promoted = [one["at"] for one in status["history"] if one["event"] == "promoted"]
    first = min(((datetime.fromisoformat(at) - started).total_seconds() for at in promoted), default=None)
    buckets = dict(zip(batches, _by_batch(status, model, batches), strict=True))
    return Tuned(
        model.name,
        precision,
        status["state"],
        round(took, 1),
        None if first is None else max(0.0, round(first, 1)),
        {batch: one["artifact"] for batch, one in buckets.items() if one and one["engine"] == "tvm"},
        {
            batch: one["reason"] or one["outcome"] or "time was up" if one else status["reason"]
            for batch, one in buckets.items()
            if not one or one["engine"] != "tvm"
        },
        {batch: _measured(one) for batch, one in buckets.items() if one},
    )


def save_inputs(model: CpuModel, batches: Sequence[int], folder: Path) -> dict[str, str]:
    """The same inputs for every engine, as files."""
    saved = {}
    folder.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        path = folder / f"{model.name}.{batch}.npz"
        np.savez(path, **model.values(batch))  # type: ignore[arg-type]
        saved[str(batch)] = str(path)
    return saved


def _add(repository: Path, model: CpuModel, path: Path, precision: str, batches: Sequence[int]) -> str:
    """A repository with the one model, whose batch is an axis like any other: only the batches asked for are tuned."""
    name = f"{model.name}_{precision}"
    shutil.rmtree(repository, ignore_errors=True)
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    if path.stat().st_dev == folder.stat().st_dev:
        (folder / "model.onnx").hardlink_to(path)
    else:
        shutil.copy2(path, folder / "model.onnx")
    inputs = ", ".join(
        f'{{ name: "{one.name}" data_type: {_DATATYPES[one.dtype]} dims: [ {", ".join(map(str, (-1, *one.shape)))} ] }}'
        for one in model.inputs
    )
    signatures = "; ".join(model.signature(batch) for batch in batches)
    (repository / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 0\ninput [ {inputs} ]\n'
        "instance_group [{ kind: KIND_CPU count: 1 }]\n"
        'optimization { execution_accelerators { cpu_execution_accelerator: [ { name: "tvm"\n'
        f'  parameters {{ key: "precision" value: "{precision}" }}\n'
        f'  parameters {{ key: "signatures" value: "{signatures}" }}\n'
        "} ] } }\n"
    )
    return name


def _by_batch(status: Mapping[str, Any], model: CpuModel, batches: Sequence[int]) -> list[Mapping[str, Any] | None]:
    found: list[Mapping[str, Any] | None] = []
    for batch in batches:
        name, shape = next(iter(model.shapes(batch).items()))
        text = ",".join(map(str, shape))
        matching = [
            one for one in status["buckets"] if f"{name}:" in one["signature"] and f"[{text}]" in one["signature"]
        ]
        found.append(matching[0] if matching else None)
    return found


def _measured(bucket: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bucket[name] for name in ("baseline_ms", "tuned_ms", "speedup", "max_error", "provisional")}
