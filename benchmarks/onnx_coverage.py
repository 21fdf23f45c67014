"""What hone's importer and compiler can take: ONNX's own operator cases and the real models, against ONNX Runtime.

    python -m benchmarks.onnx_coverage                 # everything, going on where an earlier run stopped
    python -m benchmarks.onnx_coverage --only Conv     # cases whose name contains a text; the table is left alone

Each case is imported, compiled for the CPU by hone's own pipeline (no search: every template has its first guess), run
by the engine that serves tuned models, and compared, in a child process, since some crash it.
Results are kept in build/onnx_coverage/ as JSON lines; docs/onnx_coverage.md is written from them at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np

from hone.types import BYTES, NUMPY_DTYPES

if TYPE_CHECKING:
    from benchmarks.onnx_coverage_engine import TunedEngines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "onnx_coverage" / "results.jsonl"
TABLE = ROOT / "docs" / "onnx_coverage.md"
#: What the cases of the tests came to; which those are is fixed, `--record` writes what they came to.
SAMPLE = ROOT / "tests" / "unit" / "compiler" / "onnx_sample.json"

#: Real models (`make real-models`) and the demo models, with one signature each.
REAL_MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "real_models/angle_classifier": {"x": (1, 3, 48, 192)},
    "real_models/magika": {"bytes": (1, 2048)},
    "real_models/open_nsfw": {"input:0": (1, 224, 224, 3)},
    "real_models/silero_vad": {"input": (1, 576), "state": (2, 1, 128), "sr": ()},
    "real_models/text_detector": {"x": (1, 3, 96, 96)},
    "real_models/text_recognizer": {"x": (1, 3, 48, 96)},
    "model_repo/digits": {"image": (1, 1, 8, 8)},
    "model_repo/resnet50": {"image": (1, 3, 224, 224)},
}

DATATYPES = {dtype: datatype for datatype, dtype in NUMPY_DTYPES.items() if datatype != BYTES}

#: Absolute differences that count as none.
NEAR = {"FP16": 2e-3, "FP32": 1e-4, "FP64": 1e-7}

CASE_SECONDS, MODEL_SECONDS = 120.0, 600.0
MAX_WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """How far a case came: stage is ok, or the first thing that failed.

    `reference` means that ONNX Runtime cannot run it: there is no baseline, so it cannot be served at all. The others
    are import, compile, run, match, crash and timeout.
    """

    case: str
    operators: tuple[str, ...]
    stage: str
    constants: bool = False
    """Whether all inputs but the first had to be constants, as they are in most models (shapes, axes, paddings)."""
    blamed: str = ""
    reason: str = ""
    max_error: float | None = None
    seconds: float = 0.0


# --- in the child ---


def work() -> None:
    """Examine the cases named on standard input, one answer a line; a new line is a new case."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print must not mix with the answers
    warnings.simplefilter("ignore")
    from benchmarks.onnx_coverage_engine import TunedEngines

    cases = node_cases()
    with tempfile.TemporaryDirectory(prefix="onnx-coverage-") as folder:
        engines = TunedEngines(Path(folder))
        for line in sys.stdin:
            print(json.dumps(dataclasses.asdict(examine(engines, line.strip(), cases))), file=answers, flush=True)


def node_cases() -> dict[str, Any]:
    """ONNX's operator cases by name."""
    from onnx.backend.test.case.node import collect_testcases

    return {case.name: case for case in collect_testcases(None)}


