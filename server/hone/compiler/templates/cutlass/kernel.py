"""What CUTLASS's templates share: a recipe that names and renders a kernel, its build, and calling it."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm_ffi

from hone.compiler.build import LinkFailed
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.cutlass.render import SOURCES, render
from hone.compiler.templates.cutlass.resources import KernelResources
from hone.compiler.templates.cutlass.toolchain import CompileReport, CudaToolchain, find_toolchain, machine_failed
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import Workload
from hone.kernels.digest import digest_of, digest_of_bytes

#: After the function's name: how many bytes of shared memory a block asks for at launch.
SHARED_BYTES = "_shared_bytes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a kernel's source is made of: no sizes of problems are in it.

    `source` names a template of `sources/`, `values` (plain JSON) fill it in; `folders` are include folders below
    CUTLASS's own; `num_gib` is the memory that its compilation takes.
    """

    source: str
    values: Mapping[str, Any]
    num_gib: float = 1.2
    folders: tuple[str, ...] = field(default=())


class CutlassKernel:
    """A compiled kernel: one library with one tvm-ffi function. The file goes when the kernel does."""

    def __init__(self, digest: str, recipe: Recipe, target: CudaTarget, toolchain: CudaToolchain) -> None:
        """Compiles. Raises BuildFailed."""
        self.name, self.digest = KERNEL_PREFIX + digest, digest
        self.source = render(recipe.source, {**recipe.values, "name": self.name})
        self._toolchain = toolchain
        try:
            folder = Path(tempfile.mkdtemp(prefix="hone-kernel-"))
        except OSError as problem:
            raise machine_failed(problem) from problem
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / "kernel.so"
        folders = [*(toolchain.cutlass / name for name in recipe.folders), SOURCES / "stand_ins"]
        self.report: CompileReport = toolchain.compile(
            self.source, self.path, target, num_gib=recipe.num_gib, folders=folders
        )

    def __call__(self, *tensors: Any) -> None:
        self._function(*tensors)

    def export(self, path: Path) -> None:
        try:
            shutil.copyfile(self.path, path)
        except OSError as problem:
            raise LinkFailed(f"kernel {self.digest} could not be written to {path}: {problem.strerror}") from problem

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of one block; None for twins, which have none."""
        self._toolchain.load_runtime()
        library = ctypes.CDLL(str(self.path))
        try:
            return int(ctypes.c_int64.in_dll(library, self.name + SHARED_BYTES).value)
        except ValueError:
            return None

    @property
    def resources(self) -> tuple[KernelResources, ...]:
        return self.report.resources

    @cached_property
    def _module(self) -> Any:
        self._toolchain.load_runtime()
        return tvm_ffi.load_module(str(self.path), keep_module_alive=False)

    @cached_property
    def _function(self) -> Any:
        return self._module[self.name]


class CutlassTemplate:
    """A template whose kernels are CUTLASS's. Subclasses say what they match and try, and a candidate's recipe."""

    name: str

    def __init__(self, cuda_home: Path | None = None) -> None:
        """`cuda_home` is the CUDA toolkit to build with where PyPI's is not installed (see `find_toolchain`)."""
        self._cuda_home = cuda_home

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        raise NotImplementedError

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        raise NotImplementedError

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        """Of the kernel or, where the target says so, of its host twin (which knows no tiles)."""
        raise NotImplementedError

    def packing(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Mapping[int, Packing]:
        return {}

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int:
        """How many bytes the kernel's workspace must have; the kernel checks."""
        return 0

    def toolchain(self) -> CudaToolchain:
        """Raises ToolchainMissing."""
        return find_toolchain(self._cuda_home)

    def digest(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> str:
        return recipe_digest(self.recipe(workload, candidate, target), target, self.toolchain())

    def build(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> CutlassKernel:
        recipe, toolchain = self.recipe(workload, candidate, target), self.toolchain()
        return CutlassKernel(recipe_digest(recipe, target, toolchain), recipe, target, toolchain)


def recipe_digest(recipe: Recipe, target: CudaTarget, toolchain: CudaToolchain) -> str:
    """Names a kernel: its source, architecture, compiler and CUTLASS."""
    return digest_of(kernel_key(recipe, target, toolchain))


def kernel_key(recipe: Recipe, target: CudaTarget, toolchain: CudaToolchain) -> dict[str, Any]:
    """What a kernel's digest is of. The source stands for the recipe: what does not change it changes no kernel."""
    source = render(recipe.source, {**recipe.values, "name": KERNEL_PREFIX})
    return {
        "kind": "kernels",
        "template": recipe.source,
        "source_sha256": digest_of_bytes(source.encode()),
        "folders": list(recipe.folders),
        "arch": "twin" if target.twin else target.arch,
        "toolchain": toolchain.fields(),
    }
