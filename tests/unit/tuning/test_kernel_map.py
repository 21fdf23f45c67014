"""The kernel map that an artifact keeps: every kernel with what the search measured, and the functions beside them."""

from __future__ import annotations

from typing import Any, cast

from hone.compiler.choices import KernelCall
from hone.compiler.phases.schedule import ScheduledFunction
from hone.compiler.templates.base import Candidate
from hone.compiler.workload import TensorType, Workload
from hone.tuning.kernel_map import kernel_map

DENSE = Workload(
    "matmul", (TensorType((2, 8), "float32"), TensorType((8, 4), "float32")), TensorType((2, 4), "float32")
)
WINNER, OTHER = Candidate("cpu.matmul", (("rows", 2),)), Candidate("cpu.matmul", (("rows", 1),))


def call(candidate: Candidate) -> KernelCall:
    return KernelCall(DENSE, cast(Any, None), candidate, "0" * 64, num_calls=3)


def function(name: str, num_calls: int) -> ScheduledFunction:
    return ScheduledFunction(name, "f" * 64, "element-wise", 0.0, False, num_calls)


def untimed(function: ScheduledFunction) -> None:
    """No search measured it."""


def test_kernels_have_the_time_of_their_own_candidate() -> None:
    ranking = [{**WINNER.fields(), "ns": 50.0, "turn": 1}, {**OTHER.fields(), "ns": 70.0, "turn": 0}]
    lines = kernel_map([call(OTHER)], (), lambda workload: {"limit_ns": 10.0, "ranking": ranking}, untimed)
    assert lines == [
        {
            "what": "matmul 2x8 x 8x4",
            "template": "cpu.matmul",
            "parameters": {"rows": 1},
            "rule": "",
            "num_calls": 3,
            "call_ns": 70.0,
            "limit_ns": 10.0,
            "operations": 128.0,
            "note": "",
        }
    ]


def test_what_was_not_measured_says_so() -> None:
    (nothing,) = kernel_map([call(WINNER)], (), lambda workload: None, untimed)
    (another,) = kernel_map(
        [call(WINNER)], (), lambda workload: {"limit_ns": 9.0, "ranking": [{**OTHER.fields(), "ns": 1.0}]}, untimed
    )
    assert (nothing["call_ns"], nothing["limit_ns"]) == (None, None)
    assert (another["call_ns"], another["limit_ns"]) == (None, 9.0)


def test_functions_that_an_inference_calls_are_told_of() -> None:
    lines = kernel_map(
        [],
        [function("relu", 2), function("pack", 0), function("softmax", 1)],
        lambda workload: None,
        lambda one: 7e3 if one.name == "softmax" else None,
    )
    assert [(line["what"], line["rule"], line["num_calls"], line["call_ns"]) for line in lines] == [
        ("relu", "element-wise", 2, None),
        ("softmax", "element-wise", 1, 7e3),
    ]


def test_notes_are_of_the_workload() -> None:
    (line,) = kernel_map([call(WINNER)], (), lambda workload: None, untimed, lambda workload: f"about {workload.op}")
    assert line["note"] == "about matmul"