def examine(engines: TunedEngines, name: str, cases: Mapping[str, Any]) -> Outcome:
    """Import, compile, run and compare one case."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onnx-coverage-") as folder:
        outcome = (
            _examine_model(engines, name)
            if name in REAL_MODELS
            else _examine_case(engines, name, cases[name], Path(folder))
        )
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - started, 2))


def _examine_case(engines: TunedEngines, name: str, case: Any, folder: Path) -> Outcome:
    import onnx
    from onnx import numpy_helper

    operators = tuple(sorted({node.op_type for node in case.model.graph.node}))
    inputs, _ = case.data_sets[0]
    given = {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=False)}
    given = {
        key: numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        for key, value in given.items()
    }
    if not all(isinstance(array, np.ndarray | np.generic) for array in given.values()):
        return Outcome(name, operators, "import", reason="an input is no tensor")
    given = {key: np.asarray(array) for key, array in given.items()}
    path = folder / "model.onnx"
    onnx.save(case.model, path)
    reference = _reference(path, given)
    if isinstance(reference, str):
        return Outcome(name, operators, "reference", reason=reference)
    outcome = _try(engines, name, operators, path, given, reference)
    if outcome.stage == "ok" or len(given) < 2:
        return outcome
    # As models have it: all inputs but the first are constants.
    first, *others = given
    constant = onnx.ModelProto()
    constant.CopyFrom(case.model)
    constant.graph.initializer.extend(numpy_helper.from_array(given[other], other) for other in others)
    onnx.save(constant, path)
    second = _try(engines, name, operators, path, {first: given[first]}, reference)
    order = ("import", "compile", "run", "match", "ok")
    return (
        dataclasses.replace(second, constants=True)
        if order.index(second.stage) >= order.index(outcome.stage)
        else outcome
    )


def _examine_model(engines: TunedEngines, name: str) -> Outcome:
    import onnx
    import onnxruntime as ort

    path = ROOT / name / "1" / "model.onnx"
    if not path.exists():
        return Outcome(name, (), "import", reason="the file is missing: run `make real-models`")
    operators = tuple(sorted({node.op_type for node in onnx.load(path).graph.node}))
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    given: dict[str, Any] = {}
    for node in session.get_inputs():
        shape = REAL_MODELS[name][node.name]
        if node.type == "tensor(float)":
            given[node.name] = random.random(shape, np.float32)
        else:  # bytes of a file for one, the sampling rate for the other
            dtype = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}[node.type]
            given[node.name] = random.integers(0, 256, shape).astype(dtype) if shape else np.array(16000, dtype)
    return _try(engines, name, operators, path, given, session.run(None, given))


def _reference(path: Path, given: Mapping[str, Any]) -> list[Any] | str:
    """ONNX Runtime's outputs, or why it has none."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(given)))
    except Exception as problem:  # its exceptions have no common root below Exception
        return _line(problem)


def _try(
    engines: TunedEngines,
    name: str,
    operators: tuple[str, ...],
    path: Path,
    given: Mapping[str, Any],
    reference: list[Any],
) -> Outcome:
    from hone.compiler.build import BuildFailed, LinkFailed
    from hone.compiler.onnx_import import Unsupported, import_model
    from hone.errors import EngineError, InputsDeclined

    imported = import_model(path, {key: array.shape for key, array in given.items()})
    if isinstance(imported, Unsupported):
        return Outcome(name, operators, "import", blamed=imported.operator, reason=imported.reason)
    with tempfile.TemporaryDirectory(prefix="onnx-coverage-") as folder:
        try:
            engine = engines.make(imported, path, Path(folder))
        except (BuildFailed, LinkFailed, EngineError) as problem:
            return Outcome(name, operators, "compile", reason=_line(problem))
        try:
            results = engine.instantiate().run(
                {spec.name: given[spec.name] for spec in engine.inputs}, [spec.name for spec in engine.outputs]
            )
        except InputsDeclined:
            return Outcome(name, operators, "run", reason="the guard declines inputs that ONNX Runtime takes")
        except EngineError as problem:
            return Outcome(name, operators, "run", reason=_line(problem))
        finally:
            engine.close()
    worst, reason = compare(results, reference)
    return Outcome(name, operators, "match" if reason else "ok", reason=reason, max_error=worst)


def compare(results: list[Any], reference: list[Any]) -> tuple[float, str]:
    """The largest difference as the gate counts it, and what it says is wrong, if anything."""
    from hone.tuning.gate import check_output, tolerance_of

    worst = 0.0
    for index, (got, wanted) in enumerate(zip(results, map(np.asarray, reference), strict=True)):
        datatype = DATATYPES.get(wanted.dtype)
        if datatype is None:
            return worst, f"output {index} is {wanted.dtype}, which the protocol cannot carry"
        tolerance = tolerance_of(datatype, "f32", None)
        checked = check_output(str(index), datatype, wanted, got, tolerance, "the case")
        if not checked.passed and not _is_close(datatype, got, wanted):
            return max(worst, checked.max_error), checked.reason
        worst = max(worst, checked.max_error)
    return worst, ""


def _is_close(datatype: str, got: Any, wanted: Any) -> bool:
    """Whether floating-point numbers differ by next to nothing: the gate holds outputs that are all near zero, as those
    of a detector on noise, to that size."""
    near = NEAR.get(datatype)
    if near is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return np.allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=near, equal_nan=True)


