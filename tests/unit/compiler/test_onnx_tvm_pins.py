"""The pinned TVM and tvm-ffi belong together: with a wrong pair, generating a design space crashes the process."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PROGRAM = """
from tvm import te

from hone.compiler.metaschedule import Proposals
from hone.compiler.target import CpuTarget

a, b = (te.placeholder((64, 64), name=name) for name in "ab")
k = te.reduce_axis((0, 64), "k")
c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
proposals = Proposals(te.create_prim_func([a, b, c]), CpuTarget.detect(num_threads=2), 0)
print("designs:", len(proposals.propose()))
"""


@pytest.mark.timeout(240)
def test_a_design_space_can_be_generated():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = re.search(r"designs: (\d+)", ran.stdout)
    assert found
    assert int(found.group(1)) > 0


@pytest.mark.parametrize("package", ["apache-tvm", "apache-tvm-ffi"])
def test_the_pair_is_pinned(package):
    requirements = Path("requirements/runtime.in").read_text(encoding="utf-8")
    assert f"{package}=={version(package)}" in requirements
