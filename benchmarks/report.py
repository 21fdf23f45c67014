"""What a run says: rows of one table, and the same with every measurement as JSON."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil

_VERSIONS = (
    "hone",
    "onnxruntime",
    "numpy",
    "uvicorn",
    "uvloop",
    "httptools",
    "fastapi",
    "orjson",
    "grpcio",
    "protobuf",
)


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is measured / reference; `met` is None where there is no bar."""

    figure: str
    measured: str
    reference: str
    ratio: float | None = None
    bar: str = ""
    met: bool | None = None


def at_least(figure: str, unit: str, measured: float, reference: float, name: str, bar: float | None) -> Row:
    """`measured` is to be at least `bar` times `reference`, which is called `name`."""
    ratio = measured / reference
    return Row(
        figure,
        f"{measured:,.0f} {unit}",
        f"{name} {reference:,.0f} {unit}",
        ratio,
        "" if bar is None else f">= {bar:g} x",
        None if bar is None else ratio >= bar,
    )


def at_most(figure: str, unit: str, measured: float, limit: float, how: str, digits: int = 0) -> Row:
    """`measured` is to be at most `limit`, which `how` explains."""
    return Row(
        figure,
        f"{measured:,.{digits}f} {unit}",
        how,
        measured / limit,
        f"<= {limit:,.{digits}f} {unit}",
        measured <= limit,
    )


def of_median(values: Sequence[float]) -> float:
    return float(median(values))


def format_table(sections: Mapping[str, Sequence[Row]]) -> str:
    """All rows under one heading, sections divided by a line with their name."""
    header = ("figure", "measured", "against", "ratio", "bar", "met")
    lines: list[tuple[str, ...] | str] = [header]
    for section, rows in sections.items():
        lines.append(section)
        for row in rows:
            met = {None: "", True: "yes", False: "NO"}[row.met]
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            lines.append((row.figure, row.measured, row.reference, ratio, row.bar, met))
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(header))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = []
    for line in lines:
        if isinstance(line, str):
            text += [rule, line]
        else:
            aligned = [
                cell.ljust(width) if column in (0, 2, 4) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(aligned).rstrip())
    return "\n".join(text)


def describe_machine() -> dict[str, Any]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
        "load_average_before": list(psutil.getloadavg()),
    }


def write_json(
    path: Path, machine: Mapping[str, Any], sections: Mapping[str, Sequence[Row]], samples: Mapping[str, Any]
) -> None:
    content = {
        **machine,
        "table": {section: [asdict(row) for row in rows] for section, rows in sections.items()},
        "samples": samples,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
