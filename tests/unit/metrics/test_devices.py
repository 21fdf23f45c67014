"""Readings of the machine. NVML is replaced at its seam, the module that `GpuReader` is given."""

import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from prometheus_client import CollectorRegistry

from hone.metrics import Metrics, cgroup
from hone.metrics.devices import CpuReader, DeviceReadings, GpuReader
from hone.metrics.families import GaugeFamily, TextFamily


class FakeNvml:
    """Two GPUs as NVML describes them: milliwatts, millijoules, percent. `broken` readings raise NotSupported."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.energy_mj = {"GPU-a": 5_000_000, "GPU-b": 7_000_000}
        self.broken: set[tuple[str, str]] = set()
        self.num_shutdowns = 0
        self.threads: set[str] = set()

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.energy_mj)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.energy_mj)[index]

    def nvmlDeviceGetUUID(self, device: str) -> str:
        return device

    def _read(self, what: str, device: str, value: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        if (what, device) in self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        return self._read("utilization", device, SimpleNamespace(gpu=25, memory=3))

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return self._read("memory", device, SimpleNamespace(total=80 << 30, used=3 << 30))

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        return self._read("power", device, 123_456)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: str) -> int:
        return self._read("limit", device, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        return self._read("energy", device, self.energy_mj[device])


def text_of(families: "list[TextFamily] | tuple[TextFamily, ...]") -> list[str]:
    return "".join("".join((family.header(), *family.iter_text())) for family in families).splitlines()


def test_gpu_metrics_have_tritons_names_and_units() -> None:
    nvml = FakeNvml()
    reader = GpuReader(nvml)
    nvml.energy_mj["GPU-a"] += 2_500
    lines = text_of(reader.families())
    for expected in (
        "# TYPE nv_gpu_utilization gauge",
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.25',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"} 85899345920',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 3221225472',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 123.456',
        'nv_gpu_power_limit{gpu_uuid="GPU-a"} 700.0',
        "# TYPE nv_energy_consumption counter",
        'nv_energy_consumption{gpu_uuid="GPU-a"} 2.5',
        'nv_energy_consumption{gpu_uuid="GPU-b"} 0.0',
    ):
        assert expected in lines
    assert reader.uuids == ("GPU-a", "GPU-b")


def test_a_reading_that_a_gpu_lacks_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    nvml.broken = {("utilization", "GPU-a"), ("energy", "GPU-b")}
    reader = GpuReader(nvml)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            lines = text_of(reader.families())
    assert [line for line in lines if line.startswith("nv_gpu_utilization")] == [
        'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.25'
    ]
    assert not any("GPU-b" in line for line in lines if line.startswith("nv_energy"))
    told = [record.getMessage() for record in caplog.records]
    assert len([message for message in told if message.startswith("nv_gpu_utilization of GPU-a")]) == 1


def test_without_nvml_gpu_metrics_are_absent_with_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with caplog.at_level(logging.INFO):
        metrics = Metrics(CollectorRegistry(), interval_ms=10)
        texts = [metrics.render()[0] for _ in range(3)]
    assert all(b"gpu" not in text and b"nv_energy" not in text for text in texts)
    assert b"nv_cpu_utilization " in texts[0]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no GPU metrics" in caplog.text
    metrics.close()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_metrics_include_gpus_where_nvml_is_present(nvml: FakeNvml) -> None:
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False)
    assert b'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.25\n' in metrics.render()[0]
    metrics.close()
    assert nvml.num_shutdowns == 1


def test_gpu_metrics_can_be_switched_off(nvml: FakeNvml) -> None:
    metrics = Metrics(CollectorRegistry(), allow_gpu_metrics=False)
    assert b"gpu" not in metrics.render()[0]
    metrics.close()
    assert nvml.num_shutdowns == 0


def test_gpus_that_cannot_be_listed_are_a_warning(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", fail)
    assert GpuReader.open() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert nvml.num_shutdowns == 1


def test_no_gpu_at_all_is_like_no_nvml(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.energy_mj.clear()
    with caplog.at_level(logging.INFO):
        assert GpuReader.open() is None
    assert "lists no GPU" in caplog.text
    assert nvml.num_shutdowns == 1


async def test_the_driver_is_asked_off_the_event_loop(nvml: FakeNvml) -> None:
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False)
    nvml.threads.clear()
    text = b"".join([piece async for piece in metrics.stream()])
    assert b"nv_gpu_utilization{" in text
    assert nvml.threads
    assert threading.current_thread().name not in nvml.threads
    metrics.close()


def test_cpu_utilization_is_busy_time_since_the_reading_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # user, idle, iowait; guest time is part of user
    times = [(10.0, 100.0, 5.0), (16.0, 101.0, 6.0), (16.0, 101.0, 6.0), (16.0, 111.0, 6.0)]

    def cpu_times() -> Any:
        user, idle, iowait = times.pop(0)
        return SimpleNamespace(_asdict=lambda: {"user": user, "idle": idle, "iowait": iowait, "guest": user})

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    reader = CpuReader()
    utilizations = [float(text_of(reader.families())[2].split()[1]) for _ in range(3)]
    assert utilizations == [0.75, 0.75, 0.0]  # the second reading came before the clock moved: nothing new


def test_cpu_readings_of_this_machine() -> None:
    lines = text_of(CpuReader().families())
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    assert 0.0 <= values["nv_cpu_utilization"] <= 1.0
    assert 0 < values["nv_cpu_memory_used_bytes"] < values["nv_cpu_memory_total_bytes"]
    assert values["nv_cpu_memory_total_bytes"] <= psutil.virtual_memory().total


def test_memory_is_the_containers_where_it_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_limit", lambda: cgroup.MemoryLimit(1_000_000, 1_234))
    lines = text_of(CpuReader().families())
    assert "nv_cpu_memory_total_bytes 1000000" in lines
    assert "nv_cpu_memory_used_bytes 1234" in lines


def test_a_limit_above_the_machines_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(cgroup, "memory_limit", lambda: cgroup.MemoryLimit(total + 1, 1_234))
    assert f"nv_cpu_memory_total_bytes {total}" in text_of(CpuReader().families())


class CountingReader(CpuReader):
    def __init__(self) -> None:
        self.num_readings = 0

    def families(self) -> list[TextFamily]:
        self.num_readings += 1
        return [GaugeFamily("reading", "", "gauge", [({}, self.num_readings)])]


def test_readings_are_taken_again_only_when_they_are_older_than_the_interval() -> None:
    now_ns = 0
    reader = CountingReader()
    readings = DeviceReadings(reader, None, interval_ms=2_000, clock_ns=lambda: now_ns)
    assert reader.num_readings == 0  # nothing until somebody asks
    seen = []
    for now_ns in (5, 10, 2_000_000_004, 2_000_000_005, 2_100_000_000, 9_000_000_000):  # noqa: B007
        seen.append(text_of(readings.families())[-1])
    assert seen == ["reading 1", "reading 1", "reading 1", "reading 2", "reading 2", "reading 3"]


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"cgroup": "0::/kube/pod/box\n"})
    stat = "anon 1\ninactive_file {}\nactive_file 3\n"
    write(root, {"cgroup.procs": ""})
    write(root / "kube", {"memory.max": "9000\n", "memory.current": "5000\n", "memory.stat": stat.format(100)})
    write(root / "kube/pod", {"memory.max": "2000\n", "memory.current": "1500\n", "memory.stat": stat.format(400)})
    write(root / "kube/pod/box", {"memory.max": "max\n", "memory.current": "10\n", "memory.stat": stat.format(0)})
    assert cgroup.memory_limit(proc, root) == cgroup.MemoryLimit(2000, 1100)


def test_cgroup_v2_path_of_the_host_falls_back_to_the_containers_root(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"cgroup": "0::/../host/path\n"})
    write(root, {"memory.max": "4096", "memory.current": "96", "memory.stat": "inactive_file 6"})
    assert cgroup.memory_limit(proc, root) == cgroup.MemoryLimit(4096, 90)


def test_cgroup_v1(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"})
    folder = root / "memory/box"
    files = {"memory.usage_in_bytes": "700", "memory.stat": "cache 1\ntotal_inactive_file 200"}
    write(folder, {**files, "memory.limit_in_bytes": "1000"})
    assert cgroup.memory_limit(proc, root) == cgroup.MemoryLimit(1000, 500)
    write(folder, {"memory.limit_in_bytes": "9223372036854771712"})
    assert cgroup.memory_limit(proc, root) is None


@pytest.mark.parametrize("contents", [None, "", "0::/nowhere\n"])
def test_no_limit_where_there_is_none(tmp_path: Path, contents: str | None) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    if contents is not None:
        write(proc, {"cgroup": contents})
    assert cgroup.memory_limit(proc, root) is None


def test_an_unreadable_limit_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"cgroup": "0::/\n"})
    write(root, {"memory.max": "lots", "memory.current": "1", "memory.stat": ""})
    with caplog.at_level(logging.DEBUG):
        assert cgroup.memory_limit(proc, root) is None
    assert "cannot read the memory limit" in caplog.text
