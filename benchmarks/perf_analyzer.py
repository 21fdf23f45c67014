"""NVIDIA's load generator: made available, run in a closed loop, its report read.

It lives in an environment of its own (`make perf-tools`), because its client is older than the server's.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.processes import ROOT, BenchmarkError, Child

Protocol = Literal["http", "grpc"]

#: Library that the binary wants -> what brings it.
_LIBRARIES = {
    "libb64": "Debian's package libb64-0d; `make test-deps` installs it",
    "libcudart": "the wheel nvidia-cuda-runtime-cu12; `make perf-tools` installs it into .venv-perf",
}


@dataclass(frozen=True)
class Result:
    """One measurement. `cpu_us` is the server's CPU time for one request, all its threads, user and system."""

    throughput: float
    p50_us: float
    p90_us: float
    p99_us: float
    cpu_us: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 2) for name, value in asdict(self).items()}


def read_report(text: str) -> Result:
    """Read the CSV report of a run at one concurrency. Raises BenchmarkError where it is not one."""
    rows = list(csv.DictReader(text.splitlines()))
    if len(rows) != 1:
        raise BenchmarkError(
            f"expected a report with one row of numbers from perf_analyzer, found {len(rows)}: {text!r}"
        )
    (row,) = rows
    try:
        return Result(
            throughput=float(row["Inferences/Second"]),
            p50_us=float(row["p50 latency"]),
            p90_us=float(row["p90 latency"]),
            p99_us=float(row["p99 latency"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise BenchmarkError(f"perf_analyzer's report lacks a number ({problem}): {text!r}") from problem


class PerfAnalyzer:
    """The binary with the environment it needs. Made by `prepare`."""

    def __init__(self, binary: Path, library_folders: Sequence[Path]) -> None:
        self._binary = binary
        self._environment = dict(os.environ)
        paths = [str(folder) for folder in library_folders]
        if inherited := self._environment.get("LD_LIBRARY_PATH"):
            paths.append(inherited)
        self._environment["LD_LIBRARY_PATH"] = ":".join(paths)

    @classmethod
    def prepare(cls, root: Path = ROOT) -> PerfAnalyzer:
        """Make .venv-perf if it is missing or out of date, and check that the binary starts. Raises BenchmarkError."""
        made = subprocess.run(
            ["make", "--no-print-directory", "perf-tools"], cwd=root, capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            raise BenchmarkError(f"`make perf-tools` failed:\n{made.stdout[-1000:]}{made.stderr[-2000:]}")
        folders = sorted((root / ".venv-perf").glob("lib/python3*/site-packages/nvidia/cuda_runtime/lib"))
        tool = cls(root / ".venv-perf" / "bin" / "perf_analyzer", folders)
        tool.check()
        return tool

    def check(self) -> None:
        """Raises BenchmarkError, naming the package to install, if the binary does not start."""
        try:
            done = subprocess.run(
                [str(self._binary), "--version"], env=self._environment, capture_output=True, text=True, check=False
            )
        except OSError as problem:
            raise BenchmarkError(f"perf_analyzer does not start: {problem}; run `make perf-tools`") from problem
        for library, source in _LIBRARIES.items():
            if library in done.stderr:
                raise BenchmarkError(
                    f"perf_analyzer needs {library}, which comes with {source}:\n{done.stderr.strip()}"
                )
        if done.returncode != 0:
            raise BenchmarkError(
                f"perf_analyzer --version ended with exit code {done.returncode}: {done.stderr.strip()}"
            )

    def run(
        self,
        url: str,
        protocol: Protocol,
        model: str,
        concurrency: int,
        shapes: Mapping[str, Sequence[int]],
        *,
        window_seconds: float = 0.8,
        server: Child | None = None,
    ) -> Result:
        """Closed loop at one concurrency: three windows, reported together.

        `url` is host:port; `shapes` are without the batch dimension where the model batches. With `server`, its CPU
        time for one request is measured too.
        """
        with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
            report = Path(folder) / "report.csv"
            command = [str(self._binary), "-m", model, "-u", url, "-i", protocol, "-f", str(report)]
            command += [
                "--concurrency-range",
                str(concurrency),
                "--measurement-interval",
                str(int(window_seconds * 1000)),
            ]
            # Three windows are the least it takes; more only until one has requests in it. It would go on until they
            # agree, for an unpredictable time; rounds and medians are ours.
            command += ["--stability-percentage", "100000", "--max-trials", "10"]
            for name, shape in shapes.items():
                command += ["--shape", f"{name}:{','.join(str(size) for size in shape)}"]
            before = (0, 0.0) if server is None else (count_requests(url, protocol, model), server.cpu_seconds())
            self._execute(command, server, report)
            result = read_report(report.read_text())
            if server is None:
                return result
            num_requests = count_requests(url, protocol, model) - before[0]
            cpu_seconds = server.cpu_seconds() - before[1]
        return replace(result, cpu_us=cpu_seconds / num_requests * 1e6)

    def _execute(self, command: Sequence[str], server: Child | None, report: Path) -> None:
        with tempfile.TemporaryFile("w+") as output:
            try:
                process = subprocess.run(
                    command, env=self._environment, stdout=output, stderr=subprocess.STDOUT, timeout=120, check=False
                )
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"{' '.join(command)} did not end within 120 s") from None
            if server is not None:
                server.check_alive()
            if process.returncode != 0 or not report.exists() or not report.read_text().strip():
                output.seek(0)
                raise BenchmarkError(
                    f"{' '.join(command)} ended with exit code {process.returncode}:\n{output.read()[-2000:]}"
                )


def count_requests(url: str, protocol: Protocol, model: str) -> int:
    """Requests that a model has answered in all its versions, by the server's own statistics."""
    if protocol == "http":
        with urllib.request.urlopen(f"http://{url}/v2/models/{model}/stats", timeout=30) as response:
            statistics = json.load(response)
        return sum(int(entry["inference_stats"]["success"]["count"]) for entry in statistics["model_stats"])
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model), timeout=30)
    return sum(int(entry.inference_stats.success.count) for entry in answer.model_stats)
