"""What `hone serve` shows on a terminal: one line a model at the bottom that stays current, the log above it."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hone.cli.status import best_speedup, engine_of, tuning_of
from hone.cli.terminal import duration, factor, state, table

#: Lines of the terminal that are left to the log.
_LOG_LINES = 6
_CLOSE_SECONDS = 1.0


class Board(io.TextIOBase):
    """A text file on a terminal, below whose end a table is kept. Write the log and everything else to it: it takes the
    table away, writes, and puts it back.

    A terminal can be stopped (Ctrl-S), so drawing has a thread of its own; `show` never waits.
    """

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._console = Console(file=terminal, highlight=False)
        self._drawing = threading.Lock()
        self._num_lines = 0
        self._text = ""
        self._changed = threading.Condition()
        self._models: Mapping[str, Mapping[str, Any]] | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hone-board", daemon=True)
        self._thread.start()

    def show(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """The models as the dashboard pictures them: by name, with `index`, `stats` and `tuning` by version."""
        with self._changed:
            self._models = models
            self._changed.notify()

    def write(self, text: str) -> int:
        if not text:
            return 0
        with self._drawing:
            self._terminal.write(f"{self._erasure()}{text}")
            # A line that is not finished would be painted over: the table waits for its end.
            if text.endswith("\n"):
                self._draw()
            self._terminal.flush()
        return len(text)

    def flush(self) -> None:
        self._terminal.flush()

    def isatty(self) -> bool:
        return True

    def stop(self) -> None:
        """The last table stays where it is, and what is written later goes below it."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        self._num_lines, self._text = 0, ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._models is not None)
                if self._ended:
                    return
                models, self._models = self._models, None
            if models is not None:
                self._redraw(models)

    def _redraw(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        with self._console.capture() as captured:
            self._console.print(picture(models, max_rows=max(1, self._console.height - _LOG_LINES)))
        text = captured.get()
        try:
            with self._drawing:
                if text == self._text:
                    return
                self._terminal.write(self._erasure())
                self._text = text
                self._draw()
                self._terminal.flush()
        except (OSError, ValueError):
            return  # the terminal is gone: the log says what there is to say

    def _erasure(self) -> str:
        """Puts the cursor where the table begins, and clears from there."""
        num_lines, self._num_lines = self._num_lines, 0
        return f"\x1b[{num_lines}F\x1b[J" if num_lines else ""

    def _draw(self) -> None:
        self._terminal.write(self._text)
        self._num_lines = self._text.count("\n")


def picture(models: Mapping[str, Mapping[str, Any]], max_rows: int) -> RenderableType:
    """One row a version; those beyond `max_rows` are counted."""
    rows = [row for name, parts in sorted(models.items()) for row in _rows(name, parts)]
    columns = ("model", "version", "state", "engine", "speed-up", "tuning", "req/s", "p99", "reason")
    made: Table = table(columns, rows[:max_rows], right=("speed-up", "req/s", "p99"))
    if len(rows) > max_rows:
        made.add_row(Text(f"and {len(rows) - max_rows} more: hone top", style="dim"))
    return made


def _rows(name: str, parts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    found = []
    for line in parts.get("index", ()):
        version = line["version"]
        tuning = parts.get("tuning", {}).get(version)
        read = parts.get("stats", {}).get(version)
        window = (read or {}).get("window", {}).get("request", {})
        p99 = max((p99 for _, _, p99 in window.values()), default=None)
        engine = engine_of(tuning) if tuning or line["state"] != "READY" else "onnxruntime"
        found.append(
            (
                _plain(name),
                version,
                state(line["state"] or "-"),
                Text(engine, style="green" if engine.startswith("tvm") else ""),
                factor(best_speedup(tuning)),
                tuning_of(tuning),
                "-" if read is None else f"{read['requests_per_second']:.1f}",
                duration(p99),
                _plain(line["reason"] or (tuning or {}).get("reason", "")),
            )
        )
    return found


def _plain(text: str) -> str:
    """Names and reasons may hold what moves a cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)
