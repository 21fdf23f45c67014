"""Runs a bundle on the machine it was brought to, and prints one table: see `run.sh`.

Work is done by processes of their own, one for each stage: a kernel that breaks the GPU's context, or never ends, takes
its process along, is told, and the next process goes on behind it. Without a GPU, a bundle of host twins goes the same
way, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import CRASHED, TRYING, Journal
from benchmarks.gpu.table import Table, models_table

#: Stages in their order, and seconds after which one that writes nothing down is taken for hung.
STAGES = {"rows": 60.0, "models": 120.0, "compile": 240.0, "tuning": 600.0}
#: What a process that lost its GPU ends with.
LOST = 3
_TICK_SECONDS = 0.1
#: A stage is not begun with less.
_LEAST_SECONDS = {"rows": 0.0, "models": 10.0, "compile": 45.0, "tuning": 120.0}
_MAX_CRASHES = 12
#: Of what was left out, so many are named on the console; all are in results.json.
_MOST_NAMED = 12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330.0, help="what all may take")
    parser.add_argument("--folder", type=Path, default=Path(), help="where bundle.json is")
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES, help="which parts to run")
    parser.add_argument("--worker", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    journal = Journal(told.folder / "journal.jsonl")
    bundle = json.loads((told.folder / "bundle.json").read_text(encoding="utf-8"))
    if told.worker:
        return work(told.worker, told.folder, bundle, journal, told.until)
    signal.signal(signal.SIGTERM, _end)  # so that the process of the stage goes too
    journal.path.unlink(missing_ok=True)
    deadline = time.monotonic() + told.seconds
    left_out = []
    for stage in STAGES:
        if stage not in told.stages or not _has_work(stage, bundle):
            continue
        if stage == "tuning" and not (told.folder / "tuning").is_dir():
            left_out.append("tuning, whose parts were not brought")
            continue
        if deadline - time.monotonic() < _LEAST_SECONDS[stage]:
            left_out.append(f"stage {stage}")
        else:
            run_stage(stage, told.folder, journal, deadline)
    is_late = time.monotonic() > deadline
    return show(bundle, journal, told.folder, left_out, told.stages, is_late=is_late)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _has_work(stage: str, bundle: dict[str, Any]) -> bool:
    if stage == "rows":
        return bool(bundle["rows"])
    if stage == "tuning":
        return bundle["tuning"] is not None
    return bool(bundle["models"]) and not bundle["twin"]


def run_stage(stage: str, folder: Path, journal: Journal, deadline: float) -> None:
    """Processes for the stage, one after another, until one comes to its end or the time is up."""
    for _ in range(_MAX_CRASHES):
        command = [sys.executable, "-m", "benchmarks.gpu.device", "--folder", str(folder)]
        command += ["--worker", stage, "--until", str(deadline)]
        before = journal.size
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            ended = _wait(process, journal, STAGES[stage], deadline)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if ended == "done" or time.monotonic() > deadline:
            return
        last = journal.last()
        if journal.size == before or last is None:
            journal.add("failed", f"stage {stage}", reason=f"its process {ended} before it did anything")
            return
        if ended == "lost its GPU":
            failed = next((one for one in reversed(list(journal.entries("failed")))), last)
            journal.add(CRASHED, failed["name"], reason=ended)
        elif last["kind"] == TRYING:
            journal.add(CRASHED, last["name"], reason=ended)
            print(f"  {last['name']}: its process {ended}; going on behind it", file=sys.stderr, flush=True)
        else:
            journal.add("failed", f"stage {stage}", reason=f"its process {ended} after {last['name']}")
            return


def _wait(process: subprocess.Popen[bytes], journal: Journal, hung_seconds: float, deadline: float) -> str:
    """How it ended, as words behind "its process"."""
    size, seen = journal.size, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if journal.size != size:
            size, seen = journal.size, now
        if now - seen > hung_seconds:
            return f"hung for {hung_seconds:.0f} s"
        if now > deadline + 5.0:
            return "was not done in time"
        time.sleep(_TICK_SECONDS)
    code = process.returncode
    return {0: "done", LOST: "lost its GPU"}.get(
        code, f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    )


def work(stage: str, folder: Path, bundle: dict[str, Any], journal: Journal, deadline: float) -> int:
    """In a process of its own."""
    if stage == "tuning":
        from benchmarks.gpu.tuning import tune

        tune(folder, bundle["tuning"], journal, deadline)
        return 0
    from benchmarks.gpu.bench import Bench, Lost
    from benchmarks.gpu.places import Gpu, Host

    place: Any = Host(folder) if bundle["twin"] else Gpu(folder)
    try:
        if stage == "rows":
            if not journal.by_name("device"):
                journal.add("device", place.name, ceiling_tflops=_finite(place.ceiling()))
            Bench(folder, place, journal, deadline).rows(bundle["rows"])
        else:
            from benchmarks.gpu.models import Models

            Models(folder, place, journal, deadline).run(bundle["models"], with_compile=stage == "compile")
    except Lost:
        return LOST
    return 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(
    bundle: dict[str, Any],
    journal: Journal,
    folder: Path,
    left_out: list[str],
    stages: Sequence[str],
    *,
    is_late: bool,
) -> int:
    """Print the table, and write results.json. 1 where a kernel was wrong, did not run, or took its process along."""
    rows, models = journal.by_name("row"), journal.by_name("model")
    device = next(journal.entries("device"), None)
    if device is not None:
        print(f"{device['name']}; kernels for sm_{bundle['arch']}{' (twins)' if bundle['twin'] else ''}")
        ceiling = device["ceiling_tflops"]
        print(f"ceiling, by a product of 8192: {ceiling:.0f} TFLOP/s" if ceiling else "no ceiling")
    table = Table(bundle["rows"], rows)
    for lines in (table.checked(), table.timed(), models_table(models)):
        if lines:
            print("\n".join(lines))
    for entry in journal.entries("tuned"):
        print(f"tuning  {entry['name']}: {entry['seconds']:.0f} s, {entry['state']}; {entry['told']}")
    wrong = [
        *(
            f"WRONG: {one['name']}: error {one['error']:.2g}, allowed {one['allowed']:.2g}"
            for one in journal.entries("wrong")
        ),
        *(f"FAILED: {one['name']}: {one['reason']}" for one in journal.entries("failed")),
        *(f"CRASHED: {one['name']}: its process {one['reason']}" for one in journal.entries(CRASHED)),
    ]
    if "rows" in stages:
        left_out += [row["name"] for row in bundle["rows"] if row["name"] not in rows and row["kernels"]]
    if not bundle["twin"]:
        wanted = [f"{one['name']}, {one['batch']}" for one in bundle["models"]]
        left_out += [name for name in wanted if "models" in stages and name not in models]
        left_out += [
            f"{n} by torch.compile"
            for n in wanted
            if "compile" in stages and "compile" not in models.get(n, {}).get("ms", ())
        ]
    told: dict[str, Any] = {"device": device, "rows": rows, "models": models, "tuning": list(journal.entries("tuned"))}
    told |= {"wrong": wrong, "left_out": left_out}
    (folder / "results.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    if left_out:
        why = "left out, since the time was up" if is_late else "not measured"
        more = f"; and {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
        print(f"{why}: {'; '.join(left_out[:_MOST_NAMED])}{more}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
