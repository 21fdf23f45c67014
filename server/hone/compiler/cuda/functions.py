"""Functions that no kernel takes, one by one: which a model has, how one is built, a search for better schedules.

None of it needs a GPU but the timing, which is the caller's (see `metaschedule.Bench`): MetaSchedule makes its
proposals from the target's limits alone, and nvcc compiles them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from hone.compiler.build import BuildFailed, Library
from hone.compiler.choices import Choices
from hone.compiler.cuda.build import compiled_by
from hone.compiler.cuda.partition import Templates
from hone.compiler.cuda.pipeline import cuda_functions
from hone.compiler.cuda.schedule import is_scheduled, modelled_microseconds, plain_cuda_schedule
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.metaschedule import (
    Bench,
    Progress,
    RemainingFunction,
    SearchResult,
    called_functions,
    search_on,
)
from hone.compiler.pipeline import Model
from hone.compiler.proposals import Proposals
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.templates.cutlass.toolchain import CudaToolchain

#: A plain schedule within this of what memory takes leaves nothing to find.
_AT_MEMORY = 1.25


def remaining_cuda_functions(
    model: Model, target: CudaTarget, choices: Choices, *, templates: Templates = CUTLASS_TEMPLATES
) -> list[RemainingFunction]:
    """What kernels leave of a model under these choices, the heaviest first. Microseconds are modelled: what memory
    takes at least."""
    mod = cuda_functions(model, target, choices, templates=templates)
    return called_functions(mod, is_scheduled, lambda func: modelled_microseconds(func, target))


def build_cuda_functions(functions: Mapping[str, Any], target: CudaTarget, toolchain: CudaToolchain) -> Library:
    """Scheduled functions as code for a GPU, under the given names, by one run of nvcc. Raises BuildFailed."""
    module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    try:
        with compiled_by(toolchain, target):
            return Library(tvm.tirx.build(module, target=target.tvm_target()))
    except BuildFailed:
        raise
    except Exception as problem:  # TVM raises whatever its passes raise; a candidate that fails is a result
        raise BuildFailed(", ".join(functions), problem) from problem


@dataclass(frozen=True, slots=True)
class _ForProposals:
    target: CudaTarget

    def tvm(self) -> Any:
        return self.target.tvm_target()


def cuda_proposals(func: Any, target: CudaTarget, seed: int = 0) -> Proposals:
    return Proposals(func, _ForProposals(target), seed, "cuda")


def search_cuda_schedule(
    function: RemainingFunction,
    target: CudaTarget,
    bench: Bench,
    seconds: float,
    tell: Callable[[int, float, float], None] | None = None,
    known: Progress | None = None,
) -> SearchResult:
    """As `metaschedule.search_schedule` does it for CPUs, against dlight's schedule. Raises what `bench` raises."""
    known = known or Progress()
    return search_on(
        bench,
        function.func,
        plain_cuda_schedule(function.func, target),
        # With the seed of before, the same would be proposed again.
        lambda: cuda_proposals(function.func, target, seed=known.num_trials),
        time.monotonic() + seconds,
        tell,
        known,
        good_enough_us=_AT_MEMORY * function.microseconds,
    )
