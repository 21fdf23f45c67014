"""The device key: all that makes measurements transferable, read from the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from hone.kernels.digest import JSON, digest_of, digest_of_bytes
from hone.kernels.files import open_private

#: Instruction sets that a compiler may use. The kernel's list has more (mitigations, virtualisation), and grows with
#: the kernel's version, which must not make a cache cold.
_X86_FEATURES = re.compile(
    r"(sse|ssse|pni|avx|amx|fma|f16c|bmi|abm|adx|popcnt|movbe|cx16|lahf_lm|aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni"
    r"|xop|tbm|cldemote|movdir|3dnowprefetch)[a-z0-9_]*"
)
#: Levels of the x86-64 psABI, which LLVM and g++ know by these names.
_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)
_MAX_DEVICE_FILE_BYTES = 1 << 20
_COMPILER_SECONDS = 20.0


@dataclass(frozen=True, eq=False)
class DeviceKey:
    """A kind of device. Two machines with equal fields may use each other's decisions and artifacts."""

    fields: Mapping[str, JSON]

    @cached_property
    def digest(self) -> str:
        return digest_of(self.fields)

    @cached_property
    def name(self) -> str:
        """For people, such as "AMD EPYC 9B14, 2 cores, x86-64-v4"."""
        parts = [str(self.fields.get("name", "unknown device"))]
        if "cores" in self.fields:
            parts.append(f"{self.fields['cores']} cores")
        parts.append(self.architecture.rsplit("-", 1)[0] if self.fields.get("kind") == "cpu" else self.architecture)
        return ", ".join(parts)

    @cached_property
    def architecture(self) -> str:
        """Scope of kernels: what code runs here. Of a CPU its level and a digest of its instruction sets."""
        if self.fields.get("kind") != "cpu":
            return str(self.fields["architecture"])
        features: Any = self.fields["features"]
        level = x86_level(features) if self.fields["architecture"] == "x86_64" else str(self.fields["architecture"])
        return f"{level}-{digest_of({'features': features})[:12]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_bytes(self) -> bytes:
        return f"{json.dumps({'name': self.name, 'fields': self.fields}, indent=2, sort_keys=True)}\n".encode()

    @classmethod
    def for_cpu(
        cls,
        *,
        compiler: str = "g++",
        llvm: str | None = None,
        proc: Path = Path("/proc"),
        system: Path = Path("/sys"),
        machine: str | None = None,
        cores: int | None = None,
    ) -> DeviceKey:
        """This machine's CPU, as far as this process may use it. Runs the compiler once, to ask for its version.

        `llvm` is the target (triple and CPU) that code is generated for, by default the machine's level. A process
        with another set of cores (such as a child of fewer threads) has another key: hand the key down, by its fields.
        """
        machine = machine or platform.machine()
        name, features = _cpu_of(_read(proc / "cpuinfo"), machine)
        level = x86_level(features) if machine == "x86_64" else "generic"
        return cls(
            {
                "kind": "cpu",
                "name": name,
                "architecture": machine,
                "features": features,
                "cores": len(os.sched_getaffinity(0)) if cores is None else cores,
                "cpu_quota": _cpu_quota(proc, system / "fs" / "cgroup"),
                "caches": _caches(system / "devices" / "system" / "cpu" / "cpu0" / "cache"),
                "toolchain": {
                    "tvm": package_version("apache-tvm"),
                    "tvm_ffi": package_version("apache-tvm-ffi"),
                    "llvm": llvm or f"{machine}-unknown-linux-gnu {level}",
                    "cxx": compiler_version(compiler),
                },
            }
        )


def device_from_file(path: Path, digest: str) -> DeviceKey | None:
    """The device key written there; None if there is none, or another than its folder's name says."""
    try:
        with open_private(path) as file:
            key = DeviceKey(json.loads(file.read(_MAX_DEVICE_FILE_BYTES))["fields"])
        return key if key.digest == digest else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def x86_level(features: Any) -> str:
    have, best = set(features), "x86-64"
    for level, needed in reversed(_X86_LEVELS):
        if not needed <= have:
            break
        best = level
    return best


def package_version(package: str) -> str:
    """The installed version and a digest of its native libraries' hashes (a version can be built twice); or "none"."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return "none"
    record = distribution.read_text("RECORD") or ""
    libraries = sorted(line for line in record.splitlines() if re.search(r"\.so(\.[0-9.]+)?,", line))
    return f"{distribution.version}+{digest_of_bytes(chr(10).join(libraries).encode())[:12]}"


def compiler_version(compiler: str) -> str:
    """Such as "g++ 12.2.0"; "none" where it is not there or does not answer."""
    try:
        ran = subprocess.run(
            [compiler, "-dumpfullversion", "-dumpversion"],
            capture_output=True,
            text=True,
            timeout=_COMPILER_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return f"{Path(compiler).name} {' '.join(ran.stdout.split())}"


def _cpu_of(cpuinfo: str, machine: str) -> tuple[str, list[str]]:
    """Name and sorted instruction sets, from the first processor's paragraph."""
    facts: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        field, _, value = line.partition(":")
        facts.setdefault(field.strip(), value.strip())
    if machine == "x86_64":
        family = " ".join(facts.get(field, "?") for field in ("vendor_id", "cpu family", "model", "stepping"))
        flags = facts.get("flags", "").split()
        return f"{facts.get('model name', 'x86-64')} ({family})", sorted(filter(_X86_FEATURES.fullmatch, flags))
    part = " ".join(
        facts.get(field, "?") for field in ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    )
    return f"{facts.get('model name', machine)} ({part})", sorted(facts.get("Features", "").split())


def _caches(folder: Path) -> dict[str, JSON]:
    """Bytes of each cache of the first core, such as {"L1 Data": 49152}; empty where the system does not tell."""
    found: dict[str, JSON] = {}
    for index in sorted(folder.glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size").strip())
        if size:
            level = f"L{_read(index / 'level').strip()} {_read(index / 'type').strip()}"
            found[level] = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
    return found


def _cpu_quota(proc: Path, cgroups: Path) -> float | None:
    """Cores' worth of time that the control groups allow, rounded to a tenth; None for no limit."""
    tightest = math.inf
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        root = cgroups if number == "0" else cgroups / "cpu"
        folder = root / group.lstrip("/")
        inside = [folder, *folder.parents]
        for each in inside[: inside.index(root) + 1]:
            if number == "0":
                words = _read(each / "cpu.max").split()
            else:
                words = [_read(each / "cpu.cfs_quota_us").strip(), _read(each / "cpu.cfs_period_us").strip()]
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                tightest = min(tightest, int(words[0]) / int(words[1]))
    return None if math.isinf(tightest) else round(tightest, 1)


def _read(path: Path) -> str:
    """A file's text; empty where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
