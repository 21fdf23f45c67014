"""`hone serve` on a terminal: a line a model that stays current below the log; JSON where that is asked for."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

from tests import models
from tests.running import run_server, wait_until

FLAGS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--tuning=off", "--model-control-mode=poll")


class Terminal:
    """A terminal of 24 lines that remembers all that was written to it, and what can be seen."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.written = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self.written += data.decode()

    def close(self) -> None:
        self._thread.join(10)
        os.close(self._master)

    @property
    def lines(self) -> list[str]:
        """What is left of the lines after those that the cursor went back over were cleared."""
        seen: list[str] = []
        for part in re.split(r"(\x1b\[\d+F\x1b\[J)", self.written):
            back = re.fullmatch(r"\x1b\[(\d+)F\x1b\[J", part)
            if back:
                del seen[len(seen) - int(back[1]) :]
            else:
                seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part).splitlines()
        return [line.rstrip() for line in seen]


@contextlib.contextmanager
def on_a_terminal(repository: Path, *flags: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    terminal = Terminal()
    command = [sys.executable, "-m", "hone", "serve", f"--model-repository={repository}", *FLAGS, *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    process = subprocess.Popen(
        command,
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**environment, "TERM": "xterm"},
    )
    os.close(terminal.slave)
    try:
        yield terminal, process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
        terminal.close()


def rows(terminal: Terminal) -> dict[str, list[str]]:
    """The table at the bottom: cells by model."""
    lines = terminal.lines
    heads = [number for number, line in enumerate(lines) if line.startswith("model ")]
    return {line.split()[0]: line.split() for line in lines[heads[-1] + 1 :]} if heads else {}


def test_a_line_a_model_that_stays_current(repository: Path) -> None:
    models.write_model(repository, "first", models.scale(2.0))
    with on_a_terminal(repository, "--repository-poll-secs=0.1") as (terminal, process):
        wait_until(lambda: rows(terminal).get("first", [])[2:3] == ["READY"], "the first model's line")
        models.write_model(repository, "second", models.scale(2.0))
        wait_until(lambda: rows(terminal).get("second", [])[2:4] == ["READY", "onnxruntime"], "the second model's line")
        lines = terminal.lines
        assert sum(line.startswith("model ") for line in lines) == 1, "the table is there once"
        assert sum("loaded second version 1" in line for line in lines) == 1, "the log goes by above it"
        for place in (r"HTTP       http://127\.0\.0\.1:\d+", r"dashboard  http://127\.0\.0\.1:\d+/"):
            assert any(re.fullmatch(rf"  {place}", line) for line in lines), place
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert terminal.lines[-2:][0].startswith(("first", "model")), "the last state stays"


def test_a_terminal_that_takes_no_codes_gets_none(repository: Path) -> None:
    with run_server(repository) as server:
        assert "\x1b" not in server.log
        assert "model  version" not in server.log


def test_json(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    command = [sys.executable, "-m", "hone", "serve", f"--model-repository={repository}", *FLAGS, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        listening, ready = (json.loads(process.stdout.readline()) for _ in range(2))
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert listening["event"] == "listening"
    assert listening["http"].startswith("http://127.0.0.1:")
    assert (ready["event"], ready["models"]) == ("ready", ["m"])
    assert all(json.loads(line)["message"] for line in log.splitlines())


def test_top_on_a_terminal_repaints_and_leaves_nothing(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository) as server:
        terminal = Terminal()
        command = [sys.executable, "-m", "hone", "top", f"--url=127.0.0.1:{server.http_port}", "--interval=0.1"]
        with subprocess.Popen(
            command, stdin=terminal.slave, stdout=terminal.slave, env={**os.environ, "TERM": "xterm"}
        ) as process:
            os.close(terminal.slave)
            wait_until(lambda: terminal.written.count("hone top - ") >= 3, "three pictures")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        terminal.close()
    assert terminal.written.startswith("\x1b[?1049h"), "a screen of its own"
    assert terminal.written.rstrip().endswith("\x1b[?1049l"), "and back to the one before"
