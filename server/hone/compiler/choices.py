"""What a search decided, as the pipeline takes it: which candidate for which workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX, BuiltKernel, Candidate, Template
from hone.compiler.workload import Workload


@dataclass(frozen=True, slots=True)
class Choices:
    """Measured choices. A workload without one gets its template's first candidate, a function its plain schedule.

    `kernels` maps a workload's digest to the candidate that won; `schedules` maps a function's digest (see
    `phases/schedule.py`) to the JSON trace of the MetaSchedule record that beat the plain schedule.
    """

    kernels: Mapping[str, Candidate] = field(default_factory=dict)
    schedules: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class KernelCall:
    """One kernel of a compiled model and how many calls of it there are."""

    workload: Workload
    template: Template
    candidate: Candidate
    digest: str
    num_calls: int = 0

    @property
    def name(self) -> str:
        return KERNEL_PREFIX + self.digest

    def build(self, target: CpuTarget) -> BuiltKernel:
        """Raises BuildFailed."""
        return self.template.build(self.workload, self.candidate, target)
