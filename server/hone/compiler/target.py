"""The CPU that code is made for: what LLVM must know, and what the templates' candidates are counted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

#: Reassociation lets sums be vectorised, contraction makes fused multiply-adds; NaN and infinity keep their meaning.
FLOAT_FLAGS = ("fast-math-reassoc", "fast-math-contract")

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHE_BYTES = {1: 32 << 10, 2: 512 << 10}


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """One kind of CPU as the compiler sees it.

    `disabled_features` are those that LLVM thinks `mcpu` has and this machine (a hypervisor, say) does not offer.
    `num_threads` is how many the running engine will use: below 2 nothing is made parallel.
    """

    mcpu: str
    triple: str = ""
    features: tuple[str, ...] = ()
    disabled_features: tuple[str, ...] = ()
    vector_bits: int = 128
    num_vector_registers: int = 16
    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10
    num_threads: int = 1
    #: What runs shorter than this on one thread stays on it: threads that wait for work take it up within some 3 us
    #: (those that sleep need 50, once a run).
    parallel_min_us: float = 10.0

    @classmethod
    def detect(cls, num_threads: int) -> CpuTarget:
        """This machine. Raises ValueError when LLVM here cannot make code for it."""
        mcpu = str(tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")())
        host = {str(k): bool(v) for k, v in tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")().items()}
        implied = {str(k) for k in _features(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))}
        disabled = tuple(sorted(name for name, present in host.items() if not present and name in implied))
        features = tuple(sorted(name for name, present in host.items() if present))
        return cls.of_features(
            mcpu,
            features,
            disabled_features=disabled,
            num_threads=num_threads,
            caches={level: _cache_bytes(level) for level in (1, 2)},
        )

    @classmethod
    def of_features(
        cls,
        mcpu: str,
        features: tuple[str, ...],
        *,
        triple: str = "",
        disabled_features: tuple[str, ...] = (),
        num_threads: int = 1,
        caches: Mapping[int, int] | None = None,
    ) -> CpuTarget:
        """A CPU from the names of its instruction-set extensions: x86-64 (SSE, AVX2, AVX-512) or AArch64 (NEON)."""
        if "avx512f" in features:
            bits, registers = 512, 32
        elif "avx2" in features or "avx" in features:
            bits, registers = 256, 16
        elif triple.startswith("aarch64") or "neon" in features:
            bits, registers = 128, 32
        else:
            bits, registers = 128, 16
        sizes = {**_DEFAULT_CACHE_BYTES, **(caches or {})}
        return cls(
            mcpu=mcpu,
            triple=triple,
            features=features,
            disabled_features=disabled_features,
            vector_bits=bits,
            num_vector_registers=registers,
            l1_bytes=sizes[1],
            l2_bytes=sizes[2],
            num_threads=num_threads,
        )

    @property
    def lanes(self) -> int:
        """float32 items in one vector register."""
        return self.vector_bits // 32

    def microseconds(self, operations: float, num_bytes: float) -> float:
        """A rough time on one thread: what vector units and memory need at least, at some 4 GHz and 50 GB/s."""
        return max(operations / (self.lanes * 2 * 4000), num_bytes / 50_000)

    def is_worth_threads(self, operations: float, num_bytes: float) -> bool:
        return self.num_threads > 1 and self.microseconds(operations, num_bytes) >= self.parallel_min_us

    def fields(self) -> dict[str, Any]:
        """All that changes generated code, for digests: the number of threads matters only as one or many."""
        return {
            "mcpu": self.mcpu,
            "triple": self.triple,
            "features": list(self.features),
            "disabled_features": list(self.disabled_features),
            "vector_bits": self.vector_bits,
            "num_vector_registers": self.num_vector_registers,
            "parallel": self.num_threads > 1,
            "parallel_min_us": self.parallel_min_us,
            "flags": list(FLOAT_FLAGS),
        }

    def tvm(self) -> Any:
        """The same for TVM."""
        options: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu, "num-cores": self.num_threads}
        options.update(dict.fromkeys(FLOAT_FLAGS, True))
        if self.triple:
            options["mtriple"] = self.triple
        attributes = [f"-{name}" for name in self.disabled_features]
        if self.triple.startswith("aarch64"):
            attributes.append("+neon")
        if attributes:
            options["mattr"] = attributes
        return tvm.target.Target(options)


def _features(target: Any) -> Any:
    return tvm.get_global_func("target.llvm_get_cpu_features")(target)


def _cache_bytes(level: int) -> int:
    for index in sorted(_CACHES.glob("index*")):
        try:
            kind = (index / "type").read_text(encoding="ascii").strip()
            if kind == "Instruction" or int((index / "level").read_text(encoding="ascii")) != level:
                continue
            size = (index / "size").read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(size.removesuffix("K")) << 10 if size.endswith("K") else int(size)
    return _DEFAULT_CACHE_BYTES[level]
