"""A fixed sample of ONNX's operator cases passes hone's pipeline and engine as recorded: coverage can only grow.

After an improvement, `python -m benchmarks.onnx_coverage --record` writes the record anew.
"""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.onnx_coverage import SAMPLE, TABLE, Worker
from benchmarks.onnx_coverage_table import render


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


#: Of the operator cases that ONNX Runtime runs, those that import, compile and match. One less than what TVM's own
#: pipeline came to: of a nearest pixel that two are equally far from, code with fused multiplications takes the other.
LEAST_MATCHING = 1498
RECORD = json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", RECORD)
def test_case(case, worker):
    outcome = worker.examine(case, ())
    reached = {"stage": outcome.stage, "blamed": outcome.blamed, "constants": outcome.constants}
    assert reached == RECORD[case], outcome.reason


def test_the_sample_is_large_and_mostly_well():
    assert len(RECORD) >= 128
    assert sum(expected["stage"] == "ok" for expected in RECORD.values()) >= 121


def test_the_table_counts_what_it_is_given(worker):
    outcomes = [worker.examine(case, ("Relu",)) for case in ("test_relu", "test_nonzero_example")]
    text = render(outcomes)
    assert "**1 of 2 (50%) import, compile and match.**" in text
    assert "| Relu | 1 | 1 | 1 | 1 |  |" in text
    assert "import: the shape of what NonZero gives depends on values" in text


def test_the_table_of_all_cases_tells_of_no_fewer_than_before():
    """Raised with every improvement: `make onnx-coverage` must not write less into docs/."""
    told = re.search(r"\*\*(\d+) of (\d+) \(\d+%\) import, compile and match\.\*\*", TABLE.read_text(encoding="utf-8"))
    assert told is not None
    assert int(told[1]) >= LEAST_MATCHING
    assert int(told[2]) >= int(told[1])
