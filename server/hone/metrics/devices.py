"""Readings of the machine: CPU, memory and, where NVML is present, GPUs. No thread: they are taken when asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from prometheus_client import Metric

from hone.metrics import cgroup
from hone.metrics.families import GaugeFamily, Number, TextFamily

logger = logging.getLogger(__name__)

_NO_LABELS: Mapping[str, str] = {}


PinnedUsage = Callable[[], tuple[int, int]]
"""Bytes of pinned memory, and those of them in use."""


def no_pinned_memory() -> tuple[int, int]:
    """Where there is no GPU."""
    return 0, 0


def host_families(pinned: PinnedUsage = no_pinned_memory) -> tuple[TextFamily, ...]:
    """Memory for transfers to a GPU, by Triton's names. hone's pool grows as it is needed, so its size is what is
    pinned now."""
    total, used = pinned()
    return (
        GaugeFamily(
            "nv_pinned_memory_pool_total_bytes", "Size of the pinned memory pool", "gauge", [(_NO_LABELS, total)]
        ),
        GaugeFamily("nv_pinned_memory_pool_used_bytes", "Pinned memory in use", "gauge", [(_NO_LABELS, used)]),
    )


_CPU_METRICS = (
    ("nv_cpu_utilization", "CPU utilization of the machine, 0 to 1"),
    ("nv_cpu_memory_total_bytes", "Memory of the machine or container in bytes"),
    ("nv_cpu_memory_used_bytes", "Memory in use in bytes"),
)


class CpuReader:
    """Utilization of all CPUs since the reading before, and memory (the container's, if that has a limit)."""

    def __init__(self) -> None:
        self._busy, self._total = _cpu_seconds()
        self._utilization = 0.0

    def families(self) -> list[TextFamily]:
        busy, total = _cpu_seconds()
        if total > self._total:
            # iowait and idle may be corrected downwards by the kernel, hence the bounds.
            self._utilization = min(1.0, max(0.0, (busy - self._busy) / (total - self._total)))
            self._busy, self._total = busy, total
        machine = psutil.virtual_memory()
        total_bytes, used_bytes = machine.total, machine.total - machine.available
        limit = cgroup.memory_limit()
        if limit is not None and limit.total_bytes < total_bytes:
            total_bytes, used_bytes = limit
        values: tuple[Number, ...] = (self._utilization, total_bytes, used_bytes)
        return [
            GaugeFamily(name, text, "gauge", [(_NO_LABELS, value)])
            for (name, text), value in zip(_CPU_METRICS, values, strict=True)
        ]


def _cpu_seconds() -> tuple[float, float]:
    """Busy and total seconds of all CPUs since boot (guests are counted within user already)."""
    times = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
    return total - times["idle"] - times.get("iowait", 0.0), total


@dataclass(frozen=True)
class _GpuMetric:
    name: str
    documentation: str
    type: str
    read: Callable[[Any, Any], Number]
    """(nvml, device handle) -> value, in the unit of the metric."""


_GPU_METRICS = (
    _GpuMetric(
        "nv_gpu_utilization",
        "GPU utilization, 0 to 1",
        "gauge",
        lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    ),
    _GpuMetric(
        "nv_gpu_memory_total_bytes",
        "Memory of the GPU in bytes",
        "gauge",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).total,
    ),
    _GpuMetric(
        "nv_gpu_memory_used_bytes",
        "Memory of the GPU in use in bytes",
        "gauge",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used,
    ),
    _GpuMetric(
        "nv_gpu_power_usage",
        "Power drawn by the GPU in watts",
        "gauge",
        lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1_000,
    ),
    _GpuMetric(
        "nv_gpu_power_limit",
        "Power limit of the GPU in watts",
        "gauge",
        lambda nvml, device: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1_000,
    ),
    _GpuMetric(
        "nv_energy_consumption",
        "Energy used by the GPU since the server started in joules",
        "counter",
        lambda nvml, device: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1_000,
    ),
)


class GpuReader:
    """Readings of every GPU through NVML. A reading that a GPU does not offer (MIG, vGPU) is left out."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the `pynvml` module, initialised. Raises its NVMLError when the GPUs cannot be listed."""
        self._nvml = nvml
        self._devices: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            self._devices[nvml.nvmlDeviceGetUUID(device)] = device
        self._missing: set[tuple[str, str]] = set()
        energy = _GPU_METRICS[-1]
        self._energy_at_start = dict(self._read(energy))

    @classmethod
    def open(cls) -> GpuReader | None:
        """None, with a line in the log, where there is no NVML or no GPU that it can list."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as problem:
            logger.info("no GPU metrics: NVML is not available: %s", problem)
            return None
        try:
            reader = cls(pynvml)
        except pynvml.NVMLError as problem:
            logger.warning("no GPU metrics: NVML cannot list the GPUs: %s", problem)
        else:
            if reader.uuids:
                return reader
            logger.info("no GPU metrics: NVML lists no GPU")
        pynvml.nvmlShutdown()
        return None

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def families(self) -> list[TextFamily]:
        families: list[TextFamily] = []
        for metric in _GPU_METRICS:
            values = list(self._read(metric))
            if metric.name == "nv_energy_consumption":
                values = [(uuid, value - self._energy_at_start.get(uuid, value)) for uuid, value in values]
            labelled = [({"gpu_uuid": uuid}, value) for uuid, value in values]
            families.append(GaugeFamily(metric.name, metric.documentation, metric.type, labelled))
        return families

    def _read(self, metric: _GpuMetric) -> Iterator[tuple[str, Number]]:
        for uuid, device in self._devices.items():
            try:
                value = metric.read(self._nvml, device)
            except self._nvml.NVMLError as problem:
                if (metric.name, uuid) not in self._missing:
                    logger.info("%s of %s cannot be read and is left out: %s", metric.name, uuid, problem)
                    self._missing.add((metric.name, uuid))
                continue
            self._missing.discard((metric.name, uuid))
            yield uuid, value

    def close(self) -> None:
        self._nvml.nvmlShutdown()


def device_names() -> list[Metric]:
    """Families that readers may yield, without readings."""
    return [
        *(Metric(name, text, "gauge") for name, text in _CPU_METRICS),
        *(Metric(metric.name, metric.documentation, metric.type) for metric in _GPU_METRICS),
    ]


class DeviceReadings:
    """CPU and GPU readings that are at most `interval_ms` old when they are asked for.

    `families` may take milliseconds where there are GPUs, and is safe to call from another thread.
    """

    def __init__(
        self,
        cpu: CpuReader | None,
        gpu: GpuReader | None,
        interval_ms: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._cpu = cpu
        self._gpu = gpu
        self._interval_ns = interval_ms * 1_000_000
        self._clock_ns = clock_ns
        self._families: tuple[TextFamily, ...] = ()
        self._read_at_ns: int | None = None

    @property
    def slow(self) -> bool:
        """Whether reading asks a driver, so that it is better not done on the event loop."""
        return self._gpu is not None

    def families(self) -> tuple[TextFamily, ...]:
        now = self._clock_ns()
        if self._read_at_ns is None or now - self._read_at_ns >= self._interval_ns:
            readers = (reader for reader in (self._cpu, self._gpu) if reader is not None)
            self._families = tuple(family for reader in readers for family in reader.families())
            self._read_at_ns = now
        return self._families

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
