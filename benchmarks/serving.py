"""Measures the server against floors, peers and ONNX Runtime itself: `make bench`, or `python -m benchmarks.serving`.

Starts everything itself on free loopback ports, prints one table, and after a complete run writes
benchmarks/results/serving.json. Parts can be run alone (`--only identity`), which writes nothing unless told where.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from benchmarks import identity, real_models, resources, scale
from benchmarks.bench import Bench, note
from benchmarks.perf_analyzer import PerfAnalyzer
from benchmarks.processes import ROOT, BenchmarkError
from benchmarks.report import Row, describe_machine, format_table, write_json

PARTS: Final[dict[str, tuple[str, Callable[[Bench], list[Row]]]]] = {
    "identity": ("Identity model, four clients", identity.measure),
    "models": ("Real models", real_models.measure),
    "scale": ("Cost of a request at 64 B, one client", scale.measure),
    "resources": ("Before the first request", resources.measure),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part only; may be given several times")
    parser.add_argument("--rounds", type=int, default=3, help="rounds whose median is reported")
    parser.add_argument("--window", type=float, default=0.8, help="seconds; a measurement takes three windows")
    parser.add_argument("--output", type=Path, help="where to write JSON (a complete run has its place)")
    arguments = parser.parse_args()
    complete = arguments.only is None and arguments.rounds >= 3
    output = arguments.output or (ROOT / "benchmarks" / "results" / "serving.json" if complete else None)
    machine = describe_machine()
    began = time.monotonic()
    sections: dict[str, list[Row]] = {}
    try:
        bench = Bench(PerfAnalyzer.prepare(), arguments.rounds, arguments.window)
        for part in arguments.only or PARTS:
            title, measure = PARTS[part]
            note(f"== {title}")
            sections[title] = measure(bench)
    except BenchmarkError as problem:
        note(f"benchmark failed: {problem}")
        return 2
    print(format_table(sections))
    rows = [row for section in sections.values() for row in section]
    num_met, num_missed = (sum(row.met is met for row in rows) for met in (True, False))
    seconds = time.monotonic() - began
    print(
        f"\n{num_met} figures met, {num_missed} missed; {seconds:.0f} s on {machine['cpu']}, {machine['cores']} cores"
    )
    if output is not None:
        samples = {name: [result.to_dict() for result in results] for name, results in bench.samples.items()}
        machine["load_average_after"] = list(psutil.getloadavg())
        write_json(output, machine, sections, samples)
        note(f"written to {output}")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
