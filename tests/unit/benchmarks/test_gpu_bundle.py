"""What is brought to a machine with a GPU: its rows, its parts, and the whole way on host twins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.gpu import bundle, device, nets
from benchmarks.gpu.rows import all_rows, small_rows
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.kernels import Entry, KernelsCache, Miss, MissReason

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The small bundle: twins come out of the cache that tests keep, or are built into it once."""
    folder = ROOT / ".cutlass-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    out = tmp_path_factory.mktemp("out")
    bundle.main([str(out), "--small", "--arch", "80", "--kernels-cache", str(folder)])
    return out


def run(folder, *arguments, python=sys.executable):
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHON": python},
    )


def test_every_row_has_kernels_and_every_part_is_a_row():
    rows = all_rows()
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    target = CudaTarget.preset("h200")
    for row in rows:
        assert list(bundle.candidates_of(row, target, 2)), row.name
        assert set(row.parts) <= set(names), row.name
    assert {row.table for row in rows} == {"B1", "B2", "B3", "B4", "B5", "B6"}


def test_the_whole_way_on_twins(made, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(made, there)
    ran = run(there, "60")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((there / "bundle" / "results.json").read_text())["rows"]
    assert set(results) == {row.name for row in small_rows()}
    assert all(row["num_kernels"] == 1 and row["error"] < 1e-2 for row in results.values())
    for told in ("two kernels", "unpadded", "times mean nothing"):
        assert told in ran.stdout


def test_a_wrong_kernel_is_told(made, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(made, there)
    run(there, "60")
    path = there / "bundle" / "bundle.json"
    told = json.loads(path.read_text())
    told["rows"] = [row for row in told["rows"] if row["table"] in ("B3", "B1")]
    told["rows"][-1]["steps"] = ["bias"]  # not what the kernel computes
    path.write_text(json.dumps(told))
    ran = run(there, "60")
    assert ran.returncode == 1
    assert "WRONG: gemm 32x16x24 bias+gelu" in ran.stderr


def test_a_damaged_part_is_told(made, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(made, there)
    with (there / "bundle.part00").open("r+b") as part:
        part.write(b"damaged")
    ran = run(there)
    assert ran.returncode == 2
    assert "missing or damaged" in ran.stderr


def test_without_parts_it_says_how_to_make_them(tmp_path):
    shutil.copy(ROOT / "benchmarks" / "gpu" / "run.sh", tmp_path)
    ran = run(tmp_path)
    assert ran.returncode == 2
    assert "benchmarks.gpu.bundle" in ran.stderr


def test_parts_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "PART_BYTES", 1000)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "run.sh").write_text("")
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(5000))
    parts = [path for path in bundle.pack(folder, tmp_path) if ".part" in path.name]
    assert len(parts) > 4
    assert all(path.stat().st_size <= 1000 for path in parts)


def test_the_cache_is_named_by_where_kernels_are(tmp_path, capsys):
    bundle.plan(small_rows(), CudaTarget.preset("a100").as_twin(), 1, KernelsCache(tmp_path / "cache"))
    assert "0 kernels are there" in capsys.readouterr().out


def test_geometric_means_and_errors():
    assert device._geometric([0.5, 2.0]) == pytest.approx(1.0)
    assert device._error(np.array([1.0, np.nan]), np.ones(2)) == float("inf")
    assert device._error(np.array([1.1, 1.0]), np.ones(2)) == pytest.approx(0.1)


def test_models_take_the_best_kernels_that_are_there():
    target = CudaTarget.preset("h200")
    workload = next(row for row in all_rows() if row.table == "B1").workload
    template = takers(workload, target, CUTLASS_TEMPLATES)[0]
    candidates = template.candidates(workload, target)

    class Cache:
        def __init__(self, *places):
            self.there = {template.digest(workload, candidates[place], target) for place in places}

        def get(self, kind, digest, scope):
            found = Entry(kind, scope, digest, Path(), {}, {}, "", 0, True, 0)
            return found if digest in self.there else Miss(MissReason.ABSENT)

    assert bundle.kernels_at_hand([workload], target, Cache(3, 2)) == {workload.digest: candidates[2]}
    assert bundle.kernels_at_hand([workload], target, Cache()) == {}
    assert bundle.kernels_at_hand([workload], target, Cache(len(candidates) - 1)) == {}, "the first guess is better"


def test_a_net_that_is_not_known_is_told(tmp_path):
    target = CudaTarget.preset("h200")
    with pytest.raises(SystemExit, match=r"'vgg17' is no net of nets\.py, which has resnet50, repvgg_a0, vgg16"):
        bundle.add_model(tmp_path, "vgg17:1", target, tmp_path)


def test_vgg16_is_built_and_packs_small(tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "_SIZE", 32)
    monkeypatch.setattr(nets, "_VGG_LINEAR", (64, 64, 10))
    path = nets.write("vgg16", tmp_path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    (logits,) = session.run(None, {"image": image})
    assert logits.shape == (2, 10)
    assert 1e-3 < np.abs(logits[0] - logits[1]).max() < 1e3
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert (operators.count("Conv"), operators.count("MaxPool"), operators.count("Gemm")) == (13, 5, 3)
    assert len(zlib.compress(path.read_bytes())) < path.stat().st_size / 50
