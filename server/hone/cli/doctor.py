"""`hone doctor`: what this machine is, what is installed, what is missing and what that costs."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hone.kernels import DeviceKey
    from hone.kernels.gpu_key import Gpu


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is empty for what is missing; `cost` says what does not work without it."""

    name: str
    found: str
    cost: str = ""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="tell what this machine offers and lacks",
        description="Tell the device key, the compilers and libraries, what is missing and what that costs.",
    )
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from hone.kernels import DeviceKey
    from hone.tuning.gpus import look_for_gpus

    device = DeviceKey.for_cpu()
    gpus, problem = look_for_gpus()
    findings = examine(arguments.kernels_cache, gpus, problem)
    if arguments.json:
        told = {"device": _described(device), "gpus": [_described(gpu.key) for gpu in gpus]}
        print(json.dumps({**told, "findings": [asdict(finding) for finding in findings]}))
        return 0
    for key in (device, *(gpu.key for gpu in gpus)):
        print(f"device   {key.name}")
        print(f"key      {key.digest}")
    for finding in findings:
        print(f"{'ok     ' if finding.found else 'missing'}  {finding.name}: {finding.found or finding.cost}")
    return 0


def _described(key: DeviceKey) -> dict[str, Any]:
    return {"name": key.name, "digest": key.digest, "fields": dict(key.fields)}


def examine(kernels_cache: Path, gpus: Sequence[Gpu] = (), no_gpus: str = "") -> list[Finding]:
    """`no_gpus`: why there are none."""
    return [
        _onnxruntime(),
        _package("apache-tvm", "models stay on ONNX Runtime: nothing is compiled, no artifact runs"),
        _package("apache-tvm-ffi", "models stay on ONNX Runtime: no artifact runs"),
        _package("xgboost-cpu", "operators without a template are not searched with MetaSchedule's cost model"),
        _program("g++", "nothing is compiled here; what the cache holds is used (on Debian: apt-get install g++)"),
        *_gpus(gpus, no_gpus),
        *_cuda_tools(),
        _cache(kernels_cache),
    ]


def _onnxruntime() -> Finding:
    """Two packages hold the same module, and the later one of two has overwritten the other."""
    found = [_package(name, "nothing can be served") for name in ("onnxruntime", "onnxruntime-gpu")]
    if all(one.found for one in found):
        told = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other: uninstall both, then"
        return Finding("onnxruntime", "", f"{told} install one of requirements/runtime.txt and runtime-cuda.txt")
    return found[1] if found[1].found else found[0]


def _gpus(gpus: Sequence[Gpu], problem: str) -> list[Finding]:
    from hone.kernels.gpu_key import unsupported

    cost = "models run on the CPU"
    if not gpus:
        return [Finding("NVIDIA GPU", "", f"{cost} ({problem or 'CUDA finds none'})")]
    findings = []
    for gpu in gpus:
        reason = unsupported(gpu.key)
        findings.append(Finding(f"GPU {gpu.ordinal}", "" if reason else gpu.key.name, reason or cost))
    cost = "models for GPUs start on the CPU: install requirements/runtime-cuda.txt"
    findings.append(Finding("ONNX Runtime's CUDA provider", _version("onnxruntime-gpu"), cost))
    return findings


def _cuda_tools() -> list[Finding]:
    from hone.kernels.gpu_key import nvcc_version

    nvcc = nvcc_version()
    cost = "no kernels for NVIDIA GPUs are built here, models on them stay on their baseline (pip install 'hone[cuda]')"
    return [
        Finding("nvcc", "" if nvcc == "none" else nvcc, cost),
        Finding("CUTLASS", _version("nvidia-cutlass"), cost),
        Finding("CUDA runtime", _cuda_runtime(), "GPUs are not used (install nvidia-cuda-runtime 13)"),
    ]


def _cuda_runtime() -> str:
    from hone.engines.cuda_runtime import CudaRuntime
    from hone.errors import EngineError

    try:
        version = CudaRuntime.load().runtime_version
    except EngineError:
        return ""
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _package(name: str, cost: str) -> Finding:
    return Finding(name, _version(name), cost)


def _program(name: str, cost: str) -> Finding:
    return Finding(name, shutil.which(name) or "", cost)


def _cache(root: Path) -> Finding:
    from hone.kernels import CacheUnsafe, KernelsCache

    try:
        cache = KernelsCache(root, create=False)
        if not cache.exists:
            return Finding("kernels cache", "", f"{root} does not exist yet: the first tuning makes it")
    except CacheUnsafe as problem:
        return Finding("kernels cache", "", str(problem))
    return Finding("kernels cache", str(cache.path))
