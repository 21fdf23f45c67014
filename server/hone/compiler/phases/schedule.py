"""Schedule: every function that no template took gets parallel outer loops and vectorised inner loops."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx

from hone.compiler.choices import Choices
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget


@dataclass(frozen=True, slots=True)
class ScheduledFunction:
    """One function of the module and how it was scheduled: the report behind "what was fused into what"."""

    name: str
    rule: str
    microseconds: float
    parallel: bool


def schedule(mod: tvm.IRModule, target: CpuTarget, choices: Choices) -> tuple[tvm.IRModule, list[ScheduledFunction]]:
    functions = dict(mod.functions.items())
    report = []
    for name, func in functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        scheduled = plain_schedule(func, target)
        functions[name] = scheduled.func
        report.append(
            ScheduledFunction(str(name.name_hint), scheduled.rule, scheduled.microseconds, scheduled.parallel)
        )
    return tvm.IRModule(functions, attrs=mod.attrs), report
