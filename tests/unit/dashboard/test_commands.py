"""Commands in processes of their own: answers are kept, failures say why, nothing outlives the server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hone.dashboard import commands as module
from hone.dashboard.commands import Commands
from hone.errors import Unavailable
from tests.running import wait_until


async def test_what_the_doctor_finds_holds_for_a_minute(tmp_path):
    now = 0.0
    commands = Commands(clock=lambda: now)
    told = await commands.doctor(str(tmp_path / "cache"))
    assert told["device"]["digest"]
    assert {finding["name"] for finding in told["findings"]} >= {"onnxruntime", "g++"}
    now = 59.0
    assert await commands.doctor(str(tmp_path / "cache")) is told
    now = 61.0
    assert await commands.doctor(str(tmp_path / "cache")) is not told


async def test_a_failure_is_told_with_the_commands_own_words(tmp_path):
    commands = Commands()
    with pytest.raises(Unavailable, match=r"'hone explain' failed: .*nothing-there"):
        await commands.explain("nothing-there", str(tmp_path), str(tmp_path / "cache"), 1, "state")
    assert commands.kept("nothing-there", str(tmp_path), str(tmp_path / "cache"), 1, "state") is None


async def test_what_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DOCTOR_SECONDS", 0.001)
    with pytest.raises(Unavailable, match=r"took longer than 0\.001 s"):
        await Commands().doctor(str(tmp_path / "cache"))


async def test_closing_ends_what_runs(tmp_path):
    commands = Commands()
    asked = asyncio.create_task(commands.doctor(str(tmp_path / "cache")))
    async with asyncio.timeout(10):
        while commands._running is None:
            await asyncio.sleep(0)
    process = commands._running
    commands.close()
    with pytest.raises(Unavailable):
        await asked
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(Unavailable, match="exiting"):
        await commands.doctor(str(tmp_path / "another"))


def test_a_command_ends_with_the_server(tmp_path):
    """The server is killed without a chance to clean up; its command, which waits for a pipe, goes with it."""
    pipe, note = tmp_path / "pipe", tmp_path / "pid"
    os.mkfifo(pipe)
    server = (
        "import os, pathlib, subprocess, sys\n"
        "hone = [sys.executable, '-m', 'hone.dashboard.child', str(os.getpid())]\n"
        "child = subprocess.Popen([*hone, 'cache', 'ls', '--config', sys.argv[1]])\n"
        "pathlib.Path(sys.argv[2]).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", server, str(pipe), str(note)])
    try:
        # Opening it for writing succeeds once the command opens it for reading, long after it has told the kernel.
        descriptor = wait_until(lambda: opened(pipe), "the command reads its settings")
        try:
            parent.kill()
            parent.wait()
            child = int(note.read_text())
            wait_until(lambda: state(child) in "ZX", "the command has ended")
        finally:
            os.close(descriptor)
    finally:
        parent.kill()
        parent.wait()


def opened(pipe: Path) -> int | None:
    with suppress(OSError):
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK) or None
    return None


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"
