"""Packs what the row that times tuning needs: wheels, hone, the model, and the kernels that its search will want."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.nets import NETS, write
from hone.compiler.build import BuildFailed
from hone.compiler.choices import Choices
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda.pipeline import cuda_workloads
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.onnx_import import Unsupported, import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.published import published_kernel, scope_of
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.workload import Workload
from hone.kernels import Built, Entry, KernelsCache

ROOT = Path(__file__).parents[2]
#: All that hone imports, and what makes code for GPUs.
_REQUIREMENTS = ("runtime.txt", "cuda-compiler.in")
#: Only shown to people, or for other things than tuning: 12 MB.
_NOT_NEEDED = ("nvidia_cuda_cuobjdump", "nvidia_cuda_nvdisasm", "pillow")
#: On a machine without a GPU the CPU is tuned: that tries the way, and its seconds mean nothing.
_CONFIG = """name: "{name}"
backend: "onnxruntime"
max_batch_size: 0
optimization {{ execution_accelerators {{
  gpu_execution_accelerator: [ {{
    name: "tvm"
    parameters {{ key: "precision" value: "f16" }}
    parameters {{ key: "signatures" value: "{signature}" }}
  }} ]
  cpu_execution_accelerator: [ {{ name: "tvm" parameters {{ key: "signatures" value: "{signature}" }} }} ]
}} }}
"""


def add_tuning(
    folder: Path, told: str, target: CudaTarget, cache: KernelsCache, *, limit: int, python: str, models: Path
) -> dict[str, Any]:
    """`told`: NAME:BATCH of a net of nets.py. `limit`: how many of each workload's guesses are built where the cache
    has them not; what it has beside is taken along. `models`: where the bundle's models are; one of the same name is
    not packed twice. Returns what the other machine is told.

    Raises SystemExit.
    """
    name, _, batch = told.partition(":")
    if name not in NETS or not batch.isdigit():
        raise SystemExit(f"--tuning {told}: expected NAME:BATCH, with one of {', '.join(NETS)}")
    version = folder / "repository" / name / "1"
    version.mkdir(parents=True)
    model = models / name / "model.onnx"
    is_shared = model.exists()
    if not is_shared:
        model = write(name, version).rename(version / "model.onnx")
    shapes = {one.name: (int(batch), *one.shape) for one in NETS[name].inputs}
    signature = ",".join(f"{one}:{'x'.join(map(str, shape))}" for one, shape in shapes.items())
    config = _CONFIG.format(name=name, signature=signature)
    (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    imported = import_model(model, shapes)
    if isinstance(imported, Unsupported):
        raise SystemExit(f"{name}: {imported.reason}")
    wanted = cuda_workloads(imported, target, Choices(precision=Precision("f16")))
    workloads = [*wanted.counts, *(pair.fused for pair in wanted.pairs)]
    num_kernels = _take_kernels(folder / "cache", workloads, target, cache, limit)
    package = folder / "hone" / "hone"
    shutil.copytree(ROOT / "server" / "hone", package, ignore=shutil.ignore_patterns("__pycache__"))
    fetch_wheels(folder / "wheels", python)
    return {"name": name, "batch": int(batch), "num_kernels": num_kernels, "is_shared": is_shared}


def _take_kernels(
    folder: Path, workloads: Sequence[Workload], target: CudaTarget, cache: KernelsCache, limit: int
) -> int:
    """Into a cache of their own; how many."""
    taken, scope = KernelsCache(folder), scope_of(target)
    digests = set()
    for workload in workloads:
        for rank, (template, candidate) in enumerate(_in_turns(workload, target)):
            digest = template.digest(workload, candidate, target)
            if digest in digests:
                continue
            found = cache.get("kernels", digest, scope)
            if not isinstance(found, Entry) and rank < limit:
                try:
                    published_kernel(cache, template, workload, candidate, target)
                except BuildFailed as problem:
                    print(f"left out: {candidate} of {workload}: {problem}", file=sys.stderr)
                found = cache.get("kernels", digest, scope)
            if isinstance(found, Entry):
                built = Built(dict(found.files), found.manifest)
                taken.get_or_build("kernels", digest, scope, lambda built=built: built)  # type: ignore[misc]
                digests.add(digest)
    return len(digests)


def _in_turns(workload: Workload, target: CudaTarget) -> Iterator[tuple[Any, Any]]:
    """All candidates, the best guesses of each template first."""
    lists = [(one, one.candidates(workload, target)) for one in takers(workload, target, CUTLASS_TEMPLATES)]
    for at in range(max((len(each) for _, each in lists), default=0)):
        for template, each in lists:
            if at < len(each):
                yield template, each[at]


def fetch_wheels(folder: Path, version: str) -> None:
    """For Linux on x86-64 and this version of Python (such as 312), through pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", version, "--dest", str(folder)]
    for tag in ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5"):
        command += ["--platform", f"manylinux_{tag}_x86_64"]
    for name in _REQUIREMENTS:
        subprocess.run([*command, "--requirement", str(ROOT / "requirements" / name)], check=True)
    for path in folder.iterdir():
        if path.name.startswith(_NOT_NEEDED):
            path.unlink()
