"""Writes docs/architecture.svg: `python -m docs.generate.architecture >docs/architecture.svg`.

The parts of the package and who imports whom, as the sources say it. A part stands above all that it imports, so every
arrow points down; a cycle would have no picture, and ends this with an error. A test keeps the file current.
"""

from __future__ import annotations

import ast
import html
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "server" / "hone"

#: What a part is for, in a few words; the first words of its own docstring are not always short enough for a box.
PURPOSES = {
    "cli": "commands",
    "app": "builds, starts, stops",
    "frontends": "HTTP and gRPC",
    "dashboard": "the page",
    "tuning": "in the background",
    "compiler": "TVM and templates",
    "serving": "the request path",
    "engines": "what can run",
    "repository": "models on disk",
    "kernels": "the cache",
    "metrics": "for Prometheus",
    "tracing": "for OpenTelemetry",
    "logs": "lines of events",
}
#: Small modules that nearly everything uses: one box, as their arrows would cover the others.
FOUNDATION = frozenset({"config", "errors", "protos", "specialization", "strings", "types"})
GROUND = "foundation"

BOX_WIDTH, BOX_HEIGHT, GAP, ROW_HEIGHT, MARGIN = 150, 52, 26, 108, 24


@dataclass(frozen=True, slots=True)
class Box:
    part: str
    x: float
    y: float

    @property
    def center(self) -> float:
        return self.x + BOX_WIDTH / 2


def part_of(module: str) -> str:
    """`serving` for `hone.serving.slot`; empty for what is not of the package, and for the package itself."""
    pieces = module.split(".")
    if pieces[0] != "hone" or len(pieces) == 1 or pieces[1] == "__version__":
        return ""
    return GROUND if pieces[1] in FOUNDATION else pieces[1]


def imported(source: str) -> Iterable[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "hone":
            yield from (f"hone.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def read_imports(package: Path) -> dict[str, dict[str, int]]:
    """Part -> part that it imports -> modules that do so."""
    counts: dict[str, dict[str, int]] = {}
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        part = part_of(f"hone.{relative.parts[0].removesuffix('.py')}")
        if part in ("__init__", "__main__"):
            continue
        uses = counts.setdefault(part, {})
        for other in {part_of(module) for module in imported(path.read_text(encoding="utf-8"))} - {"", part}:
            uses[other] = uses.get(other, 0) + 1
    return counts


def heights(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Part -> the longest way down from it, in arrows. Raises ValueError for imports in a circle."""
    found: dict[str, int] = {}

    def height(part: str, above: tuple[str, ...]) -> int:
        if part in above:
            raise ValueError(f"imports in a circle: {' -> '.join((*above, part))}")
        if part not in found:
            found[part] = max((1 + height(other, (*above, part)) for other in counts.get(part, ())), default=0)
        return found[part]

    for part in counts:
        height(part, ())
    return found


def necessary(counts: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Imports that do not also go by way of a third part; the others would be lines on top of lines."""

    def reaches(part: str, goal: str) -> bool:
        return part == goal or any(reaches(other, goal) for other in counts.get(part, ()))

    return [
        (part, other)
        for part, uses in counts.items()
        for other in uses
        if not any(third != other and reaches(third, other) for third in uses)
    ]


def place(counts: Mapping[str, Mapping[str, int]]) -> tuple[list[Box], float, float]:
    """Boxes, and the picture's width and height. Within a row a part stands near the middle of those that use it."""
    levels = heights(counts)
    rows = [
        sorted(part for part, level in levels.items() if level == row) for row in range(max(levels.values()), -1, -1)
    ]
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN
    boxes: dict[str, Box] = {}
    for index, row in enumerate(rows):
        users = {part: [boxes[user].center for user in boxes if part in counts.get(user, ())] for part in row}
        row.sort(key=lambda part: (sum(users[part]) / len(users[part]) if users[part] else width / 2, part))
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        for column, part in enumerate(row):
            boxes[part] = Box(part, left + column * (BOX_WIDTH + GAP), MARGIN + index * ROW_HEIGHT)
    return list(boxes.values()), width, MARGIN * 2 + len(rows) * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT)


def arrow(upper: Box, lower: Box) -> str:
    x1, y1, x2, y2 = upper.center, upper.y + BOX_HEIGHT, lower.center, lower.y - 5
    middle = (y1 + y2) / 2
    return f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"/>'


def box(one: Box) -> list[str]:
    purpose = PURPOSES.get(one.part, ", ".join(sorted(FOUNDATION)) if one.part == GROUND else "")
    extra = 2 * BOX_WIDTH if one.part == GROUND else 0  # it names its modules
    return [
        f'<rect x="{one.x - extra / 2:.0f}" y="{one.y:.0f}" width="{BOX_WIDTH + extra}" height="{BOX_HEIGHT}" rx="8"/>',
        f'<text class="name" x="{one.center:.0f}" y="{one.y + 22:.0f}">{html.escape(one.part)}</text>',
        f'<text x="{one.center:.0f}" y="{one.y + 40:.0f}">{html.escape(purpose)}</text>',
    ]


def picture(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The whole file."""
    boxes, width, height = place(counts)
    by_part = {one.part: one for one in boxes}
    arrows = sorted(necessary(counts))
    spoken = "; ".join(f"{upper} imports {lower}" for upper, lower in arrows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}" role="img" aria-labelledby="title description">',
        '<title id="title">Parts of hone and who imports whom</title>',
        f'<desc id="description">{html.escape(spoken)}.</desc>',
        "<style>",
        "text { font: 12px system-ui, sans-serif; text-anchor: middle; fill: #44505c }",
        ".name { font-size: 15px; font-weight: 600; fill: #16202a }",
        ".boxes rect { fill: #eef3f8; stroke: #6b7f93; stroke-width: 1.2 }",
        ".arrows path { fill: none; stroke: #6b7f93; stroke-width: 1.4; marker-end: url(#head) }",
        "</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#6b7f93"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#ffffff"/>',
        '<g class="arrows">',
        *(arrow(by_part[upper], by_part[lower]) for upper, lower in arrows),
        "</g>",
        '<g class="boxes">',
        *(line for one in boxes for line in box(one)),
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(picture(read_imports(PACKAGE)))
