"""The kernel map that a GPU's artifact keeps, made by the whole compile step on a fake device; and how people see it on
a machine that has no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from hone.compiler.choices import Choices
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda.pipeline import cuda_paddings, cuda_workloads
from hone.compiler.onnx_import import import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.dashboard.kernel_map import read_map
from hone.kernels import KernelsCache
from hone.repository import ModelRepository
from hone.specialization import Signature
from hone.tuning.gpu_schedules import GpuScheduleSearch
from hone.tuning.profiler import Profiler, Skipped
from tests.cutlass import test_gpu_tuning
from tests.cutlass.test_gpu_tuning import FAST, Job, cache, model  # noqa: F401 (fixtures)
from tests.fake_gpu import TARGET, Sharing
from tests.unit.engines.tvm_artifacts import save_model


def map_of(job):
    return job.cache.get("artifacts", job.digest, job.device.digest).manifest["kernel_map"]


def rankings_of(job):
    """What was measured of each workload, by its text."""
    found = {}
    for workload in job.workloads():
        found[str(workload)] = job.compile_step._search.ranking(workload)
    return found


def test_kernels_are_told_with_what_the_search_measured(model, cache):  # noqa: F811
    job = Job(model, cache, {"model_ns": FAST, "default_ns": 9_000.0})
    assert job.run()["outcome"] == "passed"
    lines = map_of(job)
    kernels = {line["what"]: line for line in lines if line["template"]}
    rankings = rankings_of(job)
    assert set(kernels) == set(rankings) == {"matmul 16x64 x 64x64 +add+relu", "matmul 16x64 x 64x64 +add"}
    for what, line in kernels.items():
        best = rankings[what]["ranking"][0]
        assert (line["template"], line["parameters"]) == (best["template"], best["parameters"])
        assert line["template"].startswith("cutlass.")
        assert {"slices", "swizzle"} <= line["parameters"].keys()
        assert (line["num_calls"], line["call_ns"], line["note"]) == (1, best["ns"], "")
        assert line["call_ns"] == pytest.approx(9_000.0, rel=0.1)
        assert 0 < line["limit_ns"] < line["call_ns"]
        # By what the maker states: the weight, data and output come from memory once each, at least.
        assert line["limit_ns"] >= 4 * (64 * 64 + 2 * 16 * 64) / job.parts.target.memory_gbps
    functions = [line for line in lines if not line["template"]]
    assert functions
    assert all(line["rule"] and line["num_calls"] for line in functions)


def test_another_candidate_wins_and_the_map_follows(model, cache, twin_cache, tmp_path):  # noqa: F811
    first = Job(model, cache, {"model_ns": FAST})
    first.run()
    some = list(dict.fromkeys(first.parts.kernels.ran))[3]
    first.table["kernels"] = {some: 3_000.0}
    again = Job(model, Sharing(KernelsCache(tmp_path / "again"), twin_cache), first.table)
    again.run()
    lines = [line for line in map_of(again) if line["template"]]
    told = {
        f"{one['template']}({', '.join(f'{n}={v}' for n, v in sorted(one['parameters'].items()))})" for one in lines
    }
    assert told == {some}
    assert [line["call_ns"] for line in lines] == [pytest.approx(3_000.0, rel=0.1)] * 2


def test_what_was_not_measured_has_no_time(model, cache, monkeypatch):  # noqa: F811
    job = Job(model, cache, {"model_ns": FAST})
    monkeypatch.setattr(Profiler, "num_sets", lambda self, set_bytes: Skipped("its operands do not fit"))
    assert job.run()["outcome"] == "passed"
    kernels = [line for line in map_of(job) if line["template"]]
    assert kernels
    assert {(line["call_ns"], line["limit_ns"]) for line in kernels} == {(None, None)}


def test_functions_have_the_time_of_their_search(model, cache, monkeypatch):  # noqa: F811
    for name, value in (("max_function_seconds", 2.0), ("min_function_seconds", 0.1), ("min_microseconds", 0.0)):
        monkeypatch.setattr(GpuScheduleSearch, name, value)
    job = Job(model, cache, {"model_ns": FAST, "plain_function_ns": 500_000.0, "function_ns": 90_000.0})
    assert job.run()["outcome"] == "passed"
    (line,) = [line for line in map_of(job) if not line["template"]]
    # A twin's functions keep the plain schedule; `tests/unit/tuning/test_schedules.py` has the other.
    assert line["call_ns"] == pytest.approx(500_000.0, rel=0.1)


@pytest.fixture
def odd(tmp_path):
    """Two products, of which the first one's depth is no multiple of eight: padded, and one kernel for both."""
    rng = np.random.default_rng(0)
    weights = {"w0": rng.standard_normal((63, 64)) / 8, "w1": rng.standard_normal((64, 32)) / 8}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    nodes = [
        ("MatMul", ["x", "w0"], ["m0"], {}),
        ("Relu", ["m0"], ["r0"], {}),
        ("MatMul", ["r0", "w1"], ["s0"], {}),
        *[("Sin", [f"s{i}"], [f"s{i + 1}" if i < 59 else "y"], {}) for i in range(60)],
    ]
    shapes = {"x": ("float32", [16, 63])}
    return save_model(tmp_path / "odd.onnx", nodes, shapes, {"y": ("float32", [16, 32])}, weights)


