"""Engines of one artifact share its code: whoever goes first leaves the others running. Each case runs in a process of
its own, since what it is about would be a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import compile_to, load, small_network

ROOT = Path(__file__).parents[3]

PROGRAM = """
import gc, sys
from pathlib import Path
import numpy as np
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import load

folder, run_before, goes = Path(sys.argv[1]), sys.argv[2] == "run", int(sys.argv[3])
keeps_instance = sys.argv[4] == "keep"
runtime = TvmRuntime.load(1)
engines = [load(folder, runtime), load(folder, runtime)]
instances = [engine.instantiate() for engine in engines]
x = {"x": np.ones((1, 3, 12, 12), np.float32)}
if run_before:
    for instance in instances:
        instance.run(x, ["y"])
engines[goes].close()
if not keeps_instance:
    instances[goes] = None
gc.collect()
again = load(folder, runtime)
answers = [one.run(x, ["y"])[0] for one in (*filter(None, instances), again.instantiate())]
again.close()
del again
gc.collect()
answers.append(instances[1 - goes].run(x, ["y"])[0])
assert all(np.array_equal(answers[0], answer) for answer in answers)
print("ran")
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    return compile_to(folder / "artifact", small_network(folder / "model.onnx"))


@pytest.mark.parametrize("before", ["run", "idle"])
@pytest.mark.parametrize("goes", ["0", "1"])
@pytest.mark.parametrize("instance", ["keep", "drop"])
def test_the_others_go_on_running(network: Path, before: str, goes: str, instance: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(network), before, goes, instance]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ran\n"), ran.stderr


def test_a_file_is_loaded_once_and_goes_with_its_last_user(network: Path) -> None:
    runtime = TvmRuntime.load(num_threads=1)
    first, second = load(network, runtime), load(network, runtime)
    num_loaded = len(runtime.libraries)
    assert num_loaded >= 1
    first.close()
    assert len(runtime.libraries) == num_loaded
    instance = second.instantiate()
    second.close()
    assert len(runtime.libraries) == num_loaded, "an instance runs the code still"
    del instance
    assert len(runtime.libraries) == 0
