"""What a search decided, as the pipeline takes it: which candidate for which workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.compiler.phases.precision import F32, Precision
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX, BuiltKernel, Candidate, Template
from hone.compiler.workload import Workload


@dataclass(frozen=True, slots=True)
class Choices:
    """Measured choices. A workload without one gets its template's first candidate, a function its plain schedule.

    `kernels` maps a workload's digest to the candidate that won; `schedules` maps a function's digest (see
    `phases/schedule.py`) to the JSON trace of the MetaSchedule record that beat the plain schedule. `precision` is what
    layers compute in. `paddings` (GPUs) maps an operator, by the digest of its bare workload, to what its sizes are
    rounded up to a multiple of.
    """

    kernels: Mapping[str, Candidate] = field(default_factory=dict)
    schedules: Mapping[str, str] = field(default_factory=dict)
    precision: Precision = F32
    paddings: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class KernelCall:
    """One kernel of a compiled model and how many calls of it there are."""

    workload: Workload
    template: Template[Any]
    candidate: Candidate
    digest: str
    num_calls: int = 0

    @property
    def name(self) -> str:
        return KERNEL_PREFIX + self.digest

    def build(self, target: CpuTarget) -> BuiltKernel:
        """Raises BuildFailed."""
        return self.template.build(self.workload, self.candidate, target)
