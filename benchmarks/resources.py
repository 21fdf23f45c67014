"""What a server costs before its first request: time to be ready, and memory, beyond ONNX Runtime's own."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench, hone_server, note
from benchmarks.models import find_real_models
from benchmarks.processes import ROOT, BenchmarkError, child
from benchmarks.report import Row, at_most

MIB = 2**20


def measure(bench: Bench) -> list[Row]:
    """The demo models (and the real ones that are here) in one repository; as many rounds as everything else."""
    digits = ROOT / "model_repo" / "digits" / "1" / "model.onnx"
    models = {path.parent.parent.name: path for path in [digits, *(model.path for model in find_real_models()[0])]}
    if not digits.is_file():
        raise BenchmarkError(f"{digits.relative_to(ROOT)} is not here; it belongs to the checkout")
    ready, created, resident, floor = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="bench-repository-") as folder:
        repository = Path(folder)
        for name, path in models.items():
            (repository / name / "1").mkdir(parents=True)
            shutil.copy2(path, repository / name / "1" / "model.onnx")
        for _ in range(bench.num_rounds):
            command = [sys.executable, "-m", "benchmarks.direct", "create", *(str(path) for path in models.values())]
            with child("direct", command, pipe=True, keep_input=True) as process:
                created.append(sum(json.loads(process.read_line())["seconds"]))
                floor.append(process.resident_bytes() / MIB)
            with hone_server("hone", repository) as (target, seconds):
                ready.append(seconds)
                resident.append(target.process.resident_bytes() / MIB)
            note(
                f"ready {ready[-1]:.2f} s (sessions {created[-1]:.2f} s),"
                f" {resident[-1]:.0f} MiB (sessions {floor[-1]:.0f} MiB)"
            )
    how = f"sessions of {len(models)} models {median(created):.2f} s + 1 s"
    return [
        at_most("ready after start", "s", median(ready), median(created) + 1.0, how, digits=2),
        at_most(
            "idle memory above the sessions' own",
            "MiB",
            median(resident) - median(floor),
            150.0,
            f"server {median(resident):,.0f} MiB, sessions {median(floor):,.0f} MiB",
        ),
    ]
