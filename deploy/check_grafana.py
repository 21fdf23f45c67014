"""Checks the dashboards against Grafana's own model of them, without Grafana (which was not run).

grafana-foundation-sdk is generated from Grafana's schemas. A dashboard is read into its classes, with the options that
each kind of panel and of query knows, and written again: what the model does not know, by name or by value, does not
come back, and is told of. Then what Grafana wants beside its schemas: unique ids, panels that do not overlap.

Needs what `make deploy-tools` installs:  .venv-deploy/bin/python deploy/check_grafana.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARDS = Path(__file__).resolve().parent / "grafana" / "dashboards"
COLUMNS = 24


def lost(written: Any, known: Any, where: str) -> Iterator[str]:
    """What of `written` is not in `known`. Both are JSON; `known` may have defaults beside it."""
    if isinstance(written, dict) and isinstance(known, dict):
        for key, value in written.items():
            if key in known:
                yield from lost(value, known[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: Grafana's model has no such field here"
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        for index, (one, other) in enumerate(zip(written, known, strict=True)):
            yield from lost(one, other, f"{where}[{index}]")
    elif written != known:
        yield f"{where}: {written!r} becomes {known!r} in Grafana's model"


def misplaced(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Ids that are used twice, and panels that overlap or stand outside the grid."""
    seen: set[int] = set()
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        title, place = panel["title"], panel["gridPos"]
        if panel["id"] in seen:
            yield f"{title}: id {panel['id']} is another panel's"
        seen.add(panel["id"])
        if place["x"] + place["w"] > COLUMNS:
            yield f"{title}: reaches beyond column {COLUMNS}"
        cells = [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        overlapped = {taken[cell] for cell in cells if cell in taken}
        if overlapped:
            yield f"{title}: overlaps {', '.join(sorted(overlapped))}"
        taken.update(dict.fromkeys(cells, title))


def faults(path: Path) -> Iterator[str]:
    written = json.loads(path.read_text(encoding="utf-8"))
    try:
        model = Dashboard.from_json(written)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        yield f"{path.name}: Grafana's model cannot read it: {problem!r}"
        return
    yield from lost(written, json.loads(json.dumps(model, cls=JSONEncoder)), path.name)
    yield from misplaced(written["panels"])


def main() -> None:
    register_default_plugins()
    paths = sorted(DASHBOARDS.glob("*.json"))
    found = [fault for path in paths for fault in faults(path)]
    for fault in found:
        print(fault, file=sys.stderr)
    if found or not paths:
        sys.exit(f"{len(found)} faults in {len(paths)} dashboards of {DASHBOARDS}")
    print(
        f"{len(paths)} dashboard is as Grafana's model wants it" if len(paths) == 1 else f"{len(paths)} dashboards are"
    )


if __name__ == "__main__":
    main()
