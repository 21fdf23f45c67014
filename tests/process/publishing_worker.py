"""A tuning child that publishes a compiled artifact, and stops or dies at a step of it: `... LIFE EVENTS`.

Beside the repository lie `artifact/` (of `real_artifacts.compile_softmax`) and `script.json`: model ->
{"step", "does": "hang" or "die"}. When it comes to the step it makes a file MODEL.STEP there first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hone.kernels import Entry, KernelsCache
from hone.tuning import worker
from tests.process.publishing import VERDICT, publish_artifact, publish_kernel


def run(spec, emit):
    place = Path(spec["path"]).parents[3]
    told = json.loads((place / "script.json").read_text("utf-8")).get(spec["model"], {})

    def on_step(step):
        if step == told.get("step"):
            (place / f"{spec['model']}.{step}").touch()
            if told["does"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)  # stands still at this step until the test kills it, or its server

    root = Path(spec["kernels_cache"])
    for i, task in enumerate(spec["tasks"]):
        emit("stage", stage="publishing", progress=0.5, index=i)
        cache = KernelsCache(root, on_step=on_step)
        with cache.lock("artifacts", task["digest"], spec["device"]):
            if not isinstance(cache.get("artifacts", task["digest"], spec["device"]), Entry):
                publish_kernel(KernelsCache(root), place / "artifact")
                publish_artifact(cache, place / "artifact", task["digest"])
        emit("specialized", index=i, outcome="passed", reason="", verdict=VERDICT, report={})


if __name__ == "__main__":
    worker.main(run)
