"""What every part of the benchmark shares: servers under test, measurements by name, rounds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.perf_analyzer import PerfAnalyzer, Protocol, Result
from benchmarks.processes import ROOT, Child, child, free_ports


@dataclass(frozen=True)
class Target:
    """A server that takes load on some of its ports."""

    name: str
    process: Child
    ports: dict[Protocol, int]

    def url(self, protocol: Protocol) -> str:
        return f"127.0.0.1:{self.ports[protocol]}"


@dataclass
class Bench:
    """One run: the load generator, how often and how long it measures, and what it measured.

    Measurements are kept by name, one result a round; `round` runs a list of them in turn, so that what slows the
    machine for a while slows all of them.
    """

    tool: PerfAnalyzer
    num_rounds: int = 3
    window_seconds: float = 0.8
    samples: dict[str, list[Result]] = field(default_factory=dict)

    def run_rounds(self, measurements: Sequence[tuple[str, Callable[[], Result]]]) -> None:
        for number in range(1, self.num_rounds + 1):
            for name, measure in measurements:
                result = measure()
                self.samples.setdefault(name, []).append(result)
                cpu = "" if result.cpu_us is None else f", {result.cpu_us:,.0f} us of CPU a request"
                note(f"round {number}: {name}: {result.throughput:,.0f}/s, p50 {result.p50_us:,.0f} us{cpu}")

    def load(
        self,
        target: Target,
        protocol: Protocol,
        model: str,
        concurrency: int,
        shapes: Mapping[str, Sequence[int]],
    ) -> Callable[[], Result]:
        """A measurement for `run_rounds`."""

        def measure() -> Result:
            return self.tool.run(
                target.url(protocol),
                protocol,
                model,
                concurrency,
                shapes,
                window_seconds=self.window_seconds,
                server=target.process,
            )

        return measure

    def throughput(self, name: str) -> float:
        return median(result.throughput for result in self.samples[name])

    def p50_us(self, name: str) -> float:
        return median(result.p50_us for result in self.samples[name])

    def cpu_us(self, name: str) -> float:
        return median(result.cpu_us for result in self.samples[name] if result.cpu_us is not None)


def note(text: str) -> None:
    """Progress, on standard error: standard output is for the table."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def bare_server(module: str, protocol: Protocol) -> Iterator[Target]:
    """One of the floors in `benchmarks/bare`."""
    with child(module, [sys.executable, "-m", f"benchmarks.bare.{module}"], pipe=True) as process:
        yield Target(module, process, {protocol: process.read_port()})


def hone_command(repository: Path, ports: Sequence[int], *flags: str) -> list[str]:
    """`ports` are those of HTTP, gRPC and metrics."""
    http_port, grpc_port, metrics_port = ports
    return [
        sys.executable,
        *("-m", "hone", "serve"),
        *("--model-repository", str(repository)),
        *("--http-port", str(http_port)),
        *("--grpc-port", str(grpc_port)),
        *("--metrics-port", str(metrics_port)),
        "--tuning=off",
        *flags,
    ]


@contextlib.contextmanager
def hone_server(name: str, repository: Path, *flags: str) -> Iterator[tuple[Target, float]]:
    """hone on a repository, ready; with the seconds it took to be."""
    ports = free_ports(3)
    began = time.monotonic()
    with child(name, hone_command(repository, ports, *flags)) as process:
        process.wait_ready(ports[0])
        seconds = time.monotonic() - began
        yield Target(name, process, {"http": ports[0], "grpc": ports[1]}), seconds


__all__ = ["ROOT", "Bench", "Target", "bare_server", "hone_command", "hone_server", "note"]
