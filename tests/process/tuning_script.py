"""A tuning child that tells what the job's model name says, without compiling: `python tuning_script.py LIFE EVENTS`.

The name's file in the job's folder, `<path>.script.json`, maps an artifact or the text of a signature to what happens:
an outcome, or
"crash", "hang", "garbage", "slow" (until the file `<path>.go` appears). Events under "says" come first.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from hone.tuning import worker


def verdict(speedup: float, **fields):
    return {
        "baseline_ms": 1.0,
        "tuned_ms": 1.0 / speedup,
        "speedup": speedup,
        "max_error": 1e-6,
        "tolerance": 1e-3,
        **fields,
    }


def run(spec, emit):
    path = Path(spec["path"])
    with Path(f"{path}.children").open("a", encoding="utf-8") as file:
        file.write(json.dumps([[t["digest"], t["mode"]] for t in spec["tasks"]]) + "\n")
    script = json.loads(Path(f"{path}.script.json").read_text(encoding="utf-8"))
    for told in script.get("says", ()):
        emit(**told)
    for i, task in enumerate(spec["tasks"]):
        text = " ".join(f"{n}:{d}[{','.join(map(str, s))}]" for n, d, s in task["signature"])
        does = script.get(task["digest"], script.get(text, script.get("*")))
        tried = {"num_built": 3, "num_measured": 2, "num_failed": 1}
        emit("stage", stage=f"compiling for {text}", progress=(i + 0.5) / len(spec["tasks"]), index=i, **tried)
        match does:
            case "crash":
                ctypes.string_at(0)
            case "crash in schedules":
                if not spec["careful"]:
                    emit("stage", stage="trying schedules of f for it", progress=0.1, index=i)
                    ctypes.string_at(0)
                with path.with_name("published").open("a", encoding="utf-8") as file:
                    file.write(task["digest"] + "\n")
                emit("specialized", index=i, outcome="passed", reason="", verdict=verdict(2.0), report={})
            case "hang":
                time.sleep(600)
            case "garbage":
                os.write(int(sys.argv[2]), b"?!\n")
                time.sleep(600)
            case "slow":
                while not Path(f"{path}.go").exists():
                    time.sleep(0.01)
                with path.with_name("published").open("a", encoding="utf-8") as file:
                    file.write(task["digest"] + "\n")
                emit("specialized", index=i, outcome="passed", reason="", verdict=verdict(2.0), report={})
            case {"outcome": "passed", **fields}:
                with path.with_name("published").open("a", encoding="utf-8") as file:
                    file.write(task["digest"] + "\n")
                report = {"candidates_built": 3, "compile_seconds": 0.5}
                emit("specialized", index=i, outcome="passed", reason="", verdict=verdict(2.0, **fields), report=report)
            case {"outcome": outcome, **fields}:
                emit(
                    "specialized",
                    index=i,
                    outcome=outcome,
                    reason=fields.get("reason", ""),
                    verdict=fields.get("verdict", {}),
                    report={},
                )
            case other:
                raise AssertionError(other)


if __name__ == "__main__":
    worker.main(run)
