"""Where the server's time goes under load: `python -m benchmarks.profile_serving --protocol http --elements 16`.

Starts hone on an identity model (or on `--repository`), sends load with perf_analyzer and samples every thread from
outside with py-spy (of .venv-perf), so that the program measured is the program served. Prints the functions that time
is spent in, by themselves and with what they call; `--native` resolves frames of C libraries too.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME
from benchmarks.bench import bare_server, hone_server
from benchmarks.models import SMALL, add_identity
from benchmarks.perf_analyzer import PerfAnalyzer, Result, count_requests
from benchmarks.processes import ROOT, BenchmarkError

#: How py-spy names a thread in a stack.
_THREAD = re.compile(r"thread \((\d+)\): (.*)")


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


@dataclass(frozen=True)
class ThreadUsage:
    """What the kernel has counted for a thread: time on a processor, times it waited, times it was preempted."""

    cpu_ns: int
    num_waits: int
    num_preemptions: int

    def since(self, before: ThreadUsage) -> ThreadUsage:
        return ThreadUsage(
            self.cpu_ns - before.cpu_ns,
            self.num_waits - before.num_waits,
            self.num_preemptions - before.num_preemptions,
        )


def thread_usage(pid: int) -> dict[int, ThreadUsage]:
    """Of every thread of a process, by thread id."""
    usage = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            cpu_ns = int((task / "schedstat").read_text().split()[0])
            usage[int(task.name)] = ThreadUsage(
                cpu_ns, int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"])
            )
    return usage


def print_summary(title: str, total: int, counts: Counter[str], num_lines: int) -> None:
    print(f"\n{title}")
    for frame, count in counts.most_common(num_lines):
        print(f"{100 * count / max(total, 1):6.1f} %  {frame}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_serving", description=__doc__)
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--elements", type=int, default=SMALL, help="FP32 elements of the tensor")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--repository", type=Path, help="serve this instead of an identity model (with --model)")
    parser.add_argument("--model", default=MODEL_NAME)
    parser.add_argument("--shape", default="", help="NAME:3,48,192 for --model's input")
    parser.add_argument("--bare", action="store_true", help="profile the bare handler instead")
    parser.add_argument("--native", action="store_true", help="resolve frames of C libraries")
    parser.add_argument("--gil", action="store_true", help="sample only threads that hold the interpreter lock")
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
        url, process = target.url(arguments.protocol), target.process
        pid = process.process.pid

        def load(window_seconds: float) -> Result:
            return tool.run(
                url,
                arguments.protocol,
                arguments.model,
                arguments.concurrency,
                shapes,
                window_seconds=window_seconds,
                server=process,
            )

        before = thread_usage(pid)
        num_before = count_requests(url, arguments.protocol, arguments.model)
        undisturbed = load(1.0)
        after = thread_usage(pid)
        num_requests = count_requests(url, arguments.protocol, arguments.model) - num_before

        output = arguments.output or folder / "stacks.txt"
        command = [str(ROOT / ".venv-perf/bin/py-spy"), "record", "--pid", str(pid)]
        command += ["--duration", "3", "--rate", "500", "--format", "raw", "--threads", "--output", str(output)]
        command += ["--native"] * arguments.native + ["--gil"] * arguments.gil + ["--function"] * (not arguments.lines)
        done: list[subprocess.CompletedProcess[str]] = []
        sampler = threading.Timer(
            1.0, lambda: done.append(subprocess.run(command, capture_output=True, text=True, check=False))
        )
        sampler.start()
        load(1.8)
        sampler.join()
        if not done or done[0].returncode != 0:
            raise BenchmarkError(f"py-spy did not run: {done[0].stderr if done else 'not started'}")
        total, alone, together = summarize(output.read_text().splitlines())
    print(
        f"{undisturbed.throughput:,.0f} requests/s, p50 {undisturbed.p50_us:,.0f} us,"
        f" {undisturbed.cpu_us:,.0f} us of CPU a request"
    )
    names = {int(match[1]): match[2] for frame in together if (match := _THREAD.match(frame))}
    print("\nCPU a request, waits and preemptions a request, by thread")
    for thread, usage in sorted(after.items(), key=lambda item: -item[1].cpu_ns):
        used = usage.since(before.get(thread, ThreadUsage(0, 0, 0)))
        if used.cpu_ns > 0:
            per_request = (used.cpu_ns / 1e3, used.num_waits, used.num_preemptions)
            cpu_us, waits, preemptions = (value / max(num_requests, 1) for value in per_request)
            print(f"{cpu_us:9.1f} us  {waits:6.2f}  {preemptions:6.2f}  {names.get(thread, '(not Python)')} {thread}")
    print_summary(f"by themselves, of {total} samples", total, alone, arguments.top)
    print_summary("with what they call", total, together, arguments.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
