"""Child processes of a benchmark: on free loopback ports, waited for on conditions, ended by their handle."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(Exception):
    """A benchmark could not be run; the message says what was expected, what was found and what to do."""


def announce(port: int) -> None:
    """Called by a child: tells its parent on one line of standard output which port it listens on."""
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()


def free_ports(count: int) -> list[int]:
    """Different loopback ports that were free a moment ago, for children that cannot announce their own."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


@dataclass
class Child:
    """One running child process; what it wrote is in `log`."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise BenchmarkError(f"{self.name} ended with exit code {code}; its last output:\n{self.tail()}")

    def tail(self, num_chars: int = 3000) -> str:
        return Path(self.log.name).read_text(errors="replace")[-num_chars:]

    def read_line(self) -> str:
        """The next line of its standard output (children started with `pipe` only)."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(timeout=30)
            raise BenchmarkError(
                f"{self.name} ended with {self.process.returncode} instead of answering:\n{self.tail()}"
            )
        return line

    def read_port(self) -> int:
        return int(json.loads(self.read_line())["port"])

    def wait_ready(self, http_port: int, timeout_seconds: float = 180.0) -> None:
        """Wait until `/v2/health/ready` answers 200."""
        deadline = time.monotonic() + timeout_seconds
        url = f"http://127.0.0.1:{http_port}/v2/health/ready"
        while time.monotonic() < deadline:
            self.check_alive()
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(url, timeout=5),
            ):
                return
            time.sleep(0.01)
        raise BenchmarkError(f"{self.name} was not ready in {timeout_seconds:.0f} s; its last output:\n{self.tail()}")

    def stop(self, timeout_seconds: float = 40.0) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def child(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    pipe: bool = False,
    keep_input: bool = False,
) -> Iterator[Child]:
    """Run a command in the project's root until the block ends.

    `pipe`: its standard output is for `read_line`. `keep_input`: its standard input stays open and silent meanwhile.
    """
    with tempfile.NamedTemporaryFile("w+", prefix=f"bench-{name}-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE if keep_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else log,
            stderr=log,
            env=environment,
            text=True,
        )
        started = Child(name, process, log)
        try:
            yield started
        finally:
            started.stop()
            for pipe_end in (process.stdin, process.stdout):
                if pipe_end is not None:
                    pipe_end.close()


def run_json(command: Sequence[str], timeout_seconds: float = 300.0) -> Any:
    """Run a command to its end and return the JSON on the last line of its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
