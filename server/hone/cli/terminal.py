"""How the commands write: colours and live pictures on a terminal, plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

#: Columns of what goes into a file or a pipe: nothing is wrapped or cut there, so that `grep` and `awk` find it.
PLAIN_WIDTH = 10_000

STATES = {
    "READY": "green",
    "LOADING": "yellow",
    "UNLOADING": "yellow",
    "UNAVAILABLE": "red",
    "tuned": "green",
    "tuning": "cyan",
    "queued": "cyan",
    "paused": "yellow",
    "failed": "red",
    "tvm": "green",
    "error": "red",
    "warning": "yellow",
}


def open_console(file: TextIO | None = None) -> Console:
    """A console on `file`, by default standard output. Not a terminal: no colours, no wrapping at 80 columns."""
    file = sys.stdout if file is None else file
    return (
        Console(file=file, highlight=False) if file.isatty() else Console(file=file, highlight=False, width=PLAIN_WIDTH)
    )


def show(console: Console, *parts: RenderableType) -> None:
    """Print; without a terminal also without the blanks that fill a table's last column."""
    if console.is_terminal:
        console.print(*parts, sep="\n", markup=False)
        return
    with console.capture() as captured:
        console.print(*parts, sep="\n", markup=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except ValueError:  # closed
        return False


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = (), folded: Sequence[str] = ()
) -> Table:
    """A table without lines: it reads well on a terminal and splits well in a pipe. Cells are plain text or rich's.
    Where a terminal is too narrow, columns of `folded` take several lines, and else the last one, "reason", is cut
    before any other."""
    has_reason = columns[-1] == "reason" and "reason" not in folded
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=has_reason)
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in folded,
            ratio=1 if has_reason and name == "reason" else None,
            overflow="fold" if name in folded else "ellipsis",
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def state(text: str) -> Text:
    """A state in its colour."""
    return Text(text, style=STATES.get(text, ""))


def duration(microseconds: float | None) -> str:
    """Such as "87 us", "1.31 ms", "2.4 s"; a dash for what is not known."""
    if microseconds is None:
        return "-"
    if microseconds < 1_000:
        return f"{microseconds:.3g} us" if microseconds < 100 else f"{microseconds:.0f} us"
    if microseconds < 1_000_000:
        return f"{microseconds / 1_000:.3g} ms"
    return f"{microseconds / 1_000_000:.3g} s"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
