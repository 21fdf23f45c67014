"""Names of entries, and child processes that use the cache and can be stopped, killed and heard from."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hone.kernels import digest_of

DEVICE = digest_of({"device": "test"})
ARCHITECTURE = "x86-64-v4-0123456789ab"

#: What a child has at hand; `say` and `hear` are its talk with the test.
_PRELUDE = """
import os, sys
from pathlib import Path
from hone.kernels import *
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, key
def say(text): print(text, flush=True)
def hear(): return sys.stdin.readline().strip()
root = Path(sys.argv[1])
"""

ROOT = Path(__file__).parents[3]


def key(number: int | str) -> str:
    """A digest; another one for each number."""
    return digest_of({"number": number})


class Child:
    """A Python process that runs some code with the cache's names; ends with the test at the latest."""

    def __init__(self, code: str, root: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + code, str(root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def hears(self, expected: str) -> None:
        assert self.read() == expected

    def read(self) -> str:
        """The child's next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def finish(self) -> None:
        assert self.process.wait(timeout=60) == 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def child(code: str, root: Path, *arguments: str) -> Iterator[Child]:
    started = Child(code, root, *arguments)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[bool]:
    """A tmpfs at `path` while inside; False where this user may not mount."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "hone-test", str(path)]
    ran = subprocess.run(command, check=False, capture_output=True)
    try:
        yield ran.returncode == 0
    finally:
        if ran.returncode == 0:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def staged(root: Path) -> list[Path]:
    """What lies in the staging folder."""
    return sorted((root / "v1" / ".staging").iterdir())


def make_old(path: Path, seconds: float) -> None:
    """As if it had last been changed that long ago (negative: in the future)."""
    changed = path.stat().st_mtime - seconds
    os.utime(path, (changed, changed))


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
