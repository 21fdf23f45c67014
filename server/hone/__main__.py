"""`python -m hone` and the `hone` command."""

from __future__ import annotations

import os
import sys

from hone.cli.main import main as _main


def main() -> None:
    open_standard_streams()
    sys.exit(_main(sys.argv[1:]))


def open_standard_streams() -> None:
    """Put /dev/null where a standard stream was closed before the start.

    Otherwise the next file or client socket would become standard output and be written to by whoever prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (open as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


if __name__ == "__main__":
    main()
