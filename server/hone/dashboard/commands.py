"""What `hone doctor` and `hone explain` tell, asked in processes of their own: drivers that hang and compilers stay out
of the server. They run at idle priority, one at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from hone.errors import Unavailable

DOCTOR_SECONDS = 60.0
EXPLAIN_SECONDS = 300.0
_MAX_REASON = 400
#: Explanations that are kept.
_MAX_KEPT = 64


class Commands:
    """Belongs to the event loop. `close` ends what runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._kept: dict[tuple[str, ...], Any] = {}
        self._closed = False

    async def doctor(self, kernels_cache: str) -> Any:
        """What was found within the last minute or so holds still."""
        minute = str(int(self._clock() // 60))
        return await self._answer(("doctor", "--json", "--kernels-cache", kernels_cache), DOCTOR_SECONDS, minute)

    async def explain(self, model: str, repository: str, kernels_cache: str, batch: int, state: str) -> Any:
        """Where a model's time goes. `state` names what is explained: another one is measured anew."""
        flags = ("--model-repository", repository, "--kernels-cache", kernels_cache, "--batch", str(batch), "--json")
        return await self._answer(("explain", model, *flags), EXPLAIN_SECONDS, state)

    def kept(self, model: str, repository: str, kernels_cache: str, batch: int, state: str) -> Any:
        """An explanation that was made before, or None."""
        flags = ("--model-repository", repository, "--kernels-cache", kernels_cache, "--batch", str(batch), "--json")
        return self._kept.get(("explain", model, *flags, state))

    def close(self) -> None:
        self._closed = True
        if self._running is not None:
            _kill(self._running)

    async def _answer(self, arguments: Sequence[str], seconds: float, state: str) -> Any:
        key = (*arguments, state)
        async with self._turn:
            if key not in self._kept:
                answer = await self._ask(arguments, seconds)
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = answer
            return self._kept[key]

    async def _ask(self, arguments: Sequence[str], seconds: float) -> Any:
        """Raises Unavailable where there is no answer, with the reason that the command gave."""
        if self._closed:
            raise Unavailable("Server exiting")
        # Started here and not on another thread: it ends with the thread that started it.
        process = self._running = subprocess.Popen(
            [sys.executable, "-m", "hone.dashboard.child", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with suppress(OSError):  # where the system does not grant it, it runs like others
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            out, err = await asyncio.to_thread(_communicate, process, seconds)
        finally:
            # Where the request was cancelled, the thread still reads: killed, it soon ends.
            _kill(process)
            self._running = None
        if out is None:
            raise Unavailable(f"'hone {arguments[0]}' took longer than {seconds:g} s")
        if process.returncode != 0:
            told = err.decode("utf-8", "replace").strip().splitlines() or [f"exit code {process.returncode}"]
            raise Unavailable(f"'hone {arguments[0]}' failed: {told[-1][:_MAX_REASON]}")
        try:
            return orjson.loads(out)
        except orjson.JSONDecodeError as problem:
            raise Unavailable(f"'hone {arguments[0]}' answered something that is not JSON: {problem}") from problem


def _communicate(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes | None, bytes]:
    """What it wrote; None for what came too late. It has been reaped afterwards, and whom it started is gone."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.communicate()
        return None, b""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The command and what it started; its number is its own until it is reaped."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
