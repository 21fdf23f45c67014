"""The compile pipeline: an imported model becomes code, in numbered phases that one can read and dump.

Every phase is a function from a Relax module to a Relax module; what else it learns goes into the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tvm
from tvm import relax

from hone.compiler.build import Library, build_executable
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.phases.canonicalize import canonicalize
from hone.compiler.phases.fuse import fuse
from hone.compiler.phases.layout import convert_layouts
from hone.compiler.phases.memory import plan_memory
from hone.compiler.phases.packing import content_digest, packing_keys
from hone.compiler.phases.partition import layers, partition, workloads
from hone.compiler.phases.precision import F32, Precision
from hone.compiler.phases.schedule import ScheduledFunction, schedule
from hone.compiler.target import CpuTarget
from hone.compiler.workload import Workload
from hone.types import Array


class Model(Protocol):
    """What the pipeline needs of an imported model: `main` takes `num_input` inputs, then one weight a parameter."""

    @property
    def mod(self) -> Any: ...
    @property
    def params(self) -> Mapping[str, Array]: ...


@dataclass(slots=True)
class Compilation:
    """What the phases share: what for, what was chosen, and what they report.

    `parameters` are the content digests of the weights.
    """

    target: CpuTarget
    choices: Choices
    kernels: list[KernelCall] = field(default_factory=list)
    functions: list[ScheduledFunction] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    returns_tuple: bool = False
    phase_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """Machine code of a model and the kernels that it calls by name; the weights are in neither.

    `packed` names the weights as `main` takes them, in order (see `phases/packing.py`).
    """

    library: Library
    kernels: tuple[KernelCall, ...]
    functions: tuple[ScheduledFunction, ...]
    packed: tuple[str, ...]
    returns_tuple: bool
    phase_seconds: dict[str, float]
    target: CpuTarget


#: Sees the module after each phase, to print or to keep.
Dump = Callable[[str, Any], None]
Phase = tuple[str, Callable[[Any, Compilation], Any]]


def _partition(mod: Any, compilation: Compilation) -> Any:
    mod, compilation.kernels = partition(mod, compilation.target, compilation.choices)
    return mod


def _fuse(mod: Any, compilation: Compilation) -> Any:
    mod = fuse(mod)
    compilation.packed = packing_keys(mod, compilation.parameters)
    compilation.returns_tuple = isinstance(mod["main"].ret_ty, relax.TupleType)
    return mod


def _schedule(mod: Any, compilation: Compilation) -> Any:
    mod, compilation.functions = schedule(mod, compilation.target, compilation.choices)
    return mod


#: Up to here the graph decides; what templates are asked for is known after phase 2.
GRAPH_PHASES: tuple[Phase, ...] = (
    ("1 canonicalize", lambda mod, _: canonicalize(mod)),
    ("2 layout", lambda mod, compilation: convert_layouts(mod, compilation.target)),
)
CODE_PHASES: tuple[Phase, ...] = (
    ("3 partition", _partition),
    ("4 fuse", _fuse),
    ("5 schedule", _schedule),
    ("6 plan memory", lambda mod, _: plan_memory(mod)),
)
#: Phase 7, build, makes machine code of all of it; phase 8, export, writes files (`artifact.py`).
PHASES: tuple[Phase, ...] = GRAPH_PHASES + CODE_PHASES


def compile_model(
    model: Model, target: CpuTarget, choices: Choices | None = None, dump: Dump | None = None
) -> CompiledModel:
    """Compile for one target. Raises BuildFailed when TVM refuses (told with the phase)."""
    parameters = tuple(content_digest(array) for array in model.params.values())
    compilation = Compilation(target, choices or Choices(), parameters=parameters)
    mod = run_phases(model.mod, PHASES, compilation, dump)
    started = time.perf_counter()
    library = build_executable(mod, target)
    compilation.phase_seconds["7 build"] = time.perf_counter() - started
    return CompiledModel(
        library,
        tuple(compilation.kernels),
        tuple(compilation.functions),
        compilation.packed,
        compilation.returns_tuple,
        compilation.phase_seconds,
        target,
    )


def template_workloads(model: Model, target: CpuTarget, precision: Precision = F32) -> dict[Workload, int]:
    """What a search has to decide: every workload that a template takes, and how often the model calls it."""
    return workloads(run_phases(model.mod, GRAPH_PHASES, Compilation(target, Choices()), None), target, precision)


def lowerable_layers(model: Model, target: CpuTarget, precision: str) -> list[Workload]:
    """The layers that may be computed in a lower precision, in the order by which `Precision.kept` names them."""
    return layers(run_phases(model.mod, GRAPH_PHASES, Compilation(target, Choices()), None), target, precision)


def lowering_phases() -> tuple[Phase, ...]:
    """The phases between graph and schedules."""
    return CODE_PHASES[:2]


def run_phases(mod: Any, phases: Sequence[Phase], compilation: Compilation, dump: Dump | None) -> Any:
    with compilation.target.tvm(), tvm.transform.PassContext(opt_level=3):
        for name, phase in phases:
            started = time.perf_counter()
            mod = phase(mod, compilation)
            compilation.phase_seconds[name] = time.perf_counter() - started
            if dump is not None:
                dump(name, mod)
    return mod
