"""ONNX Runtime called directly, in a process of its own: what the server's figures for real models are held against.

`python -m benchmarks.direct time MODEL NAME SIZES` calls a session in a loop; `... create MODEL...` only creates
sessions, says how long each took and stays, for its memory to be read, until its input ends.
Sessions are made as hone's engine makes them (`--defaults`: as ONNX Runtime makes them unless told otherwise).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings


def create_session(path: Path, num_threads: int, *, defaults: bool) -> Any:
    if defaults:
        return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return OnnxRuntimeEngine.load(path, SessionSettings(num_threads=num_threads)).session


def time_calls(session: ort.InferenceSession, name: str, sizes: list[int], seconds: float) -> dict[str, float]:
    inputs = {name: np.random.default_rng(0).random(sizes, dtype=np.float32)}
    for _ in range(5):
        session.run(None, inputs)
    durations = []
    began = time.perf_counter()
    now = began
    while now - began < seconds:
        session.run(None, inputs)
        after = time.perf_counter()
        durations.append(after - now)
        now = after
    p50, p90, p99 = (float(value) * 1e6 for value in np.percentile(durations, (50, 90, 99)))
    return {"throughput": len(durations) / (now - began), "p50_us": p50, "p90_us": p90, "p99_us": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time")
    timing.add_argument("model", type=Path)
    timing.add_argument("name")
    timing.add_argument("sizes", help="1,3,224,224")
    timing.add_argument("--seconds", type=float, default=2.5)
    creating = commands.add_parser("create")
    creating.add_argument("models", type=Path, nargs="+")
    arguments = parser.parse_args()

    if arguments.command == "time":
        session = create_session(arguments.model, arguments.threads, defaults=arguments.defaults)
        sizes = [int(size) for size in arguments.sizes.split(",")]
        print(json.dumps(time_calls(session, arguments.name, sizes, arguments.seconds)))
        return
    sessions, seconds = [], []
    for path in arguments.models:
        began = time.perf_counter()
        sessions.append(create_session(path, arguments.threads, defaults=arguments.defaults))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
