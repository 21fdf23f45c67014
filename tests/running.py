"""A real server in a process of its own, on free loopback ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

DEADLINE_SECONDS = 60.0


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """The condition's first true value. Fails by name when it stays false until the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


class RunningServer:
    """What a test needs of a server process; `log` is all it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        self.process = process
        self._output = output
        self.http_port = self.grpc_port = self.metrics_port = 0

    @property
    def log(self) -> str:
        return Path(self._output.name).read_text(encoding="utf-8", errors="replace")

    def wait_listening(self) -> None:
        def listening() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            log = self.log
            for attribute, pattern in (
                ("http_port", r"HTTP +http://\S+:(\d+)\n"),
                ("grpc_port", r"gRPC +\S+:(\d+)\n"),
                ("metrics_port", r"metrics +http://\S+:(\d+)/metrics\n"),
            ):
                found = re.search(pattern, log)
                if found:
                    setattr(self, attribute, int(found[1]))
            return bool(self.metrics_port or self.http_port)

        wait_until(listening, "the server tells its ports")

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/v2/health/ready")[0] == 200, f"ready; log:\n{self.log}")

    def call(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body, headers (names in lower case) of one HTTP request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=DEADLINE_SECONDS)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, body, _ = self.call("GET", path)
        return status, json.loads(body) if body else None

    def post(self, path: str, document: Any = None) -> tuple[int, Any]:
        body = None if document is None else json.dumps(document).encode()
        status, answer, _ = self.call("POST", path, body, {"Content-Type": "application/json"})
        return status, json.loads(answer) if answer else None

    def infer(self, model: str, rows: list[list[float]], version: str = "") -> tuple[int, Any]:
        """Send FP32 rows to the input IN as JSON."""
        path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
        shape = [len(rows), len(rows[0])]
        return self.post(path, {"inputs": [{"name": "IN", "datatype": "FP32", "shape": shape, "data": rows}]})

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(name, version) -> (state, reason)."""
        status, lines = self.post("/v2/repository/index", {})
        assert status == 200, lines
        return {
            (line["name"], line.get("version", "")): (line.get("state", ""), line.get("reason", "")) for line in lines
        }

    def metrics(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=DEADLINE_SECONDS)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM, seconds: float = DEADLINE_SECONDS) -> int:
        """Signal the process and wait for its end. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def num_mappings(self) -> int:
        return len(Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8").splitlines())

    def cpu_seconds(self) -> float:
        """CPU time of all threads since the start, those that have ended included."""
        clock = (~self.process.pid << 3) | 2  # what clock_getcpuclockid(3) makes of a process
        return time.clock_gettime(clock)

    def metric(self, name: str, **labels: str) -> float | None:
        """The sample of this name whose labels include these, None where there is none."""
        for line in self.metrics().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
                return float(value)
        return None


@contextlib.contextmanager
def run_server(
    repository: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    ready: bool = True,
    stderr: IO[bytes] | int | None = None,
    program: Sequence[str] = ("-m", "hone"),
) -> Iterator[RunningServer]:
    """Start `hone serve` on a repository; ended at the latest when the block ends.

    `program` is what the interpreter is to run. `stderr` takes the place of the log where a test wants the server's
    standard error elsewhere.
    """
    command = [sys.executable, *program, "serve", "--model-repository", str(repository)]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", *flags]
    if not any(flag.startswith("--tuning") for flag in flags) and "HONE_TUNING" not in (environment or {}):
        command.append("--tuning=off")  # tuning is on by default; tests that are not about it need the cores
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    with tempfile.NamedTemporaryFile(prefix="hone-server-") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output if stderr is None else stderr,
            env={**clean, **(environment or {})},
        )
        server = RunningServer(process, output)
        try:
            server.wait_listening()
            if ready:
                server.wait_ready()
            yield server
        finally:
            try:
                server.stop()
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
