"""Ready no later than the sessions take to make, and a second; and small when idle. Printed, and bounded only loosely:
benchmarks measure it, and other work on the machine moves it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING
from tests.running import run_server, wait_until

NUM_MODELS = 200

SESSIONS_ALONE = """
import resource, sys, time
from pathlib import Path
import onnxruntime as ort
started = time.monotonic()
kept = []
for path in sorted(Path(sys.argv[1]).glob("*/1/model.onnx")):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    kept.append(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
seconds = time.monotonic() - started
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_start_and_memory(repository: Path) -> None:
    for number in range(NUM_MODELS):
        models.write_model(repository, f"m{number:03}", models.scale(float(number)))
    command = [sys.executable, "-c", SESSIONS_ALONE, str(repository)]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    session_seconds, session_bytes = (float(field) for field in alone.stdout.split())
    started = time.monotonic()
    with run_server(repository, *EVERYTHING) as server:
        seconds = time.monotonic() - started
        wait_until(lambda: "ready in" in server.log, "ready is told")
        assert sum(state == "READY" for state, _ in server.index().values()) == NUM_MODELS
        extra = server.memory_bytes() - session_bytes
        print(
            f"{NUM_MODELS} models: ready {seconds:.2f} s after the start of the process (sessions alone"
            f" {session_seconds:.2f} s); {extra / 2**20:.0f} MiB above the sessions alone"
        )
        assert extra < 300 * 2**20, "an idle model costs little more than its session"
