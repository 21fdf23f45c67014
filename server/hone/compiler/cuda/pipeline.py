"""The compile pipeline for NVIDIA GPUs: an imported model becomes a CUDA module that calls CUTLASS's kernels by name.

As for CPUs (`compiler/pipeline.py`), every phase is a function from a Relax module to a Relax module, in one list that
one can read and dump. With a twin as target the same phases run, kernels are host programs and the rest is code for
the CPU: all but the launch is then the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from hone.compiler.build import Library
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.cuda.attention import find_fused_attention
from hone.compiler.cuda.build import build_module
from hone.compiler.cuda.integers import convert_integers, integer_layers
from hone.compiler.cuda.layout import channels_last
from hone.compiler.cuda.means import means_as_sums
from hone.compiler.cuda.memory import plan_gpu_memory
from hone.compiler.cuda.padding import Padding, find_paddings, pad
from hone.compiler.cuda.partition import Templates, Wanted, partition, wanted
from hone.compiler.cuda.precision import STORED, convert_precision, lowered_layers
from hone.compiler.cuda.schedule import schedule
from hone.compiler.cuda.softplus import find_softplus
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.phases.canonicalize import canonicalize
from hone.compiler.phases.fuse import fuse
from hone.compiler.phases.packing import content_digest, packing_keys
from hone.compiler.phases.precision import Precision
from hone.compiler.phases.schedule import ScheduledFunction
from hone.compiler.pipeline import Dump, Model, failures_told
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.templates.cutlass.toolchain import CudaToolchain, find_toolchain
from hone.compiler.workload import Workload


@dataclass(slots=True)
class CudaCompilation:
    """What the phases share: what for, what was chosen, and what they report."""

    target: CudaTarget
    choices: Choices
    templates: Templates
    host: CpuTarget
    capture: bool = True
    parameters: tuple[str, ...] = ()
    paddings: tuple[Padding, ...] = ()
    kernels: list[KernelCall] = field(default_factory=list)
    functions: list[ScheduledFunction] = field(default_factory=list)
    packed: tuple[str, ...] = ()
    returns_tuple: bool = False
    phase_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def math(self) -> str:
        """How products of float32 are computed."""
        precision = self.choices.precision
        return "tf32" if "tf32" in (precision.name, precision.kept_in) else "f32"

    def takes(self, workload: Workload) -> bool:
        return any(template.matches(workload, self.target) for template in self.templates)

    def tvm(self) -> Any:
        return self.host.tvm() if self.target.twin else self.target.tvm_target()


@dataclass(frozen=True, slots=True)
class CompiledCudaModel:
    """A CUDA module and the kernels that it calls by name; the weights are in neither.

    `packed` names the weights as `main` takes them, in order (see `phases/packing.py`); `paddings` are the operators
    that were padded.
    """

    library: Library
    kernels: tuple[KernelCall, ...]
    functions: tuple[ScheduledFunction, ...]
    packed: tuple[str, ...]
    returns_tuple: bool
    phase_seconds: dict[str, float]
    target: CudaTarget
    paddings: tuple[Padding, ...] = ()


CudaPhase = tuple[str, Callable[[Any, CudaCompilation], Any]]


def _canonicalize(mod: Any, compilation: CudaCompilation) -> Any:
    stored, math = STORED[compilation.choices.precision.name], compilation.math
    return canonicalize(
        mod,
        lambda function: {
            **find_softplus(function),
            **find_fused_attention(function, compilation.takes, stored, math),
        },
    )


def _pad(mod: Any, compilation: CudaCompilation) -> Any:
    mod, compilation.paddings = pad(mod, compilation.choices.paddings, math=compilation.math)
    return mod


def _partition(mod: Any, compilation: CudaCompilation) -> Any:
    mod, compilation.kernels = partition(
        means_as_sums(mod), compilation.target, compilation.choices, compilation.templates, compilation.math
    )
    return mod


def _fuse(mod: Any, compilation: CudaCompilation) -> Any:
    mod = fuse(mod)
    compilation.packed = packing_keys(mod, compilation.parameters)
    compilation.returns_tuple = isinstance(mod["main"].ret_ty, relax.TupleType)
    return mod


def _schedule(mod: Any, compilation: CudaCompilation) -> Any:
    mod, compilation.functions = schedule(mod, compilation.target, compilation.choices, compilation.host)
    return mod


#: Up to here the graph decides; padding may be chosen otherwise.
GRAPH_PHASES: tuple[CudaPhase, ...] = (
    ("1 canonicalize", _canonicalize),
    ("2 integers", lambda mod, compilation: convert_integers(mod, compilation.choices.precision)),
    ("3 precision", lambda mod, compilation: convert_precision(mod, compilation.choices.precision)),
    ("4 layout", lambda mod, _: channels_last(mod)),
)
PAD_PHASE: CudaPhase = ("5 padding", _pad)
CODE_PHASES: tuple[CudaPhase, ...] = (
    ("6 partition", _partition),
    ("7 fuse", _fuse),
    ("8 schedule", _schedule),
    (
        "9 plan memory",
        lambda mod, compilation: plan_gpu_memory(mod, capture=compilation.capture and not compilation.target.twin),
    ),
)
_NUM_UNSCHEDULED = 2
#: Phase 10, build, makes machine code of all of it; phase 11, export, writes files (`compiler/artifact.py`).
PHASES: tuple[CudaPhase, ...] = (*GRAPH_PHASES, PAD_PHASE, *CODE_PHASES)


def compile_cuda_model(
    model: Model,
    target: CudaTarget,
    choices: Choices | None = None,
    dump: Dump | None = None,
    *,
    templates: Templates = CUTLASS_TEMPLATES,
    toolchain: CudaToolchain | None = None,
    capture: bool = True,
) -> CompiledCudaModel:
    """Compile for one kind of GPU, which need not be here. `capture`: kernels are replayed as CUDA graphs.

    Raises BuildFailed when nvcc refuses, ToolchainMissing (a BuildFailed) where there is no nvcc, and GraphRefused,
    with the phase, where TVM does not take the graph.
    """
    compilation = _compilation(target, choices, templates, capture)
    compilation.parameters = tuple(content_digest(array) for array in model.params.values())
    if toolchain is None and not target.twin:
        toolchain = find_toolchain()
    mod = run_phases(model.mod, PHASES, compilation, dump)
    started = time.perf_counter()
    library = build_module(mod, target, compilation.host, toolchain)
    compilation.phase_seconds["10 build"] = time.perf_counter() - started
    return CompiledCudaModel(
        library,
        tuple(compilation.kernels),
        tuple(compilation.functions),
        compilation.packed,
        compilation.returns_tuple,
        compilation.phase_seconds,
        target,
        compilation.paddings,
    )


def cuda_workloads(
    model: Model, target: CudaTarget, choices: Choices | None = None, *, templates: Templates = CUTLASS_TEMPLATES
) -> Wanted:
    """What a search has to decide: every workload that a template takes, and the pairs that one kernel could do.

    `choices` tell the precision and the paddings.
    """
    compilation = _compilation(target, choices, templates, False)
    mod = run_phases(model.mod, (*GRAPH_PHASES, PAD_PHASE), compilation, None)
    return wanted(means_as_sums(mod), target, templates, compilation.math)


def cuda_layers(
    model: Model, target: CudaTarget, choices: Choices, *, templates: Templates = CUTLASS_TEMPLATES
) -> list[str]:
    """The layers that the precision of `choices` lowers, in the order by which `Precision.kept` names them."""
    compilation = _compilation(target, choices, templates, False)
    mod = run_phases(model.mod, GRAPH_PHASES[:1], compilation, None)
    precision = Precision(choices.precision.name)
    return integer_layers(mod) if precision.name == "int8" else lowered_layers(mod, precision)


def cuda_functions(
    model: Model, target: CudaTarget, choices: Choices, *, templates: Templates = CUTLASS_TEMPLATES
) -> tvm.IRModule:
    """The module before functions are scheduled, as `compile_cuda_model` comes by it with the same choices."""
    compilation = _compilation(target, choices, templates, False)
    compilation.parameters = tuple(content_digest(array) for array in model.params.values())
    return run_phases(model.mod, (*GRAPH_PHASES, PAD_PHASE, *CODE_PHASES[:_NUM_UNSCHEDULED]), compilation, None)


def cuda_paddings(
    model: Model, target: CudaTarget, choices: Choices | None = None, *, templates: Templates = CUTLASS_TEMPLATES
) -> tuple[Padding, ...]:
    """The operators whose sizes are not those that kernels read at full width, each with what padding it would cost."""
    compilation = _compilation(target, choices, templates, False)
    mod = run_phases(model.mod, GRAPH_PHASES, compilation, None)
    return find_paddings(mod, compilation.choices.paddings, math=compilation.math)


def run_plain_phases(model: Model, target: CudaTarget) -> None:
    """All that comes before code is made, without kernels. Raises GraphRefused where TVM does not take the graph."""
    compilation = _compilation(target, None, (), False)
    compilation.parameters = tuple(content_digest(array) for array in model.params.values())
    run_phases(model.mod, PHASES, compilation, None)


def _compilation(target: CudaTarget, choices: Choices | None, templates: Templates, capture: bool) -> CudaCompilation:
    return CudaCompilation(target, choices or Choices(), templates, CpuTarget.detect(num_threads=1), capture)


def run_phases(mod: Any, phases: Sequence[CudaPhase], compilation: CudaCompilation, dump: Dump | None) -> Any:
    config = {"relax.backend.use_cuda_graph": True} if compilation.capture and not compilation.target.twin else {}
    with compilation.tvm(), tvm.transform.PassContext(opt_level=3, config=config):
        for name, phase in phases:
            started = time.perf_counter()
            with failures_told(name):
                mod = phase(mod, compilation)
            compilation.phase_seconds[name] = time.perf_counter() - started
            if dump is not None:
                dump(name, mod)
    return mod
