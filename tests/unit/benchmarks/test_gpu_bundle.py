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

from benchmarks.gpu import bundle, nets, reference, table
from benchmarks.gpu.families import family_rows
from benchmarks.gpu.rows import all_rows, small_rows
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.kernels import Entry, KernelsCache, Miss, MissReason

ROOT = Path(__file__).parents[3]
DTYPES = ("float16", "bfloat16", "float32", "int8")


#: Of the families, those whose data goes a way of its own: bits, integers, weights in another order, a mask.
CHECKED = (
    "gemm2x bf16 bias+leakyrelu",
    "gemm2x s8 to f32 scaled+bias",
    "conv2x s8 to s32",
    "depthwise f16 3x3 stride 1 bias+relu6",
    "attention f32 masked",
    "persistent bf16 products in registers",
)


def make(out, *arguments):
    """A small bundle: twins come out of the cache that tests keep, or are built into it once."""
    folder = ROOT / ".cutlass-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    bundle.main([str(out), "--small", "--kernels-cache", str(folder), *arguments])
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    tables = ("B1", "B2", "B3", "B4", "B6")
    return make(tmp_path_factory.mktemp("out"), "--arch", "80", "--match", *tables, *CHECKED)


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


def test_every_family_and_every_dtype_is_compared_with_float64():
    rows = bundle.rows_for(CudaTarget.preset("h200"), ["B0"])
    assert [row.name for row in rows] == [row.name for row in family_rows()], "Hopper has them all"
    assert {row.template for row in rows} == {template.name for template in CUTLASS_TEMPLATES}
    found = {(row.template.removeprefix("cutlass."), row.workload.inputs[0].dtype) for row in rows}
    products = {(name, dtype) for name in ("gemm2x", "gemm3x", "conv2x", "conv3x") for dtype in DTYPES}
    assert found >= products | {("attention", dtype) for dtype in DTYPES[:3]}
    kernels = [kernel for row in rows for kernel in bundle.candidates_of(row, CudaTarget.preset("h200"), 8)]
    assert len(kernels) == len(rows), "one a row"
    older = bundle.rows_for(CudaTarget.preset("a100"), ["B0"])
    assert {row.name for row in rows} - {row.name for row in older} == {
        row.name for row in rows if row.template in ("cutlass.gemm3x", "cutlass.conv3x")
    }


def test_the_whole_way_on_twins(made, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(made, there)
    ran = run(there, "60")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((there / "bundle" / "results.json").read_text())["rows"]
    assert set(results) == {row.name for row in small_rows()} | set(CHECKED)
    assert all(row["num_kernels"] == 1 and row["error"] <= row["allowed"] for row in results.values())
    assert results["conv2x s8 to s32"]["allowed"] == 0.0
    for told in ("two kernels", "unpadded", "times mean nothing"):
        assert told in ran.stdout


@pytest.mark.kernels
def test_twins_of_all_families_are_right(tmp_path):
    ran = run(make(tmp_path / "out", "--arch", "90a", "--match", "B0"), "100")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((tmp_path / "out" / "bundle" / "results.json").read_text())["rows"]
    assert set(results) == {row.name for row in family_rows(small=True)}


def unpacked(made, there):
    """The bundle as run.sh leaves it, and what it tells, to be changed."""
    shutil.copytree(made, there)
    subprocess.run(["tar", "-xzf", there / "bundle.part00", "-C", there], check=True)
    shutil.copy(there / "SHA256SUMS", there / "bundle" / ".sums")
    told = json.loads((there / "bundle" / "bundle.json").read_text())
    return there / "bundle", told


def test_a_wrong_kernel_is_told(made, tmp_path):
    folder, told = unpacked(made, tmp_path / "there")
    told["rows"] = [row for row in told["rows"] if row["table"] in ("B3", "B1")]
    told["rows"][-1]["epilogue"].pop()  # not what the kernel computes
    (folder / "bundle.json").write_text(json.dumps(told))
    ran = run(folder.parent, "60")
    assert ran.returncode == 1
    assert "WRONG: gemm 32x16x24 bias+gelu" in ran.stderr


ABORTS = "void __tvm_ffi_hone_kernel_{digest}(void) {{ __builtin_trap(); }}"


def test_a_kernel_that_takes_its_process_along_is_told_and_the_others_go_on(made, tmp_path):
    folder, told = unpacked(made, tmp_path / "there")
    told["rows"] = [row for row in told["rows"] if row["table"] in ("B1", "B2", "B3")]
    (kernel,) = told["rows"][0]["kernels"]
    (folder / "bundle.json").write_text(json.dumps(told))
    library = folder / "kernels" / f"{kernel['digest']}.so"
    source = ABORTS.format(digest=kernel["digest"])
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    ran = run(folder.parent, "60")
    assert ran.returncode == 1
    name = told["rows"][0]["name"]
    assert f"CRASHED: {name}: {kernel['candidate']}: its process was ended by signal" in ran.stderr
    results = json.loads((folder / "results.json").read_text())["rows"]
    assert {name: bool(row["num_kernels"]) for name, row in results.items()} == {
        row["name"]: row["name"] != name for row in told["rows"]
    }


def test_without_time_rows_are_left_out_and_told(made, tmp_path):
    folder, told = unpacked(made, tmp_path / "there")
    ran = run(folder.parent, "0")
    assert "left out, since the time was up" in ran.stdout
    assert told["rows"][0]["name"] in ran.stdout


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
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(5000))
    parts = bundle.pack(folder, tmp_path, "noise")
    assert len(parts) > 4
    assert all(path.stat().st_size <= 1000 for path in parts)


