"""Where the baseline's time goes, told by ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hone.errors import EngineError
from hone.types import Array

_WARMUPS = 3
_KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class ProfiledNode:
    """One node of the optimised graph. Shapes are of what flows in and out; weights that were packed may be missing."""

    name: str
    op: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    times_us: tuple[float, ...]
    start_us: float
    """Since the beginning of the last run."""

    @property
    def microseconds(self) -> float:
        return statistics.median(self.times_us)


@dataclass(frozen=True, slots=True)
class BaselineProfile:
    """`total_us` is the median of whole runs without the profiler."""

    nodes: tuple[ProfiledNode, ...]
    total_us: float


def profile_baseline(model: Path, inputs: Mapping[str, Array], rounds: int = 20) -> BaselineProfile:
    """Run the model in sessions of its own, on the process's shared threads where these were configured. Raises
    EngineError with ONNX Runtime's reason."""
    try:
        total = _time(model, inputs, rounds)
        with tempfile.TemporaryDirectory(prefix="hone-profile-") as folder:
            options = _options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = _session(model, options)
            for _ in range(_WARMUPS + rounds):
                session.run(None, dict(inputs))
            events = json.loads(Path(session.end_profiling()).read_bytes())
    except Exception as problem:  # its exceptions have no common root below Exception
        raise EngineError(f"{model.name} could not be profiled: {problem}") from problem
    return BaselineProfile(nodes_of(events), total)


def nodes_of(events: Sequence[Mapping[str, Any]]) -> tuple[ProfiledNode, ...]:
    """The nodes in the order of a run, from the profiler's events of several runs; the first few do not count. Runs of
    different length (control flow) are told by the last alone."""
    runs: list[list[Mapping[str, Any]]] = []
    starts: list[float] = []
    for event in sorted(events, key=lambda one: (one.get("ts", 0), -one.get("dur", 0))):
        if event.get("name") == "model_run":
            runs.append([])
            starts.append(float(event["ts"]))
        elif event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL) and runs:
            runs[-1].append(event)
    counted = runs[_WARMUPS:] or runs
    if not counted:
        return ()
    alike = [run for run in counted if len(run) == len(counted[-1])]
    return tuple(
        ProfiledNode(
            name=str(events[-1]["name"]).removesuffix(_KERNEL),
            op=str(events[-1]["args"].get("op_name", "?")),
            inputs=_shapes(events[-1]["args"].get("input_type_shape", ())),
            outputs=_shapes(events[-1]["args"].get("output_type_shape", ())),
            times_us=tuple(float(event["dur"]) for event in events),
            start_us=float(events[-1]["ts"]) - starts[-1],
        )
        for events in zip(*alike, strict=True)
    )


def _time(model: Path, inputs: Mapping[str, Array], rounds: int) -> float:
    session = _session(model, _options())
    taken = []
    for i in range(_WARMUPS + rounds):
        started = time.perf_counter_ns()
        session.run(None, dict(inputs))
        if i >= _WARMUPS:
            taken.append(time.perf_counter_ns() - started)
    return statistics.median(taken) / 1e3


def _session(model: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    options.use_per_session_threads = False
    try:
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"], enable_fallback=False)
    except RuntimeError as problem:
        if "EnvCreatedWithGlobalThreadPools" not in str(problem):
            raise
        options.use_per_session_threads = True  # no pool is shared in this process
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"], enable_fallback=False)


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return options


def _shapes(told: Sequence[Mapping[str, Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(dim) for dim in shape) for one in told for shape in one.values())
