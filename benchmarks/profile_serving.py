"""Where the server's time goes under load: `python -m benchmarks.profile_serving --protocol http --elements 16`.

Starts hone on an identity model (or on `--repository`), sends load with perf_analyzer and samples every thread from
outside with py-spy (of .venv-perf), so that the program measured is the program served. Prints the functions that time
is spent in, by themselves and with what they call; `--native` resolves frames of C libraries too.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME
from benchmarks.bench import bare_server, hone_server
from benchmarks.models import SMALL, add_identity
from benchmarks.perf_analyzer import PerfAnalyzer
from benchmarks.processes import ROOT, BenchmarkError


def summarize(folded: Iterable[str]) -> tuple[int, Counter[str], Counter[str]]:
    """Read folded stacks (`outer;...;inner count`): number of samples, by innermost frame, by any frame."""
    total = 0
    alone: Counter[str] = Counter()
    together: Counter[str] = Counter()
    for line in folded:
        stack, _, count = line.rstrip().rpartition(" ")
        if not stack:
            continue
        frames = stack.split(";")
        total += int(count)
        alone[frames[-1]] += int(count)
        for frame in set(frames):
            together[frame] += int(count)
    return total, alone, together


def print_summary(title: str, total: int, counts: Counter[str], num_lines: int) -> None:
    print(f"\n{title}")
    for frame, count in counts.most_common(num_lines):
        print(f"{100 * count / max(total, 1):6.1f} %  {frame}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_serving", description=__doc__)
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--elements", type=int, default=SMALL, help="FP32 elements of the tensor")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="send and ask for JSON tensors")
    parser.add_argument("--repository", type=Path, help="serve this instead of an identity model (with --model)")
    parser.add_argument("--model", default=MODEL_NAME)
    parser.add_argument("--shape", default="", help="NAME:3,48,192 for --model's input")
    parser.add_argument("--bare", action="store_true", help="profile the bare handler instead")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--lines", action="store_true", help="tell the lines of a function apart")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--output", type=Path, help="keep the folded stacks here (for a flame graph)")
    arguments = parser.parse_args()
    try:
        return _profile(arguments)
    except BenchmarkError as problem:
        print(f"profile failed: {problem}", file=sys.stderr)
        return 2


def _profile(arguments: argparse.Namespace) -> int:
    tool = PerfAnalyzer.prepare()
    shapes = {INPUT_NAME: [arguments.elements]}
    if arguments.shape:
        name, _, sizes = arguments.shape.partition(":")
        shapes = {name: [int(size) for size in sizes.split(",")]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-profile-")))
        if arguments.bare:
            module = "http_asgi" if arguments.protocol == "http" else "grpc_aio"
            target = stack.enter_context(bare_server(module, arguments.protocol))
        else:
            repository = arguments.repository
            if repository is None:
                repository = folder / "repository"
                add_identity(repository, MODEL_NAME)
            target, _ = stack.enter_context(hone_server("hone", repository))
        output = arguments.output or folder / "stacks.txt"
        command = [str(ROOT / ".venv-perf/bin/py-spy"), "record", "--pid", str(target.process.process.pid)]
        command += ["--duration", "3", "--rate", "500", "--format", "raw", "--threads", "--output", str(output)]
        command += ["--native"] * arguments.native + ["--function"] * (not arguments.lines)

        done: list[subprocess.CompletedProcess[str]] = []
        sampler = threading.Timer(
            1.0, lambda: done.append(subprocess.run(command, capture_output=True, text=True, check=False))
        )
        sampler.start()
        result = tool.run(
            target.url(arguments.protocol),
            arguments.protocol,
            arguments.model,
            arguments.concurrency,
            shapes,
            json_tensors=arguments.json,
            window_seconds=1.8,
            server=target.process,
        )
        sampler.join()
        if not done or done[0].returncode != 0:
            raise BenchmarkError(f"py-spy did not run: {done[0].stderr if done else 'not started'}")
        total, alone, together = summarize(output.read_text().splitlines())
    cpu = "" if result.cpu_us is None else f", {result.cpu_us:,.0f} us of CPU a request"
    print(f"{result.throughput:,.0f} requests/s under the profiler, p50 {result.p50_us:,.0f} us{cpu}; {total} samples")
    print_summary("by themselves", total, alone, arguments.top)
    print_summary("with what they call", total, together, arguments.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