def test_the_cache_is_named_by_where_kernels_are(tmp_path, capsys):
    bundle.plan(small_rows(), CudaTarget.preset("a100").as_twin(), 1, KernelsCache(tmp_path / "cache"))
    assert "0 kernels are there" in capsys.readouterr().out


def test_geometric_means_and_errors():
    assert table.geometric([0.5, 2.0]) == pytest.approx(1.0)
    assert reference.error_of(np.array([1.0, np.nan]), np.ones(2)) == float("inf")
    assert reference.error_of(np.array([1.1, 1.0]), np.ones(2)) == pytest.approx(0.1)


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
        bundle.add_model(tmp_path, "vgg17:1", target, KernelsCache(tmp_path))


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


def test_a_model_comes_along_with_its_artifact_and_what_pytorch_needs(tmp_path):
    file = ROOT / "model_repo" / "digits" / "1" / "model.onnx"
    out = make(tmp_path / "out", "--arch", "80", "--match", "B1", "--models", f"digits={file}:2")
    folder, told = unpacked(out, tmp_path / "there")
    (model,) = told["models"]
    assert model == {"name": "digits", "batch": 2, "inputs": {"image": [[2, 1, 8, 8], "float32"]}, "ranges": {}}
    place = folder / "models" / "digits"
    manifest = json.loads((place / "2" / "manifest.json").read_text())
    assert manifest["kernels"]
    assert {f"{digest}.so" for digest in manifest["kernels"]} <= {path.name for path in (folder / "kernels").iterdir()}
    nodes = json.loads((place / "nodes.json").read_text())
    assert {node["op"] for node in nodes["nodes"]} >= {"Conv", "Relu"}
    assert (place / "model.onnx").read_bytes() == file.read_bytes()


def test_without_building_what_the_cache_has_not_is_left_out_and_told(tmp_path, capsys):
    cache = str(tmp_path / "cache")
    bundle.main([str(tmp_path / "out"), "--small", "--match", "B1", "--no-build", "--kernels-cache", cache])
    assert "of gemm 32x16x24: the cache has it not" in capsys.readouterr().err
    folder, told = unpacked(tmp_path / "out", tmp_path / "there")
    assert [row["kernels"] for row in told["rows"]] == [[]]
    ran = run(folder.parent, "60")
    assert (ran.returncode, "no kernel ran" in ran.stdout) == (0, True)
    digits = ROOT / "model_repo" / "digits" / "1" / "model.onnx"
    told = ["--small", "--match", "none", "--no-build", "--kernels-cache", cache, "--models", f"digits={digits}:2"]
    with pytest.raises(SystemExit, match=r"digits, batch 2: the cache has (\d+) of \1 kernels not"):
        bundle.main([str(tmp_path / "out"), *told])


def test_where_a_stage_cannot_start_it_says_why(made, tmp_path):
    folder, told = unpacked(made, tmp_path / "there")
    (folder / "bundle.json").write_text(json.dumps({**told, "twin": False}))
    ran = run(folder.parent, "60")
    assert ran.returncode == 1
    assert "FAILED: stage rows: its process exited with 1 before it did anything" in ran.stderr
    assert f"not measured: {told['rows'][0]['name']}; " in ran.stdout
    assert "the time was up" not in ran.stdout
