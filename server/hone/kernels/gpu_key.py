"""Device keys of NVIDIA GPUs: what NVML and the CUDA runtime say of a card, as far as measurements depend on it.

Nothing here makes a CUDA context: a server that only looks takes no memory on the card.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hone.kernels.device_key import DeviceKey, package_version
from hone.kernels.digest import JSON

#: Architectures with instructions of their own: kernels are built for these and run on no other.
_OWN_INSTRUCTIONS = frozenset({"90", "100"})
#: What kernels are made for, and nothing older or between (see `compiler.cuda_target.ARCHITECTURES`).
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVCC_SECONDS = 20.0


class CudaQueries(Protocol):
    """What a key needs of the CUDA runtime; see `engines.cuda_runtime.CudaRuntime`."""

    @property
    def num_devices(self) -> int: ...
    @property
    def runtime_version(self) -> int: ...
    def pci_bus_id(self, ordinal: int) -> str: ...
    def num_sms(self, ordinal: int) -> int: ...
    def l2_bytes(self, ordinal: int) -> int: ...
    def compute_capability(self, ordinal: int) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card: CUDA's number for it in this process, its own name for logs, and its key."""

    ordinal: int
    uuid: str
    key: DeviceKey


def architecture_of(capability: tuple[int, int]) -> str:
    """The scope that kernels for a compute capability have in the cache, such as "sm_80" or "sm_90a"."""
    number = f"{capability[0]}{capability[1]}"
    return f"sm_{number}a" if number in _OWN_INSTRUCTIONS else f"sm_{number}"


def unsupported(key: DeviceKey) -> str:
    """Why nothing is compiled for such a GPU; empty where something is."""
    if key.architecture in ARCHITECTURES:
        return ""
    capability: Any = key.fields["compute_capability"]
    known = ", ".join(name.removeprefix("sm_") for name in ARCHITECTURES)
    told = f"{key.fields['name']} (compute capability {'.'.join(map(str, capability))})"
    return f"hone makes no code for {told}, only for sm_{known}: models on it are answered by their baseline"


def nvcc_version() -> str:
    """Of PyPI's nvcc, else of the one on PATH, such as "V13.0.88"; "none" where there is none that answers."""
    installed = package_version("nvidia-cuda-nvcc")
    found = shutil.which("nvcc")
    if installed != "none" or found is None:
        return installed
    try:
        ran = subprocess.run(
            [found, "--version"],
            capture_output=True,
            text=True,
            timeout=_NVCC_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    told = re.search(r"release [0-9.]+, (V[0-9.]+)", ran.stdout)
    return told[1] if told else "none"


def find_gpus(
    nvml: Any,
    cuda: CudaQueries,
    *,
    nvcc: str = "none",
    llvm: str = "none",
    environment: Mapping[str, str] = os.environ,
) -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order. `nvml` is the `pynvml` module, initialised.

    Raises nvml.NVMLError for a card that NVML does not know, and what `cuda` raises.
    """
    return [_gpu(nvml, cuda, ordinal, nvcc, llvm, environment) for ordinal in range(cuda.num_devices)]


def _gpu(nvml: Any, cuda: CudaQueries, ordinal: int, nvcc: str, llvm: str, environment: Mapping[str, str]) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByPciBusId(cuda.pci_bus_id(ordinal))

    def told(read: Callable[[], Any]) -> Any:
        """A reading that a card does not offer (MIG, vGPU, a laptop's power limit) is null, and so part of the key."""
        try:
            return read()
        except nvml.NVMLError:
            return None

    capability = cuda.compute_capability(ordinal)
    # Clocks and power are the card's, whoever has a slice of it; name and memory are the slice's.
    mig = told(lambda: bool(nvml.nvmlDeviceGetMigMode(device)[0]))
    card = device
    if mig:
        device = _slice(nvml, card, environment) or card
    memory = told(lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).total))
    fields: dict[str, JSON] = {
        "kind": "gpu",
        "name": _text(nvml.nvmlDeviceGetName(device)),
        "architecture": architecture_of(capability),
        "compute_capability": list(capability),
        "num_sms": cuda.num_sms(ordinal),
        "l2_bytes": cuda.l2_bytes(ordinal),
        "memory_bytes": memory,
        "memory_clock_mhz": told(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_MEM))),
        "memory_bus_bits": told(lambda: int(nvml.nvmlDeviceGetMemoryBusWidth(card))),
        "power_limit_watts": told(lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000)),
        # CUDA's own counts above are the slice's where MIG is on; the share of MPS it does not tell.
        "mig": mig,
        "mps_percent": _percent(environment.get(_MPS_SHARE)),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": cuda.runtime_version,
        "toolchain": {
            "tvm": package_version("apache-tvm"),
            "tvm_ffi": package_version("apache-tvm-ffi"),
            "llvm": llvm,
            "cxx": "none",
            "nvcc": nvcc,
            "cutlass": package_version("nvidia-cutlass"),
        },
    }
    return Gpu(ordinal, _text(nvml.nvmlDeviceGetUUID(device)), DeviceKey(fields))


def _slice(nvml: Any, card: Any, environment: Mapping[str, str]) -> Any:
    """The MIG device that this process computes on: the one that it was given, else the card's first, as CUDA takes it;
    None where NVML does not tell."""
    given = [name.strip() for name in environment.get(_VISIBLE, "").split(",")]
    try:
        if given[0].startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(given[0])
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(card))
    except nvml.NVMLError:
        return None
    for index in range(count):
        try:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except nvml.NVMLError:
            continue  # numbers have gaps
    return None


def _text(told: Any) -> str:
    """Older NVML bindings give bytes."""
    return told.decode() if isinstance(told, bytes) else str(told)


def _percent(told: str | None) -> float | None:
    """MPS's share; one that CUDA would not understand either is none."""
    try:
        share = float(told) if told else None
    except ValueError:
        return None
    return share if share is not None and 0 < share < 100 else None
