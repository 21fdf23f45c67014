"""Packs what a machine with a GPU needs to run `run.sh`, in parts that are easily brought there.

`python -m benchmarks.gpu.bundle OUT [--arch 90a] [--limit 8] [--models NAME=FILE:1,8] [--tuning] [--python 312]`.
Kernels come from the kernels cache and are built into it where they are missing, which needs no GPU; `--plan` only
tells what. `--small` packs host twins of small problems, for trying the way without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cpu_models import Input
from benchmarks.gpu.bundle_tuning import add_tuning
from benchmarks.gpu.families import TABLE as CHECKED
from benchmarks.gpu.families import family_rows
from benchmarks.gpu.nets import NETS, write
from benchmarks.gpu.rows import Row, all_rows, small_rows
from benchmarks.gpu.torch_nodes import graph_nodes
from hone.compiler.build import BuildFailed
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.published import published_kernel, scope_of
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import TensorType, Workload
from hone.engines.cuda_runtime import library_places
from hone.kernels import Entry, KernelsCache

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Below 50 MB, however those are counted.
PART_BYTES = 49_000_000
#: Seconds that a kernel takes to build, by what its template is of: for the plan.
_SECONDS = {"3x": 55.0}
_USUAL_SECONDS = 10.0
#: Guesses below this place are worse than building the first.
_MAX_RANK = 6
#: Of each family, what is compared with float64.
_NUM_CHECKED = 1
#: What the device's script imports of hone, and these import nothing else of it.
_PYTHON = ("__init__.py", "types.py", "errors.py", "config.py", "strings.py", "specialization.py", "engines")
#: Of benchmarks.gpu, what runs on the other machine.
_DEVICE = ("device", "journal", "bench", "places", "reference", "table", "models", "torch_graph", "tuning")
_TVM = ("libtvm_runtime.so", "libtvm_runtime_extra.so", "libtvm_runtime_cuda.so")
_WHEELS = ("apache-tvm-ffi==0.1.14.post1", "ml-dtypes<=0.5.4")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the parts")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--limit", type=int, default=8, help="candidates a row")
    parser.add_argument("--kernels-cache", type=Path, default=ROOT / "kernels_cache")
    parser.add_argument("--python", nargs="*", default=[], help="such as 312: fetch wheels for these versions")
    parser.add_argument(
        "--models",
        nargs="*",
        default=[],
        help="what to compile: ONNX files as NAME=PATH:BATCH,BATCH, or nets of nets.py as NAME:BATCH,BATCH",
    )
    parser.add_argument("--match", nargs="*", default=[], help="only rows whose table or name holds one of these")
    parser.add_argument(
        "--tuning", metavar="NAME:BATCH", help="times tuning a net of nets.py there: brings TVM's compiler and hone"
    )
    parser.add_argument("--no-build", action="store_true", help="only kernels that the cache holds")
    parser.add_argument("--small", action="store_true", help="host twins of small problems")
    parser.add_argument("--plan", action="store_true", help="tell what would be built")
    told = parser.parse_args(arguments)
    try:
        target = CudaTarget.typical(told.arch)
    except ValueError as problem:
        parser.error(str(problem))
    if told.small:
        target = target.as_twin()
    rows = rows_for(target, told.match)
    if told.plan:
        plan(rows, target, told.limit, KernelsCache(told.kernels_cache))
        return 0
    told.out.mkdir(parents=True, exist_ok=True)
    for old in told.out.glob("*.part[0-9][0-9]"):
        old.unlink()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "bundle"
        cache = KernelsCache(told.kernels_cache)
        limit = 1 if told.small else told.limit
        make(folder, rows, target, limit=limit, cache=cache, build=not told.no_build)
        for model in told.models:
            add_model(folder, model, target, cache, build=not told.no_build)
        if told.python:
            fetch_wheels(folder / "wheels", told.python)
        parts = []
        if told.tuning:
            apart = Path(made) / "tuning"
            python = told.python[0] if told.python else f"{sys.version_info.major}{sys.version_info.minor}"
            limit = 0 if told.no_build else told.limit
            tuned = add_tuning(apart, told.tuning, target, cache, limit=limit, python=python, models=folder / "models")
            described = json.loads((folder / "bundle.json").read_text(encoding="utf-8")) | {"tuning": tuned}
            (folder / "bundle.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
            parts += pack(apart, told.out, "tuning")
        parts += pack(folder, told.out, "bundle")
        finish(parts, told.out)
    for path in parts:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def rows_for(target: CudaTarget, match: Sequence[str] = ()) -> list[Row]:
    """B0, without the families that the architecture has not, then B1 to B6; small ones for twins."""
    rows = [*family_rows(small=target.twin), *(small_rows() if target.twin else all_rows())]
    wanted = [
        row
        for row in rows
        if not match or any(text in (row.table, *row.name.split()) or text in row.name for text in match)
    ]
    return [row for row in wanted if row.table != CHECKED or next(candidates_of(row, target, 1), None) is not None]


def candidates_of(row: Row, target: CudaTarget, limit: int) -> Iterator[tuple[Any, Any]]:
    """(template, candidate) of those that the row is for, the best guesses of each template in turns."""
    lists = [
        [(template, one) for one in template.candidates(row.workload, target) if _is_wanted(row, one)]
        for template in takers(row.workload, target, CUTLASS_TEMPLATES)
        if row.template in ("", template.name)
    ]
    limit = _NUM_CHECKED if row.table == CHECKED else limit
    found = 0
    for at in range(max(map(len, lists), default=0)):
        for each in lists:
            if at < len(each) and found < limit:
                found += 1
                yield each[at]


def is_cached(cache: KernelsCache, digest: str, target: CudaTarget) -> bool:
    return isinstance(cache.get("kernels", digest, scope_of(target)), Entry)


def _is_wanted(row: Row, candidate: Candidate) -> bool:
    return row.wants is None or row.wants(dict(candidate.parameters))


def plan(rows: Sequence[Row], target: CudaTarget, limit: int, cache: KernelsCache) -> None:
    seconds, known, missing = 0.0, 0, set()
    for row in rows:
        chosen = list(candidates_of(row, target, limit))
        print(f"{row.table}  {row.name}: {len(chosen)} candidates{'' if chosen else ' (no kernel takes it)'}")
        for template, candidate in chosen:
            digest = template.digest(row.workload, candidate, target)
            if is_cached(cache, digest, target):
                known += 1
            elif digest not in missing:
                missing.add(digest)
                seconds += next((s for word, s in _SECONDS.items() if word in template.name), _USUAL_SECONDS)
    print(f"{known} kernels are there, {len(missing)} are to be built: some {seconds / 60:.0f} minutes, one at a time")


def make(
    folder: Path, rows: Sequence[Row], target: CudaTarget, *, limit: int, cache: KernelsCache, build: bool = True
) -> None:
    """The bundle as a folder. A kernel that does not build is left out, and told; so is, unless to `build`, one that
    the cache has not."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "orders").mkdir()
    told = []
    for row in rows:
        kernels = []
        for template, candidate in candidates_of(row, target, limit):
            if not build and not is_cached(cache, template.digest(row.workload, candidate, target), target):
                print(f"left out: {candidate} of {row.name}: the cache has it not", file=sys.stderr)
                continue
            try:
                kernel = published_kernel(cache, template, row.workload, candidate, target)
            except BuildFailed as problem:
                print(f"left out: {candidate} of {row.name}: {problem}", file=sys.stderr)
                continue
            path = folder / "kernels" / f"{kernel.digest}.so"
            if not path.exists():
                kernel.export(path)
            workspace = max(1, template.workspace_bytes(row.workload, candidate, target))
            packed = {
                at: _order(folder / "orders", packing, row.workload.inputs[at])
                for at, packing in template.packing(row.workload, candidate, target).items()
            }
            kernels.append(
                {"digest": kernel.digest, "candidate": str(candidate), "workspace": workspace, "packed": packed}
            )
        fields = row.workload.fields()
        told.append(
            {
                "name": row.name,
                "table": row.table,
                "steps": list(row.steps),
                "parts": list(row.parts),
                "pads": list(row.pads),
                "kernels": kernels,
                **{name: fields[name] for name in ("op", "inputs", "output", "attributes", "epilogue")},
            }
        )
    described = {"arch": target.arch, "twin": target.twin, "rows": told, "models": [], "tuning": None}
    (folder / "bundle.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    shutil.copy(HERE / "run.sh", folder / "run.sh")
    benchmarks = folder / "python" / "benchmarks"
    (benchmarks / "gpu").mkdir(parents=True)
    for package in (benchmarks, benchmarks / "gpu"):
        (package / "__init__.py").touch()
    for name in _DEVICE:
        shutil.copy(HERE / f"{name}.py", benchmarks / "gpu" / f"{name}.py")
    for name in _PYTHON:
        source, to = ROOT / "server" / "hone" / name, folder / "python" / "hone" / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "onnxruntime.py"))
        else:
            shutil.copy(source, to)
    import tvm

    (folder / "tvm").mkdir()
    for name in _TVM[:1] if target.twin else _TVM:
        shutil.copy(Path(tvm.__file__).parent / "lib" / name, folder / "tvm" / name)
    runtime = next((path for path in library_places() if path.is_file()), None)
    if runtime is None:
        raise SystemExit("the CUDA runtime is missing: install requirements/dev.txt, or CUDA 13")
    shutil.copy(runtime, folder / "tvm" / runtime.name)


