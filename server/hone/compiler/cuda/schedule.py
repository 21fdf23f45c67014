"""Schedule: what no kernel takes gets one of dlight's schedules for GPUs, or what a search found to be better.

Under a twin the same functions are scheduled for the CPU, as the compiler for CPUs does it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, ScheduleError, dlight

from hone.compiler.choices import Choices
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.nans import keep_nan
from hone.compiler.phases.schedule import (
    SEARCHED,
    ScheduledFunction,
    apply_trace,
    calls_of_main,
    function_digest,
)
from hone.compiler.phases.schedule import schedule as schedule_for_cpu
from hone.compiler.target import CpuTarget

logger = logging.getLogger(__name__)

#: From the most to the least specific; the first that applies wins, and the last one nearly always does.
_RULES = (
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)
_IS_SCHEDULED = "tirx.is_scheduled"


def schedule(
    mod: tvm.IRModule, target: CudaTarget, choices: Choices, host: CpuTarget
) -> tuple[tvm.IRModule, list[ScheduledFunction]]:
    """Every function bound to threads of a GPU, or scheduled for `host` where the target is a twin."""
    if target.twin:
        return schedule_for_cpu(mod, host, replace(choices, schedules={}))  # those are for GPUs
    functions = dict(mod.functions.items())
    calls = calls_of_main(mod)
    report = []
    for name, func in functions.items():
        if not isinstance(func, tirx.PrimFunc) or is_scheduled(func):
            continue
        digest = function_digest(func)
        trace = choices.schedules.get(digest)
        searched = apply_trace(func, trace) if trace is not None else None
        rule, scheduled = (SEARCHED, searched) if searched is not None else _by_rule(func, target)
        functions[name] = keep_nan(scheduled, on_gpu=True).with_attr(_IS_SCHEDULED, True)
        report.append(
            ScheduledFunction(
                name=str(name.name_hint),
                digest=digest,
                rule=rule,
                microseconds=round(modelled_microseconds(func, target), 2),
                parallel=True,
                num_calls=calls.get(str(name.name_hint), 0),
            )
        )
    return tvm.IRModule(functions, attrs=mod.attrs), report


def modelled_microseconds(func: Any, target: CudaTarget) -> float:
    """By the memory that the function's arguments take, once each."""
    num_bytes = 0
    for param in func.params:
        buffer = func.buffer_map[param] if hasattr(func, "buffer_map") and param in func.buffer_map else param
        items = 1
        for dim in getattr(buffer, "shape", ()):
            items *= int(dim)
        num_bytes += items * ((tvm.DataType(str(buffer.dtype)).bits + 7) // 8)
    return target.microseconds(0.0, num_bytes)


def plain_cuda_schedule(func: Any, target: CudaTarget) -> Any:
    """The function as it is scheduled without a search."""
    return _by_rule(func, target)[1]


def is_scheduled(func: Any) -> bool:
    return bool(func.attrs) and _IS_SCHEDULED in func.attrs and bool(func.attrs[_IS_SCHEDULED])


def _by_rule(func: Any, target: CudaTarget) -> tuple[str, Any]:
    tvm_target = target.tvm_target()
    for rule in _RULES:
        try:
            found = rule.apply(func, tvm_target, False)
        except (ScheduleError, ValueError, TypeError, KeyError, IndexError, RuntimeError, AssertionError) as problem:
            # A rule that misjudges a function is no rule for it; the next is simpler.
            logger.debug("dlight's %s does not apply: %s", type(rule).__name__, str(problem).partition("\n")[0])
            continue
        if found is None:
            continue
        made = found if isinstance(found, Schedule) else found[0]
        return type(rule).__name__.lower(), made.mod["main"].with_attrs(dict(func.attrs or {}))
    return "as it is", func
