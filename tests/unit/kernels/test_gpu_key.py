"""Device keys of GPUs, from a fake NVML and a fake CUDA runtime."""

from __future__ import annotations

import pytest

from hone.engines.cuda_runtime import CudaRuntime
from hone.kernels.gpu_key import architecture_of, find_gpus
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