def _line(problem: BaseException) -> str:
    lines = [line for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[-1].strip() if lines else ''}"[:200]


# --- in the parent ---


class Worker:
    """A child that examines cases; started anew after a crash or a time-out."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def examine(self, case: str, operators: tuple[str, ...]) -> Outcome:
        seconds = MODEL_SECONDS if case in REAL_MODELS else CASE_SECONDS
        fresh = self._process is None
        if fresh:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.write(case + "\n")
        process.stdin.flush()
        try:
            answer = self._answers.get(timeout=seconds + (60.0 if fresh else 0.0))
        except queue.Empty:
            self.close()
            return Outcome(case, operators, "timeout", reason=f"no answer within {seconds:.0f} s")
        if answer is None:
            status = process.wait()
            self.close()
            return Outcome(case, operators, "crash", reason=f"the process ended with status {status}")
        fields = json.loads(answer)
        return Outcome(**{**fields, "operators": tuple(fields["operators"])})

    def close(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._reader.join()
            process.communicate()  # waits, and closes the pipes

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.onnx_coverage", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._answers = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process, self._answers), daemon=True)
        self._reader.start()

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)


def examine_all(cases: Mapping[str, tuple[str, ...]], num_workers: int) -> Iterator[Outcome]:
    """Outcomes of all cases, as they come."""
    waiting: queue.SimpleQueue[tuple[str, tuple[str, ...]]] = queue.SimpleQueue()
    for item in cases.items():
        waiting.put(item)
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def run() -> None:
        worker = Worker()
        try:
            while True:
                done.put(worker.examine(*waiting.get_nowait()))
        except queue.Empty:
            pass
        finally:
            worker.close()
            done.put(None)

    for _ in range(num_workers):
        threading.Thread(target=run, daemon=True).start()
    running = num_workers
    while running:
        outcome = done.get()
        if outcome is None:
            running -= 1
        else:
            yield outcome


def read_results(path: Path) -> dict[str, Outcome]:
    """The last outcome of each case; a line cut short by an interruption is passed over."""
    outcomes: dict[str, Outcome] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            outcomes[fields["case"]] = Outcome(**{**fields, "operators": tuple(fields["operators"])})
    return outcomes


def record(num_workers: int) -> None:
    """Examine the cases of the tests' sample, and keep what they came to."""
    names = list(json.loads(SAMPLE.read_text(encoding="utf-8")))
    found = {outcome.case: outcome for outcome in examine_all(dict.fromkeys(names, ()), num_workers)}
    lines = {
        name: {"stage": found[name].stage, "blamed": found[name].blamed, "constants": found[name].constants}
        for name in names
    }
    SAMPLE.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="cases whose name contains this; docs/ is left alone")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--failed", action="store_true", help="examine again what did not end well")
    parser.add_argument("--record", action="store_true", help="examine the tests' sample and write its record anew")
    parser.add_argument("--workers", type=int, default=MAX_WORKERS, help="child processes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    if arguments.record:
        record(arguments.workers)
        return
    from benchmarks import onnx_coverage_table

    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        RESULTS.unlink(missing_ok=True)
    outcomes = read_results(RESULTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, tuple[str, ...]] = {
            name: tuple(sorted({node.op_type for node in case.model.graph.node})) for name, case in node_cases().items()
        }
    names |= dict.fromkeys(REAL_MODELS, ())
    names = {name: operators for name, operators in names.items() if arguments.only in name}
    wanted = {
        name: operators
        for name, operators in names.items()
        if arguments.only or name not in outcomes or (arguments.failed and outcomes[name].stage != "ok")
    }
    print(f"{len(names)} cases, {len(wanted)} to examine", flush=True)
    with RESULTS.open("a", encoding="utf-8") as log:
        for number, outcome in enumerate(examine_all(wanted, arguments.workers), 1):
            print(json.dumps(dataclasses.asdict(outcome)), file=log, flush=True)
            outcomes[outcome.case] = outcome
            if arguments.only or number % 50 == 0:
                print(f"{number:5d} {outcome.stage:8s} {outcome.case} {outcome.reason}", flush=True)
    if not arguments.only:
        TABLE.write_text(onnx_coverage_table.render([outcomes[name] for name in names]), encoding="utf-8")
        print(f"wrote {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
