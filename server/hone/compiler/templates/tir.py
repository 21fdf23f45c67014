"""What templates written in TIR share: naming by digest, building, calling, exporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tvm.s_tir import ScheduleError

from hone.compiler.build import BuildFailed, Library, build_functions, source_digest, toolchain
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import Workload
from hone.kernels.digest import digest_of

_HERE = Path(__file__).parent


class TirKernel:
    """A kernel built by TVM: one function in one library."""

    def __init__(self, name: str, digest: str, library: Library) -> None:
        self.name, self.digest = name, digest
        self._library = library

    @cached_property
    def _function(self) -> Any:
        return self._library.function(self.name)

    def __call__(self, *tensors: Any) -> None:
        self._function(*tensors)

    def export(self, path: Path) -> None:
        self._library.export(path)

    @property
    def assembly(self) -> str:
        return self._library.assembly


class TirTemplate:
    """A template whose kernels are scheduled PrimFuncs. Subclasses say what they match, try, and compute."""

    name: str

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        raise NotImplementedError

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        raise NotImplementedError

    def packing(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Mapping[int, Packing]:
        """Nothing is packed unless a template says so."""
        return {}

    def prim_func(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> Any:
        """The scheduled function: arguments are the workload's inputs (packed, see `packing`), then the output."""
        raise NotImplementedError

    def digest(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> str:
        return digest_of(
            {
                "workload": workload.fields(),
                "candidate": candidate.fields(),
                "target": target.fields(),
                "sources": _sources(),
                "toolchain": toolchain(),
            }
        )

    def build(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> TirKernel:
        digest = self.digest(workload, candidate, target)
        name = KERNEL_PREFIX + digest
        try:
            func = self.prim_func(workload, candidate, target)
        except ScheduleError as problem:
            raise BuildFailed(f"{candidate} for {workload}", problem) from problem
        return TirKernel(name, digest, build_functions({name: func}, target))


@cache
def _sources() -> str:
    """All that turns a candidate into code: templates, epilogues, polynomials, the build itself."""
    folder = _HERE.parent
    return source_digest([*_HERE.rglob("*.py"), folder / "mathematics.py", folder / "build.py", folder / "target.py"])
