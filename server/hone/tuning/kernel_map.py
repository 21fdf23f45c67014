"""The kernel map of an artifact: what its module is made of, with the times that the search measured. Kept in its
manifest, so that a server shows it without running or importing anything; `explanation` measures a CPU's in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.compiler.choices import KernelCall
from hone.compiler.phases.schedule import ScheduledFunction
from hone.compiler.roofline import operations
from hone.compiler.workload import Workload

Recalled = Callable[[Workload], Mapping[str, Any] | None]
"""A workload's decision as the search kept it (`search.Search.ranking`); None where there is none."""
Timed = Callable[[ScheduledFunction], float | None]
"""Nanoseconds of a call of a function, where a search measured it (`schedules.FunctionSearch.nanoseconds`)."""


def kernel_map(
    kernels: Sequence[KernelCall],
    functions: Sequence[ScheduledFunction],
    recall: Recalled,
    timed: Timed,
    note_of: Callable[[Workload], str] = lambda workload: "",
) -> list[dict[str, Any]]:
    """A line for each kernel, then for each function that no template took and that an inference calls.

    `call_ns` is one call alone, as the search timed it, and `limit_ns` what the machine's roofline allows at least;
    null where the search did not measure it. `operations` are of one call. `note_of` tells people what a workload's
    sizes do not.
    """
    lines = [{**_line_of(call, recall(call.workload)), "note": note_of(call.workload)} for call in kernels]
    lines += [
        {
            "what": function.name,
            "template": "",
            "parameters": {},
            "rule": function.rule,
            "num_calls": function.num_calls,
            "call_ns": timed(function),
            "limit_ns": None,
            "operations": None,
            "note": "",
        }
        for function in functions
        if function.num_calls
    ]
    return lines


def _line_of(call: KernelCall, told: Mapping[str, Any] | None) -> dict[str, Any]:
    candidate = call.candidate
    measured = (told or {}).get("ranking", ())
    mine = candidate.fields()
    ns = next((one["ns"] for one in measured if {name: one.get(name) for name in mine} == mine), None)
    return {
        "what": str(call.workload),
        "template": candidate.template,
        "parameters": dict(candidate.parameters),
        "rule": "",
        "num_calls": call.num_calls,
        "call_ns": ns,
        "limit_ns": (told or {}).get("limit_ns"),
        "operations": operations(call.workload),
    }
