"""The seam between the pipeline and hardware-native kernels.

A template knows one family of kernels. For a workload that it matches it enumerates a few candidates, best guess first,
and builds any of them into a library with one tvm-ffi function, named by digest. Compiled modules call that function
by its name; nothing else couples them, so kernels are shared between models and may be made by any compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import TypeVar

from hone.compiler.target import CpuTarget
from hone.compiler.templates.packing import Packing
from hone.compiler.workload import Workload

#: What goes before the digest in a kernel's name.
KERNEL_PREFIX = "hone_kernel_"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal setting of a template's parameters."""

    template: str
    parameters: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, template: str, **parameters: int) -> Candidate:
        return cls(template, tuple(sorted(parameters.items())))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Candidate:
        return cls(fields["template"], tuple(sorted((name, int(v)) for name, v in fields["parameters"].items())))

    def fields(self) -> dict[str, Any]:
        return {"template": self.template, "parameters": dict(self.parameters)}

    def __getitem__(self, name: str) -> int:
        for key, value in self.parameters:
            if key == name:
                return value
        raise KeyError(name)

    def __str__(self) -> str:
        return self.template + "(" + ", ".join(f"{name}={value}" for name, value in self.parameters) + ")"


class BuiltKernel(Protocol):
    """A built candidate, callable in this process and ready to be exported."""

    name: str
    digest: str

    def __call__(self, *tensors: Any) -> None:
        """Run it on TVM tensors: the workload's inputs in order, packed as the template's `packing` says, then the
        output, which it overwrites wholly."""

    def export(self, path: Path) -> None:
        """Write the shared library. Raises LinkFailed."""


#: The kind of device that a template is for.
TargetT_contra = TypeVar("TargetT_contra", contravariant=True, default=CpuTarget)


class Template(Protocol[TargetT_contra]):
    """One family of kernels. Stateless: the same workload, candidate and target give the same library."""

    name: str

    def matches(self, workload: Workload, target: TargetT_contra) -> bool:
        """Whether this template can do the workload. `candidates` is then not empty."""

    def candidates(self, workload: Workload, target: TargetT_contra) -> Sequence[Candidate]:
        """Every candidate worth a measurement (some tens at most), the one to take unmeasured first."""

    def packing(self, workload: Workload, candidate: Candidate, target: TargetT_contra) -> Mapping[int, Packing]:
        """How the candidate's kernel wants inputs that are weights, by position; others come as the workload has them.

        Only positions in `workload.weights` are prepared at load; a packing of another input runs in every call.
        """

    def digest(self, workload: Workload, candidate: Candidate, target: TargetT_contra) -> str:
        """Names the library that `build` would give, without building it."""

    def build(self, workload: Workload, candidate: Candidate, target: TargetT_contra) -> BuiltKernel:
        """Raises BuildFailed when the candidate does not compile: an expected outcome of a search."""