def test_padding_and_pairs_are_told(odd, cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(test_gpu_tuning, "SIGNATURE", Signature.of([("x", "FP32", (16, 63))]))
    imported, half = import_model(odd, {}), Choices(precision=Precision("f16"))
    (padding,) = cuda_paddings(imported, TARGET, half)
    (pair,) = cuda_workloads(imported, TARGET, half).pairs
    # What only the padded operator has, and then the pair, are the fastest.
    fast = [
        takers(workload, TARGET, CUTLASS_TEMPLATES)[0].candidates(workload, TARGET)[0]
        for workload in (padding.padded, pair.fused)
    ]
    table = {"model_ns": FAST / 4, "default_ns": 9_000.0, "kernels": {str(candidate): 3_000.0 for candidate in fast}}
    job = Job(odd, cache, table, precision="f16")
    outcome = job.run()
    assert outcome["outcome"] == "passed", outcome
    (line,) = [line for line in map_of(job) if line["template"]]
    assert line["what"].startswith("matmul_matmul 16x64 x ")
    assert line["template"] == "cutlass.persistent"
    assert line["note"].startswith("two operators in one kernel: the first +relu, then ")
    assert line["note"].endswith("padded from matmul 16x63 x 63x64")
    assert line["call_ns"] == pytest.approx(3_000.0, rel=0.1)


# --- how people see it


CONFIG = """
max_batch_size: 0
instance_group {{ kind: {kind} }}
optimization {{ execution_accelerators {{
  gpu_execution_accelerator {{ name: "tvm" parameters {{ key: "precision" value: "tf32" }} }}
}} }}
"""


@pytest.fixture
def tuned(model, tmp_path, twin_cache):  # noqa: F811
    """A repository with a model, and a cache that keeps what a GPU made of it: folder, and the job that did."""
    folder = tmp_path / "repository" / "m" / "1"
    folder.mkdir(parents=True)
    shutil.copy(model, folder / "model.onnx")
    configure(tmp_path, "KIND_CPU")
    repository = ModelRepository([tmp_path / "repository"])
    job = Job(model, Sharing(KernelsCache(tmp_path / "cache"), twin_cache), {"model_ns": FAST, "default_ns": 9_000.0})
    job.graph = repository.read("m").version_fingerprints[1]
    repository.close()
    assert job.run()["outcome"] == "passed"
    return tmp_path, job


def configure(folder, kind):
    (folder / "repository" / "m" / "config.pbtxt").write_text(CONFIG.format(kind=kind))


def explain(folder, *arguments):
    command = [sys.executable, "-m", "hone", "explain", "m", "--model-repository", str(folder / "repository")]
    command += ["--kernels-cache", str(folder / "cache"), "--batch", "16", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_explain_shows_what_a_gpu_did_on_a_machine_without_one(tuned):
    folder, job = tuned
    configure(folder, "KIND_GPU")
    ran = explain(folder, "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["signature"], told["bucket"]) == ("x:FP32[16,64]", None)
    assert "tuned" not in told, "nothing was profiled"
    (one,) = told["gpus"]
    assert (one["artifact"], one["device"], one["precision"]) == (job.digest, job.device.name, "tf32")
    assert (one["serves"], one["current"], one["plain"]) == (False, True, False)
    assert sum(group["microseconds"] or 0.0 for group in one["groups"]) == pytest.approx(18.0, rel=0.1)
    ran = explain(folder)
    assert ran.returncode == 0, ran.stderr
    text = " ".join(ran.stdout.split())
    assert "it is kept, and does not serve here" in text
    assert "Times below are those of the search" in text
    assert "matmul 16x64 x 64x64 +add+relu" in text
    assert "cutlass." in text
    # The server shows the same of what it serves, at once.
    shown = read_map(folder / "cache", job.digest)
    assert shown["groups"] == one["groups"]
    assert (shown["gpu"], shown["device"]) == (True, job.device.name)


def test_explain_tells_both_where_both_are_asked_for_and_refuses_what_is_not_there(tuned):
    folder, job = tuned
    ran = explain(folder, "--json", "--rounds", "1")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [one["artifact"] for one in told["gpus"]] == [job.digest]
    assert told["tuned"]["groups"]
    ran = explain(folder, "--device", "gpu", "--trace", str(folder / "trace.json"))
    assert ran.returncode == 1
    assert "--trace" in ran.stderr
    ran = explain(folder, "--device", "gpu", "--kernels-cache", str(folder / "empty"))
    assert ran.returncode == 1
    assert "keeps no module for a GPU at x:FP32[16,64]" in ran.stderr
    assert "Traceback" not in ran.stderr
