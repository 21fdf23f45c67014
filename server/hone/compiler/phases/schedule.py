"""Schedule: every function that no template took gets parallel outer loops and vectorised inner loops.

A function that a search found a better schedule for (a MetaSchedule trace, by our own digest) gets that instead.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi.structural
from tvm import relax, tirx
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import Trace

from hone.compiler.choices import Choices
from hone.compiler.nans import keep_nan
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from hone.kernels.digest import digest_of

logger = logging.getLogger(__name__)

SEARCHED = "searched"


@dataclass(frozen=True, slots=True)
class ScheduledFunction:
    """One function of the module and how it was scheduled: the report behind "what was fused into what"."""

    name: str
    digest: str
    rule: str
    microseconds: float
    parallel: bool
    num_calls: int
    """From `main`; 0 for what only prepares weights, once a load."""


def schedule(mod: tvm.IRModule, target: CpuTarget, choices: Choices) -> tuple[tvm.IRModule, list[ScheduledFunction]]:
    functions = dict(mod.functions.items())
    calls = calls_of_main(mod)
    report = []
    for name, func in functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        digest = function_digest(func)
        trace = choices.schedules.get(digest)
        searched = apply_trace(func, trace) if trace is not None else None
        plain = plain_schedule(func, target)
        functions[name] = keep_nan(searched if searched is not None else plain.func)
        report.append(
            ScheduledFunction(
                name=str(name.name_hint),
                digest=digest,
                rule=SEARCHED if searched is not None else plain.rule,
                microseconds=plain.microseconds,
                parallel=plain.parallel if searched is None else "T.parallel" in searched.script(),
                num_calls=calls.get(str(name.name_hint), 0),
            )
        )
    return tvm.IRModule(functions, attrs=mod.attrs), report


def calls_of_main(mod: tvm.IRModule) -> dict[str, int]:
    """How often `main` calls each function, by name."""
    counts: dict[str, int] = {}

    def see(call: Any) -> None:
        if isinstance(call, relax.Call) and getattr(call.op, "name", "") == "relax.call_tir":
            name = str(call.args[0].name_hint)
            counts[name] = counts.get(name, 0) + 1

    relax.analysis.post_order_visit(mod["main"], see)
    return counts


def function_digest(func: Any) -> str:
    """Of what an unscheduled function computes, whatever it and its buffers are called.

    TVM's structural hash has 64 bits; shapes and dtypes are told beside it. A trace found under a wrong name would be
    refused by the schedule or would be slow: it cannot change what is computed.
    """
    bare = func.without_attr("global_symbol") if func.attrs and "global_symbol" in func.attrs else func
    return digest_of(
        {
            "function": f"{tvm_ffi.structural.structural_hash(bare):016x}",
            "arguments": [[[str(dim) for dim in param.shape], str(param.dtype)] for param in func.params],
        }
    )


def apply_trace(func: Any, trace: str) -> Any | None:
    """The function scheduled as a search recorded it; None where the record does not fit (it is then not used)."""
    schedule = Schedule(func)
    try:
        Trace.apply_json_to_schedule(json.loads(trace), schedule)
    except (ScheduleError, ValueError, TypeError, RuntimeError) as problem:
        logger.warning("a recorded schedule does not fit its function: %s", str(problem).splitlines()[0])
        return None
    return schedule.mod["main"].with_attrs(dict(func.attrs or {}))


def trace_text(schedule: Schedule) -> str:
    """What was done to a schedule, as JSON that `apply_trace` does again."""
    return json.dumps(schedule.trace.as_json(), default=_plain_json)


def _plain_json(value: Any) -> Any:
    """TVM's containers and numbers as JSON has them."""
    if hasattr(value, "items"):
        return dict(value.items())
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.FloatImm):
        return float(value)
    if hasattr(value, "__iter__"):
        return list(value)
    return str(value)
