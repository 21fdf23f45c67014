"""No input of a model ends the process that runs it on the baseline, whatever its operators make of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest


@pytest.mark.timeout(300)
def test_every_operator_answers_or_refuses(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.process.hostile_inputs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, f"ended with {ended.returncode} at {lines[-1:]}: {ended.stderr[-2000:]}"
    ends = Counter(line.rpartition(": ")[2] for line in lines)
    # Most must get as far as running, or nothing was tried.
    assert ends["answered"] > 150, ends
    assert ends["refused"] > 150, ends
    assert ends["not loaded"] < 40, [line for line in lines if line.endswith("not loaded")]
