"""`hone doctor`: what this machine is, what is installed, what is missing and what that costs."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


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

    device = DeviceKey.for_cpu()
    findings = examine(arguments.kernels_cache)
    if arguments.json:
        told = {"device": {"name": device.name, "digest": device.digest, "fields": dict(device.fields)}}
        print(json.dumps({**told, "findings": [asdict(finding) for finding in findings]}))
        return 0
    print(f"device   {device.name}")
    print(f"key      {device.digest}")
    for finding in findings:
        print(f"{'ok     ' if finding.found else 'missing'}  {finding.name}: {finding.found or finding.cost}")
    return 0


def examine(kernels_cache: Path) -> list[Finding]:
    return [
        _package("onnxruntime", "nothing can be served"),
        _package("apache-tvm", "models stay on ONNX Runtime: nothing is compiled, no artifact runs"),
        _package("apache-tvm-ffi", "models stay on ONNX Runtime: no artifact runs"),
        _package("xgboost-cpu", "operators without a template are not searched with MetaSchedule's cost model"),
        _program("g++", "nothing is compiled here; what the cache holds is used (on Debian: apt-get install g++)"),
        _program("nvcc", "no kernels for NVIDIA GPUs are built here"),
        _gpu(),
        _cache(kernels_cache),
    ]


def _package(name: str, cost: str) -> Finding:
    try:
        return Finding(name, metadata.version(name), cost)
    except metadata.PackageNotFoundError:
        return Finding(name, "", cost)


def _program(name: str, cost: str) -> Finding:
    return Finding(name, shutil.which(name) or "", cost)


def _gpu() -> Finding:
    import pynvml

    cost = "models run on the CPU"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return Finding("NVIDIA GPU", "", f"{cost} ({problem})")
    try:
        names = [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(number)))
            for number in range(pynvml.nvmlDeviceGetCount())
        ]
    finally:
        pynvml.nvmlShutdown()
    return Finding("NVIDIA GPU", ", ".join(names), cost)


def _cache(root: Path) -> Finding:
    from hone.kernels import CacheUnsafe, KernelsCache

    try:
        cache = KernelsCache(root, create=False)
        if not cache.exists:
            return Finding("kernels cache", "", f"{root} does not exist yet: the first tuning makes it")
    except CacheUnsafe as problem:
        return Finding("kernels cache", "", str(problem))
    return Finding("kernels cache", str(cache.path))
