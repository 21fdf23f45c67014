"""What templates share whose kernels are rendered source: naming by digest, compiling, calling, exporting.

Nothing here knows a language or a device: a template says what source a candidate is and which compiler makes it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tvm_ffi

from hone.compiler.build import LinkFailed, source_digest
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.cpp.compiler import SourceCompiler
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import Workload
from hone.kernels.digest import digest_of

_HERE = Path(__file__).parent


class RenderedKernel:
    """A compiled source: one library with one tvm-ffi function. The file goes when the kernel does."""

    def __init__(self, name: str, digest: str, source: str, compiler: SourceCompiler) -> None:
        """Compiles. Raises BuildFailed."""
        self.name, self.digest, self.source = name, digest, source
        self._compiler = compiler
        folder = Path(tempfile.mkdtemp(prefix="hone-kernel-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = folder / "kernel.so"
        compiler.compile(source, self._path)

    @cached_property
    def _module(self) -> Any:
        return tvm_ffi.load_module(str(self._path), keep_module_alive=False)

    @cached_property
    def _function(self) -> Any:
        return self._module[self.name]

    def __call__(self, *tensors: Any) -> None:
        self._function(*tensors)

    def export(self, path: Path) -> None:
        try:
            shutil.copyfile(self._path, path)
        except OSError as problem:
            raise LinkFailed(f"kernel {self.digest} could not be written to {path}: {problem.strerror}") from problem

    @property
    def assembly(self) -> str:
        return self._compiler.assembly(self.source)


class RenderedTemplate:
    """A template whose kernels are rendered source. Subclasses say what they match and try, the text, the compiler."""

    name: str

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        raise NotImplementedError

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        raise NotImplementedError

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        return {}

    def source(self, name: str, workload: Workload, candidate: Candidate, target: CpuTarget) -> str:
        """The text of a library whose one tvm-ffi function is `name`."""
        raise NotImplementedError

    def compiler(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> SourceCompiler:
        """What compiles it. Raises BuildFailed when there is none here."""
        raise NotImplementedError

    def folders(self) -> tuple[Path, ...]:
        """Where all lies that turns a candidate into source: Python files, and templates of sources."""
        return (_HERE,)

    def digest(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> str:
        return digest_of(
            {
                "workload": workload.fields(),
                "candidate": candidate.fields(),
                "target": target.fields(),
                "sources": _sources(self.folders()),
                "compiler": self.compiler(workload, candidate, target).fields(),
            }
        )

    def build(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> RenderedKernel:
        digest = self.digest(workload, candidate, target)
        name = KERNEL_PREFIX + digest
        source = self.source(name, workload, candidate, target)
        return RenderedKernel(name, digest, source, self.compiler(workload, candidate, target))


@cache
def _sources(folders: tuple[Path, ...]) -> str:
    return source_digest([path for folder in folders for kind in ("*.py", "*.jinja") for path in folder.rglob(kind)])
