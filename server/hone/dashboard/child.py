"""A `hone` command in a process that ends when the server does: `python -m hone.dashboard.child COMMAND ...`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the server went before the kernel was told
    runpy.run_module("hone", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
