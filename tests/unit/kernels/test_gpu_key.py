"""Device keys of GPUs, from a fake NVML and a fake CUDA runtime."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hone.compiler import cuda_target
from hone.engines.cuda_runtime import CudaRuntime
from hone.kernels import gpu_key
from hone.kernels.gpu_key import architecture_of, find_gpus, nvcc_version, unsupported
from tests.fake_cuda import H100, FakeCudart, FakeNvml


def key_of(nvml=None, card=H100, environment=None, **toolchain):
    cuda = CudaRuntime(FakeCudart([card]))
    (gpu,) = find_gpus(nvml or FakeNvml(), cuda, environment=environment or {}, **toolchain)
    return gpu.key


def test_it_says_what_the_card_is():
    key = key_of(nvcc="13.0.1", llvm="22")
    assert key.name == "NVIDIA H100 80GB HBM3, sm_90a"
    assert key.architecture == "sm_90a"
    assert key.fields["num_sms"] == 132
    assert key.fields["l2_bytes"] == 50 << 20
    assert key.fields["memory_bytes"] == 80 << 30
    assert key.fields["memory_clock_mhz"] == 2619
    assert key.fields["power_limit_watts"] == 700
    assert key.fields["cuda"] == 13000
    assert key.fields["toolchain"]["nvcc"] == "13.0.1"
    assert key.fields["toolchain"]["cutlass"].startswith("4.2.0")


@pytest.mark.parametrize(
    "changed",
    [
        {"nvml": FakeNvml(Name="NVIDIA H200")},
        {"nvml": FakeNvml(EnforcedPowerLimit=350_000)},
        {"nvml": FakeNvml(MaxClockInfo=1593)},
        {"nvml": FakeNvml(MigMode=[1, 1])},
        {"nvml": FakeNvml(Driver="570.00")},
        {"card": {**H100, "num_sms": 114}},
        {"card": {**H100, "l2_bytes": 25 << 20}},
        {"card": {**H100, "capability": (8, 0)}},
        {"environment": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}},
        {"nvcc": "13.1"},
        {"llvm": "23"},
    ],
)
def test_what_changes_measurements_changes_the_key(changed):
    assert key_of(**changed).digest != key_of().digest


def test_two_cards_of_one_kind_share_a_key():
    gpus = find_gpus(FakeNvml(), CudaRuntime(FakeCudart([H100, H100])), environment={})
    assert [gpu.ordinal for gpu in gpus] == [0, 1]
    assert gpus[0].key == gpus[1].key


def test_readings_that_a_card_does_not_offer_are_null():
    key = key_of(FakeNvml(EnforcedPowerLimit=None, MigMode=None))
    assert key.fields["power_limit_watts"] is None
    assert key.fields["mig"] is None
    assert key.digest != key_of().digest


def test_an_mps_share_that_is_none_is_none():
    assert key_of(environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}) == key_of()
    assert key_of(environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "all"}) == key_of()


def test_architectures():
    assert [architecture_of(one) for one in [(7, 5), (8, 6), (8, 9), (9, 0), (10, 0)]] == [
        "sm_75",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100a",
    ]


def sliced(**readings):
    """A card that is cut in two: the slices' readings are by their handles."""
    own = {"Name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "UUID": "MIG-1", "MemoryInfo": SimpleNamespace(total=10 << 30)}
    return FakeNvml(MigMode=[1, 1], Slices={2: own, 5: {**own, "UUID": "MIG-2", **readings}})


def test_a_slice_has_its_own_name_and_memory_and_the_cards_clocks():
    key = key_of(sliced())
    assert key.fields["name"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert key.fields["memory_bytes"] == 10 << 30
    assert key.fields["mig"] is True
    assert key.fields["memory_clock_mhz"] == 2619
    assert key.fields["power_limit_watts"] == 700


def test_a_slice_that_the_process_was_given_is_the_one():
    nvml = sliced(MemoryInfo=SimpleNamespace(total=20 << 30))
    given = key_of(nvml, environment={"CUDA_VISIBLE_DEVICES": "MIG-2"})
    assert given.fields["memory_bytes"] == 20 << 30
    assert given.digest != key_of(nvml).digest


def test_a_slice_that_nvml_does_not_tell_is_still_none_of_the_whole_card():
    key = key_of(FakeNvml(MigMode=[1, 1], Slices=None))
    assert key.fields["mig"] is True
    assert key.digest != key_of().digest


def test_what_kernels_are_made_for_is_what_the_compiler_knows():
    assert [f"sm_{arch}" for arch in cuda_target.ARCHITECTURES] == list(gpu_key.ARCHITECTURES)


def test_a_card_that_no_code_is_made_for_is_told():
    assert unsupported(key_of()) == ""
    told = unsupported(key_of(FakeNvml(Name="Tesla V100"), card={**H100, "capability": (7, 0)}))
    assert "Tesla V100 (compute capability 7.0), only for sm_75, 80, 86, 89, 90a, 100a" in told
    assert "answered by their baseline" in told


def test_nvcc_is_that_of_pypi_or_else_the_one_on_path(tmp_path, monkeypatch):
    assert nvcc_version() == gpu_key.package_version("nvidia-cuda-nvcc") != "none"
    monkeypatch.setattr(gpu_key, "package_version", lambda name: "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvcc_version() == "none"
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    assert nvcc_version() == "V13.0.88"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert nvcc_version() == "none"
