"""`hone doctor`: what is here, what is missing, and what that costs."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from hone.cli import doctor
from hone.cli.main import main
from hone.engines.cuda_runtime import CudaRuntime
from hone.kernels import gpu_key
from hone.kernels.gpu_key import find_gpus
from tests.fake_cuda import H100, FakeCudart, FakeNvml

V100 = {**H100, "name": "Tesla V100", "capability": (7, 0)}


def gpus(*cards):
    return tuple(find_gpus(FakeNvml(), CudaRuntime(FakeCudart(cards)), environment={}))


def findings(tmp_path, *cards, problem=""):
    return {one.name: one for one in doctor.examine(tmp_path / "none", gpus(*cards), problem)}


@pytest.fixture
def installed(monkeypatch):
    """Which packages there are, in place of the environment's."""
    versions = {}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_it_tells_of_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hone.tuning.gpus.look_for_gpus", lambda: (gpus(H100), ""))
    assert main(["doctor", "--kernels-cache", str(tmp_path / "none")]) == 0
    told = capsys.readouterr().out
    assert "ok       GPU 0: NVIDIA H100 80GB HBM3, sm_90a" in told
    assert told.count("device   ") == told.count("key      ") == 2
    assert main(["doctor", "--json", "--kernels-cache", str(tmp_path / "none")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"][0]["fields"]["num_sms"] == 132
    assert told["device"]["fields"]["kind"] == "cpu"


def test_a_compiler_from_pypi_is_found(tmp_path):
    assert findings(tmp_path)["nvcc"].found
    assert findings(tmp_path)["CUTLASS"].found
    assert findings(tmp_path)["CUDA runtime"].found == "13.0"


def test_what_is_missing_for_gpus_is_told_with_what_still_works(tmp_path, monkeypatch, installed):
    monkeypatch.setattr(gpu_key, "nvcc_version", lambda: "none")
    monkeypatch.setattr(CudaRuntime, "load", classmethod(lambda cls: CudaRuntime(FakeCudart())))
    found = findings(tmp_path, problem="the driver is for CUDA 12.4 and older")
    assert found["NVIDIA GPU"].cost == "models run on the CPU (the driver is for CUDA 12.4 and older)"
    for name in ("nvcc", "CUTLASS"):
        assert not found[name].found
        assert "stay on their baseline" in found[name].cost


def test_a_gpu_that_no_code_is_made_for_is_told(tmp_path):
    found = findings(tmp_path, H100, V100)
    assert found["GPU 0"].found
    assert not found["GPU 1"].found
    assert "compute capability 7.0" in found["GPU 1"].cost


def test_the_engine_for_gpus_serves_like_the_other(tmp_path, installed):
    installed["onnxruntime-gpu"] = "1.31.1"
    found = findings(tmp_path, H100)
    assert found["onnxruntime-gpu"].found == found["ONNX Runtime's CUDA provider"].found == "1.31.1"
    assert "onnxruntime" not in found


def test_both_engines_at_once_are_told(tmp_path, installed):
    installed |= {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    found = findings(tmp_path)["onnxruntime"]
    assert not found.found
    assert "both installed" in found.cost
