"""The compile pipeline: an imported model becomes code, in numbered phases that one can read and dump.

Every phase is a function from a Relax module to a Relax module; what else it learns goes into the report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tvm
from tvm import relax

from hone.compiler.build import BuildFailed, Library, LinkFailed, build_executable, graph_problem
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.phases.canonicalize import canonicalize
from hone.compiler.phases.fuse import fuse
from hone.compiler.phases.layout import convert_layouts
from hone.compiler.phases.memory import pass_destinations, plan_memory
from hone.compiler.phases.packing import content_digest, packing_keys
from hone.compiler.phases.partition import layers, partition, workloads
from hone.compiler.phases.place import Placement, names_called, place
from hone.compiler.phases.precision import F32, Precision
from hone.compiler.phases.schedule import ScheduledFunction, schedule
from hone.compiler.phases.views import allocate_views
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
    placements: list[Placement] = field(default_factory=list)
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
    placements: tuple[Placement, ...]
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
    mod = fuse(mod, concats_in_place=True)
    compilation.packed = packing_keys(mod, compilation.parameters)
    compilation.returns_tuple = isinstance(mod["main"].ret_ty, relax.TupleType)
    return mod


def _schedule(mod: Any, compilation: Compilation) -> Any:
    mod, compilation.functions = schedule(mod, compilation.target, compilation.choices)
    return mod


def _place(mod: Any, compilation: Compilation) -> Any:
    """Concatenations left out, and with them what is called no more."""
    mod, copies, compilation.placements = place(pass_destinations(mod), compilation.kernels, compilation.target)
    left_out = Counter(placement.name for placement in compilation.placements)
    called = names_called(mod)
    compilation.functions = [
        replace(function, num_calls=function.num_calls - left_out[function.name])
        for function in compilation.functions
        if function.name not in left_out or function.name in called
    ] + copies
    for kernel in compilation.kernels:
        kernel.num_calls -= left_out[kernel.name]
    compilation.kernels = [kernel for kernel in compilation.kernels if kernel.num_calls]
    kept = {
        var: func
        for var, func in mod.functions.items()
        if str(var.name_hint) not in left_out or str(var.name_hint) in called
    }
    return tvm.IRModule(kept, attrs=mod.attrs)


#: Up to here the graph decides; what templates are asked for is known after phase 2.
GRAPH_PHASES: tuple[Phase, ...] = (
    ("1 canonicalize", lambda mod, _: canonicalize(mod)),
    ("2 layout", lambda mod, compilation: convert_layouts(mod, compilation.target)),
)
CODE_PHASES: tuple[Phase, ...] = (
    ("3 partition", _partition),
    ("4 fuse", _fuse),
    ("5 schedule", _schedule),
    ("6 place", _place),
    ("7 plan memory", lambda mod, _: plan_memory(mod, allocate_views)),
)
#: Phase 8, build, makes machine code of all of it; phase 9, export, writes files (`artifact.py`).
PHASES: tuple[Phase, ...] = GRAPH_PHASES + CODE_PHASES


def compile_model(
    model: Model, target: CpuTarget, choices: Choices | None = None, dump: Dump | None = None
) -> CompiledModel:
    """Compile for one target. Raises BuildFailed; GraphRefused, with the phase, where TVM does not take the graph."""
    parameters = tuple(content_digest(array) for array in model.params.values())
    compilation = Compilation(target, choices or Choices(), parameters=parameters)
    mod = run_phases(model.mod, PHASES, compilation, dump)
    started = time.perf_counter()
    library = build_executable(mod, target)
    compilation.phase_seconds["8 build"] = time.perf_counter() - started
    return CompiledModel(
        library,
        tuple(compilation.kernels),
        tuple(compilation.functions),
        tuple(compilation.placements),
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


@contextmanager
def failures_told(phase: str) -> Iterator[None]:
    """Whatever a phase raises becomes a BuildFailed with its name, a GraphRefused where the graph is to blame."""
    try:
        yield
    except (BuildFailed, LinkFailed):
        raise
    except Exception as problem:  # TVM's passes raise whatever fails inside them
        raise graph_problem(f"phase {phase}", problem) from problem


def run_phases(mod: Any, phases: Sequence[Phase], compilation: Compilation, dump: Dump | None) -> Any:
    with compilation.target.tvm(), tvm.transform.PassContext(opt_level=3):
        for name, phase in phases:
            started = time.perf_counter()
            with failures_told(name):
                mod = phase(mod, compilation)
            compilation.phase_seconds[name] = time.perf_counter() - started
            if dump is not None:
                dump(name, mod)
    return mod
