"""The NVIDIA GPU that code is made for: what nvcc and TVM must know, and what candidates are counted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What all GPUs of one architecture share (CUDA C++ Programming Guide, table "Technical Specifications per
    Compute Capability"). Shared memory in bytes: what one block may ask for, and what a multiprocessor has."""

    max_shared_memory_per_block: int
    shared_memory_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int


#: By the name that nvcc knows after "sm_"; the "a" of 90a and 100a asks for instructions of that architecture alone.
ARCHITECTURES: Mapping[str, _Architecture] = {
    "75": _Architecture(64 * _KIB, 64 * _KIB, 1024, 16),
    "80": _Architecture(163 * _KIB, 164 * _KIB, 2048, 32),
    "86": _Architecture(99 * _KIB, 100 * _KIB, 1536, 16),
    "89": _Architecture(99 * _KIB, 100 * _KIB, 1536, 24),
    "90a": _Architecture(227 * _KIB, 228 * _KIB, 2048, 32),
    "100a": _Architecture(227 * _KIB, 228 * _KIB, 2048, 32),
}


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """One kind of GPU as the compiler sees it.

    With `twin`, kernels are rendered as host programs of the same mathematics, to be run on the CPU: for tests and for
    checking what a kernel should have given. `tensor_tflops` (float16 with sums in float32, dense) and
    `memory_gbps` (gigabytes a second) are what its maker states, for modelled costs only: nothing is promoted by them.
    """

    arch: str
    name: str
    num_sms: int
    l2_bytes: int
    tensor_tflops: float
    memory_gbps: float
    max_shared_memory_per_block: int
    shared_memory_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    twin: bool = False
    max_registers_per_thread: int = 255
    registers_per_sm: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32

    @classmethod
    def of_architecture(
        cls, arch: str, *, name: str, num_sms: int, l2_bytes: int, tensor_tflops: float, memory_gbps: float
    ) -> CudaTarget:
        """Raises ValueError for an architecture that no template knows."""
        limits = ARCHITECTURES.get(arch)
        if limits is None:
            raise ValueError(f"architecture '{arch}' is unknown, expected one of {', '.join(ARCHITECTURES)}")
        return cls(
            arch=arch,
            name=name,
            num_sms=num_sms,
            l2_bytes=l2_bytes,
            tensor_tflops=tensor_tflops,
            memory_gbps=memory_gbps,
            max_shared_memory_per_block=limits.max_shared_memory_per_block,
            shared_memory_per_sm=limits.shared_memory_per_sm,
            max_threads_per_sm=limits.max_threads_per_sm,
            max_blocks_per_sm=limits.max_blocks_per_sm,
        )

    @classmethod
    def preset(cls, name: str) -> CudaTarget:
        """A device by its short name, for building without it. Raises ValueError."""
        if name not in PRESETS:
            raise ValueError(f"device '{name}' is unknown, expected one of {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def typical(cls, arch: str) -> CudaTarget:
        """The device that stands for an architecture when none is named. Raises ValueError."""
        found = next((target for target in PRESETS.values() if target.arch == arch), None)
        if found is None:
            raise ValueError(f"architecture '{arch}' is unknown, expected one of {', '.join(ARCHITECTURES)}")
        return found

    @property
    def compute_capability(self) -> int:
        """Such as 75 or 90."""
        return int(self.arch.rstrip("a"))

    def microseconds(self, operations: float, num_bytes: float) -> float:
        """Modelled: the longer of arithmetic on tensor cores (in float16) and traffic, at what the maker states."""
        return max(operations / (self.tensor_tflops * 1e6), num_bytes / (self.memory_gbps * 1e3))

    def as_twin(self) -> CudaTarget:
        return replace(self, twin=True)

    def fields(self) -> dict[str, Any]:
        """All that changes generated code, for digests. How many multiprocessors there are only changes choices."""
        return {
            "kind": "cuda",
            "arch": self.arch,
            "twin": self.twin,
            "max_shared_memory_per_block": self.max_shared_memory_per_block,
            "max_threads_per_block": self.max_threads_per_block,
            "warp_size": self.warp_size,
        }

    def tvm_target(self) -> Any:
        """The same for TVM; its own schedules keep to the shared memory that needs no opting in."""
        return tvm.target.Target(
            {
                "kind": "cuda",
                "arch": f"sm_{self.arch}",
                "max_threads_per_block": self.max_threads_per_block,
                "max_num_threads": self.max_threads_per_block,
                "max_shared_memory_per_block": 48 * _KIB,
                "thread_warp_size": self.warp_size,
                "registers_per_block": self.registers_per_sm,
                "l2_cache_size_bytes": self.l2_bytes,
            },
            host={"kind": "llvm"},
        )


def preset_named(name: str) -> CudaTarget | None:
    """The preset of what NVML calls a GPU, such as "NVIDIA A100-SXM4-80GB"; None where there is none."""
    words = name.lower().replace("-", " ").replace("geforce ", "").replace("rtx ", "rtx").split()
    return next((target for preset, target in PRESETS.items() if preset in words), None)


#: (arch, multiprocessors, L2 in MiB, dense float16 tensor TFLOP/s with float32 sums, GB/s), from data sheets.
#: The first of an architecture is its typical one.
_DEVICES: Mapping[str, tuple[str, int, int, float, float]] = {
    "t4": ("75", 40, 4, 65.0, 320.0),
    "a100": ("80", 108, 40, 312.0, 1555.0),
    "a10": ("86", 72, 6, 125.0, 600.0),
    "rtx3070": ("86", 46, 4, 40.6, 448.0),
    "l4": ("89", 58, 48, 121.0, 300.0),
    "rtx4090": ("89", 128, 72, 165.2, 1008.0),
    "h100": ("90a", 132, 50, 989.0, 3350.0),
    "h200": ("90a", 132, 50, 989.0, 4800.0),
    "b200": ("100a", 148, 126, 2250.0, 8000.0),
}

PRESETS: Mapping[str, CudaTarget] = {
    name: CudaTarget.of_architecture(
        arch, name=name, num_sms=num_sms, l2_bytes=l2_mib * _MIB, tensor_tflops=tflops, memory_gbps=gbps
    )
    for name, (arch, num_sms, l2_mib, tflops, gbps) in _DEVICES.items()
}