def _order(folder: Path, packing: Packing, source: TensorType) -> str:
    """A packing as what it is here: another order of the weight's items. Written once as positions to be read, for a
    machine that has no compiler to run it. Returns its name.

    Raises ValueError for one that does more than that.
    """
    import numpy as np
    import tvm

    positions = replace(packing, result=replace(packing.result, dtype="int32"))
    func = positions.prim_func(replace(source, dtype="int32")).with_attr("global_symbol", "pack")
    built = tvm.tirx.build(tvm.IRModule({"pack": func}), target="llvm")["pack"]
    numbers = np.arange(source.num_elements, dtype=np.int32).reshape(source.shape)
    found = tvm.runtime.tensor(np.full(packing.result.shape, -1, np.int32))
    built(tvm.runtime.tensor(numbers), found)
    order = found.numpy()
    if not np.array_equal(np.sort(order, axis=None), numbers.reshape(-1)):
        raise ValueError(f"a weight of {source} is packed by more than another order of its items")
    name = hashlib.sha256(repr(order.shape).encode() + order.tobytes()).hexdigest()[:16]
    np.save(folder / f"{name}.npy", order)
    return name


def add_model(folder: Path, told: str, target: CudaTarget, cache: KernelsCache, *, build: bool = True) -> None:
    """`NAME=PATH:BATCH,BATCH` or `NAME:BATCH,BATCH`: an artifact for each batch. Workloads get the best guess of those
    that the cache has kernels of, else the first, which are built: what a tuner starts from."""
    import numpy as np
    import onnx
    from onnx import helper

    from hone.compiler.artifact import derived_constants
    from hone.compiler.choices import Choices
    from hone.compiler.cuda.export import export_cuda_artifact
    from hone.compiler.cuda.pipeline import compile_cuda_model, cuda_workloads
    from hone.compiler.onnx_import import Unsupported, import_model
    from hone.compiler.phases.precision import Precision
    from hone.compiler.templates.cutlass.toolchain import find_toolchain

    file, batches = told.rsplit(":", 1)
    name, _, path = file.partition("=")
    place = folder / "models" / name
    place.mkdir(parents=True)
    if path:
        shutil.copy(path, place / "model.onnx")
    elif name in NETS:
        write(name, place).rename(place / "model.onnx")
    else:
        raise SystemExit(f"'{name}' is no net of nets.py, which has {', '.join(NETS)}: name a file as {name}=PATH")
    model = place / "model.onnx"
    graph = onnx.load(model).graph
    initial = {one.name for one in graph.initializer}
    inputs = [one for one in graph.input if one.name not in initial]
    known = {one.name: one for one in NETS[name].inputs} if name in NETS else {}
    (place / "nodes.json").write_text(json.dumps(graph_nodes(graph)), encoding="utf-8")
    described = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    for batch in map(int, batches.split(",")):
        shapes = {one.name: _shape(one, batch, known.get(one.name)) for one in inputs}
        imported = import_model(model, shapes)
        if isinstance(imported, Unsupported):
            raise SystemExit(f"{name}: {imported.reason}")
        choices = Choices(precision=Precision("f16"))
        at_hand = kernels_at_hand(cuda_workloads(imported, target, choices).counts, target, cache)
        print(f"{name}, batch {batch}: the first guess for {len(at_hand)} workloads is there")
        compiled = compile_cuda_model(imported, target, replace(choices, kernels=at_hand))
        missing = [call for call in compiled.kernels if not is_cached(cache, call.digest, target)]
        if missing and not build:
            raise SystemExit(
                f"{name}, batch {batch}: the cache has {len(missing)} of {len(compiled.kernels)} kernels not, such as"
                f" {missing[0].candidate}: leave out --no-build, or that batch"
            )
        artifact = place / str(batch)
        artifact.mkdir()
        toolchain = None if target.twin else find_toolchain()
        exported = export_cuda_artifact(compiled, imported, "0" * 64, artifact, toolchain)
        (artifact / "manifest.json").write_text(json.dumps(exported.manifest), encoding="utf-8")
        np.savez(artifact / "constants.npz", **derived_constants(imported))  # type: ignore[arg-type]
        for call in compiled.kernels:
            kernel = published_kernel(cache, call.template, call.workload, call.candidate, target)  # type: ignore[arg-type]
            to = folder / "kernels" / f"{kernel.digest}.so"
            if not to.exists():
                kernel.export(to)
        dtypes = {one.name: helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type).name for one in inputs}
        given = {one: [list(shape), dtypes[one]] for one, shape in shapes.items()}
        ranges = {one.name: [int(one.low), int(one.high)] for one in known.values() if one.high > one.low}
        described["models"].append({"name": name, "batch": batch, "inputs": given, "ranges": ranges})
    (folder / "bundle.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


def _shape(told: Any, batch: int, known: Input | None) -> tuple[int, ...]:
    """Of an input, whose first dimension is the batch; a net tells its own. Raises SystemExit."""
    if known is not None:
        return (batch, *known.shape)
    dims = [dim.dim_value for dim in told.type.tensor_type.shape.dim[1:]]
    if 0 in dims:
        raise SystemExit(f"input '{told.name}' has free dimensions beside its batch: fix them in the file")
    return (batch, *dims)


def kernels_at_hand(workloads: Iterable[Workload], target: CudaTarget, cache: KernelsCache) -> dict[str, Candidate]:
    """By the workload's digest, the highest ranked candidate whose kernel needs no building; without those that have
    none."""
    found = {}
    for workload in workloads:
        lists = [(one, one.candidates(workload, target)) for one in takers(workload, target, CUTLASS_TEMPLATES)]
        ranked = [(template, at[rank]) for rank in range(_MAX_RANK) for template, at in lists if rank < len(at)]
        for template, candidate in ranked:
            digest = template.digest(workload, candidate, target)
            if is_cached(cache, digest, target):
                found[workload.digest] = candidate
                break
    return found


def fetch_wheels(folder: Path, versions: Sequence[str]) -> None:
    """For Linux on x86-64, through pip."""
    for version in versions:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
        command += ["--python-version", version, "--dest", str(folder), *_WHEELS]
        subprocess.run(command, check=True)


def pack(folder: Path, out: Path, name: str) -> list[Path]:
    """The folder as parts of an archive, in which it has this name."""
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:gz") as archive:
            archive.add(folder, name)
        whole.seek(0)
        parts: list[Path] = []
        while data := whole.read(PART_BYTES):
            path = out / f"{name}.part{len(parts):02d}"
            path.write_bytes(data)
            parts.append(path)
    return parts


def finish(parts: Sequence[Path], out: Path) -> None:
    """The parts' digests, and run.sh, beside them."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in parts]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
    shutil.copy(HERE / "run.sh", out / "run.sh")


if __name__ == "__main__":
    raise SystemExit(main())
