"""What was done, a JSON object a line: who is taken along by a kernel leaves what it had found, and what it was at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: A line that says what is about to be run, and one that says that it took its process along.
TRYING, CRASHED = "trying", "crashed"


class Journal:
    """One writer at a time. Every line is whole, or the last one, which was being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, name: str, **told: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "name": name, **told}) + "\n")

    def entries(self, *kinds: str) -> Iterator[dict[str, Any]]:
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                entry: dict[str, Any] = json.loads(line)
            except ValueError:
                continue  # broken off
            if not kinds or entry["kind"] in kinds:
                yield entry

    def by_name(self, kind: str) -> dict[str, dict[str, Any]]:
        """The last line of each name."""
        return {entry["name"]: entry for entry in self.entries(kind)}

    def last(self) -> dict[str, Any] | None:
        found = None
        for found in self.entries():  # noqa: B007
            pass
        return found

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0
