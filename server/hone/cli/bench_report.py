"""What `hone bench` tells: a table for each load, or a row for each load and engine as CSV."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


@contextlib.contextmanager
def output(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdout
        return
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        yield file


def write_csv(told: Mapping[str, Any], file: TextIO) -> None:
    fields = ["model", "signature", *(name for name in told["results"][0] if name != "first_error")]
    writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in told["results"]:
        writer.writerow({"model": told["model"], "signature": told["signature"], **line})


def print_report(told: Mapping[str, Any]) -> None:
    """A table for each load: a row for each figure, a column for each engine."""
    from hone.cli.load import QUANTILES
    from hone.cli.terminal import duration, open_console, show, table

    console = open_console()
    console.print(f"{told['model']} at {told['url']}, {told['signature']}", markup=False)
    if told["note"]:
        console.print(told["note"], markup=False)
    sides = told["engines"]
    for load in dict.fromkeys(line["load"] for line in told["results"]):
        lines = {line["engine"]: line for line in told["results"] if line["load"] == load}
        rows = []
        figures: list[tuple[str, str, Callable[[Any], str]]] = [
            ("requests/s", "requests_per_second", "{:.1f}".format),
            ("mean", "mean_us", duration),
            *((quantile, f"{quantile}_us", duration) for quantile, _ in QUANTILES),
            ("max", "max_us", duration),
            ("requests", "num_requests", str),
            ("errors", "num_errors", str),
        ]
        for title, name, shown in figures:
            values = [lines[side][name] for side in sides]
            row = [title, *(shown(value) for value in values)]
            if len(sides) > 1:
                row.append(_ratio(name, *values))
            rows.append(row)
        console.print(f"\n{lines[sides[0]]['loop']} loop, {load}", markup=False)
        columns = ("", *sides, "tuned is") if len(sides) > 1 else ("", *sides)
        show(console, table(columns, rows, right=columns[1:]))


def _ratio(name: str, baseline: float | None, tuned: float | None) -> str:
    """How many times as fast, where the figure is one of speed."""
    if not baseline or not tuned or name in ("num_requests", "num_errors"):
        return ""
    return f"{tuned / baseline:.2f}x" if name == "requests_per_second" else f"{baseline / tuned:.2f}x"
