"""Every row of the protocol's error table has a test, on every protocol that it applies to."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from pathlib import Path

import pytest

ROWS = range(1, 71)
#: What has no meaning in the other protocol.
HTTP_ONLY = {8, 9, 10, 30, 31, 32, 33, 39, 40, 41, 59}
GRPC_ONLY = {35, 36}


def marked_tests():
    """Yields each test function of this folder that names rows: its name, the rows, the protocols it runs on."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.protocol.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or not name.startswith("test_"):
                continue
            rows = set()
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "row":
                    rows |= set(mark.args)
                elif mark.name == "parametrize":
                    for case in mark.args[1]:
                        rows |= {row for m in getattr(case, "marks", ()) if m.name == "row" for row in m.args}
            if rows:
                parameters = set(inspect.signature(function).parameters)
                both = {"http", "grpc"} if "client" in parameters else set()
                alone = {fixture for fixture in ("http", "grpc") if fixture in parameters}
                yield f"{path.stem}.{name}", rows, both | alone or {"http", "grpc"}


@pytest.fixture(scope="module")
def coverage():
    covered = defaultdict(lambda: defaultdict(list))
    for name, rows, protocols in marked_tests():
        for row in rows:
            for protocol in protocols:
                covered[row][protocol].append(name)
    return covered


@pytest.mark.parametrize("row", ROWS)
def test_row_is_covered(coverage, row):
    if row not in GRPC_ONLY:
        assert coverage[row]["http"], f"no test covers row {row} over HTTP"
    if row not in HTTP_ONLY:
        assert coverage[row]["grpc"], f"no test covers row {row} over gRPC"


def test_no_row_is_made_up(coverage):
    assert set(coverage) <= set(ROWS)
