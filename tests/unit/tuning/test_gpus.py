"""GPUs that a server finds when it starts, and what tuning makes of models that run on them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.placed import PlacedEngine
from hone.protos import config_pb
from hone.specialization import VersionRef
from hone.tuning import gpus as gpus_module
from hone.tuning.gpus import detect_gpus, kind_of, look_for_gpus, missing_cuda_tools
from hone.tuning.served import ServedVersions
from tests.fake_cuda import H100, FakeCudart, FakeNvml
from tests.unit.tuning.fakes import Engine


class Nvml(FakeNvml):
    def __init__(self, *, works=True):
        super().__init__()
        self.works, self.num_open = works, 0

    def nvmlInit(self):
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1


@pytest.fixture
def machine(monkeypatch):
    """NVML and the CUDA runtime of a machine with these cards."""

    def make(*cards, **nvml):
        made = Nvml(**nvml)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        monkeypatch.setattr(CudaRuntime, "load", classmethod(lambda cls: cls(FakeCudart(cards))))
        return made

    return make


def test_cards_of_a_kind_have_one_name_for_it(machine):
    nvml = machine(H100, H100, {**H100, "num_sms": 114})
    gpus = detect_gpus()
    assert [gpu.ordinal for gpu in gpus] == [0, 1, 2]
    kinds = [kind_of(gpu) for gpu in gpus]
    assert kinds[0] == kinds[1] != kinds[2]
    assert nvml.num_open == 0


def test_without_a_driver_there_are_none(machine):
    nvml = machine(H100, works=False)
    assert detect_gpus() == ()
    assert nvml.num_open == 0


def test_a_runtime_that_does_not_answer_is_told(machine, caplog, monkeypatch):
    nvml = machine(H100)
    cudart = FakeCudart([H100])
    cudart.cudaGetDeviceCount = lambda found: 35
    monkeypatch.setattr(CudaRuntime, "load", classmethod(lambda cls: cls(cudart)))
    assert detect_gpus() == ()
    assert "GPUs are here and are not used, models run on the CPU" in caplog.text
    assert "the driver is for CUDA 12.4 and older, install a newer one" in caplog.text
    assert nvml.num_open == 0


def test_a_container_without_gpus_is_told_to_ask_for_them(machine, monkeypatch):
    machine(H100)
    cudart = FakeCudart([H100])
    cudart.cudaGetDeviceCount = lambda found: 100
    monkeypatch.setattr(CudaRuntime, "load", classmethod(lambda cls: cls(cudart)))
    assert "CUDA_VISIBLE_DEVICES" in look_for_gpus()[1]


def test_tools_that_are_missing_are_named(monkeypatch):
    assert missing_cuda_tools() == ""
    monkeypatch.setattr(gpus_module, "package_version", lambda name: "none")
    assert "CUTLASS's headers are not installed" in missing_cuda_tools()
    monkeypatch.setattr(gpus_module, "nvcc_version", lambda: "none")
    assert "no nvcc is installed, neither from PyPI (pip install 'hone[cuda]') nor on PATH" in missing_cuda_tools()
    assert "answered by their baseline" in missing_cuda_tools()


def served(places, accelerators="", baseline=None, precisions=None):
    """The version as tuning sees it."""
    config = config_pb.ModelConfig(name="m")
    for kind, name in (("gpu", "gpu_execution_accelerator"), ("cpu", "cpu_execution_accelerator")):
        if kind in accelerators:
            entry = getattr(config.optimization.execution_accelerators, name).add(name="tvm")
            entry.parameters["tolerance"] = "0.5" if kind == "gpu" else "0.25"
    baseline = baseline or Engine()

    class Model(SimpleNamespace):  # a weak dictionary wants to look at it, and to hash it
        __hash__ = object.__hash__

    model = Model(
        ref=VersionRef("m", 1, "g"),
        version=1,
        definition=SimpleNamespace(versions={1: "model.onnx"}),
        slot=SimpleNamespace(baseline=SimpleNamespace(engine=baseline)),
        config=config,
        places=places,
    )
    registry = SimpleNamespace(served=lambda: [model])
    (version,) = ServedVersions(registry, precisions).tunable()
    return version


GPU_PLACES = (("gpu a", 1), ("gpu a", 0))


def test_a_model_on_gpus_has_tensor_cores_by_default_where_there_are_any():
    assert served(GPU_PLACES, precisions={"gpu a": "tf32"}).parameters_on("gpu a") == {"precision": "tf32"}
    assert served(GPU_PLACES, precisions={}).parameters_on("gpu a") == {}
    assert served((("cpu", 0),), precisions={"gpu a": "tf32"}).parameters_on("cpu") == {}


def test_settings_are_those_of_the_devices_kind():
    assert served(GPU_PLACES, "gpu cpu").parameters_on("gpu a")["tolerance"] == "0.5"
    assert served((("cpu", 0),), "gpu cpu").parameters_on("cpu")["tolerance"] == "0.25"
    assert "tolerance" not in served(GPU_PLACES, "cpu").parameters_on("gpu a")


def test_a_model_on_both_has_both_settings():
    both = served((("cpu", 0), ("gpu a", 0), ("gpu b", 1)), "gpu cpu", precisions={"gpu a": "tf32"})
    assert both.parameters_on("cpu") == {"tolerance": "0.25"}
    assert both.parameters_on("gpu a") == {"tolerance": "0.5", "precision": "tf32"}
    assert both.parameters_on("gpu b") == {"tolerance": "0.5"}
    assert both.kinds == {"cpu", "gpu a", "gpu b"}


def test_it_is_told_where_it_runs():
    version = served(GPU_PLACES, baseline=PlacedEngine({1: Engine(), 0: Engine()}))
    assert version.kinds == frozenset(["gpu a"])
    assert version.baseline_gpu == 1
    assert served((("cpu", 0),)).baseline_gpu is None
