"""The row that times tuning: hone's own tuner, whole, on one model with prebuilt kernels, on the machine with the GPU.

Everything comes along: wheels of what hone imports, TVM's compiler and nvcc among them, hone itself, and a kernels
cache. They go into a virtual environment that sees nothing else of the machine's Python. Only the standard library is
used here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import TRYING, Journal

#: The budget is for the search: the last compilation and the gate may end behind it.
_MARGIN_SECONDS = 60.0
#: The mission's goal; more is not given.
_MOST_SECONDS = 300.0


def tune(folder: Path, told: Mapping[str, Any], journal: Journal, deadline: float) -> None:
    """`told`: see `bundle_tuning.py`. Installs first, which is told apart from the seconds of tuning."""
    name = f"{told['name']}, {told['batch']}"
    journal.add(TRYING, f"tuning of {name}")
    place = (folder / "tuning").absolute()
    began = time.monotonic()
    try:
        if told["is_shared"]:
            model = place / "repository" / told["name"] / "1" / "model.onnx"
            if not model.exists():
                model.hardlink_to(folder.absolute() / "models" / told["name"] / "model.onnx")
        python = install(place)
    except (OSError, subprocess.SubprocessError) as problem:
        journal.add("failed", f"tuning of {name}", reason=f"it could not be installed: {_words(problem)}")
        return
    installed = time.monotonic() - began
    budget = min(_MOST_SECONDS, deadline - time.monotonic() - _MARGIN_SECONDS)
    command = [str(python), "-m", "hone", "tune", told["name"], "--json", "--budget-secs", f"{max(1.0, budget):.0f}"]
    command += ["--model-repository", str(place / "repository"), "--kernels-cache", str(place / "cache")]
    began = time.monotonic()
    try:
        ran = subprocess.run(
            command,
            env=environment(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, budget) + _MARGIN_SECONDS,
        )
    except subprocess.TimeoutExpired as problem:
        (folder / "tuning.log").write_bytes(problem.stderr or b"")
        reason = f"it did not end within {_MARGIN_SECONDS:.0f} s behind its budget of {budget:.0f}: see tuning.log"
        journal.add("failed", f"tuning of {name}", reason=reason)
        return
    seconds = time.monotonic() - began
    (folder / "tuning.log").write_text(ran.stderr, encoding="utf-8")
    try:
        (status,) = json.loads(ran.stdout)
    except ValueError:
        reason = f"hone tune exited with {ran.returncode}: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}"
        journal.add("failed", f"tuning of {name}", reason=reason)
        return
    devices = sorted({bucket.get("device", "") for bucket in status["buckets"]})
    if status["state"] not in ("tuned", "baseline"):
        journal.add("failed", f"tuning of {name}", reason=f"{status['state']}: {status['reason']}")
    words = [
        f"{told['num_kernels']} prebuilt kernels",
        f"installed in {installed:.0f} s",
        *map(_bucket, status["buckets"]),
    ]
    journal.add("tuned", name, seconds=seconds, state=status["state"], told="; ".join(words), devices=devices)


def install(place: Path) -> Path:
    """The environment's Python. What was installed before stays. Raises OSError, subprocess.SubprocessError."""
    home, site = place / "venv", place / "site"
    python = home / "bin" / "python"
    if not (site / ".installed").exists():
        _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)])
        wheels = [str(path) for path in sorted((place / "wheels").glob("*.whl"))]
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        _run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, *wheels])
        (site / ".installed").touch()
    return python


def environment(place: Path) -> dict[str, str]:
    """Of processes that see what came along, and nothing else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HONE_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(place / "hone"), str(place / "site")]),
        "PYTHONNOUSERSITE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _words(problem: Exception) -> str:
    if isinstance(problem, subprocess.CalledProcessError):
        return (str(problem.stderr).strip().splitlines() or [str(problem)])[-1]
    return str(problem)


def _bucket(told: Mapping[str, Any]) -> str:
    if told.get("speedup") is None:
        return f"{told['signature']}: {told['outcome'] or told['reason']}"
    return (
        f"{told['signature']} by {told['engine']}: {told['baseline_ms']:.3g} ms to {told['tuned_ms']:.3g} ms,"
        f" {told['speedup']:.2f} x the baseline"
    )
