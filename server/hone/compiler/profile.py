"""Where the time of a compiled model goes: every call of `main`, timed in place.

The model is built once more, as bytecode of TVM's virtual machine, whose instrument is told before and after each call.
So calls run in their order, on their real operands, with the caches as they find them; only the machine code of `main`
itself is replaced by the interpreter, whose share is told apart as `overhead_us`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from hone.compiler.build import Library, build_executable
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.phases.place import Placement
from hone.compiler.phases.schedule import ScheduledFunction
from hone.compiler.pipeline import PHASES, Compilation, Model, run_phases
from hone.compiler.target import CpuTarget
from hone.types import Array

_RUN = 0
"""What an instrument returns: go on with the call."""
_BUILTIN = "vm.builtin."
_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class ProfiledCall:
    """One call of `main`, in program order: of a template's kernel (`kernel`) or of a function (`function`)."""

    name: str
    kernel: KernelCall | None
    function: ScheduledFunction | None
    shapes: tuple[tuple[int, ...], ...]
    """Of its arguments, the output last."""
    times_us: tuple[float, ...]
    """One a round."""
    start_us: float
    """Since the beginning of the last round, for a trace."""

    @property
    def microseconds(self) -> float:
        """The median."""
        return statistics.median(self.times_us)

    def __str__(self) -> str:
        if self.kernel is not None:
            return f"{self.kernel.workload} by {self.kernel.candidate}"
        rule = f" [{self.function.rule}]" if self.function is not None else ""
        return f"{self.name}{rule} " + " ".join("x".join(map(str, shape)) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Profile:
    """`total_us` is the median of whole runs with the instrument off; `overhead_us` what no call accounts for in runs
    with it on."""

    calls: tuple[ProfiledCall, ...]
    total_us: float
    overhead_us: float
    outputs: tuple[Array, ...]
    placements: tuple[Placement, ...] = ()
    """Concatenations that are no calls: their parts are written where they belong."""


def profile_model(
    model: Model,
    target: CpuTarget,
    choices: Choices | None = None,
    inputs: Sequence[Array] | None = None,
    *,
    rounds: int = 20,
) -> Profile:
    """Compile for this machine, and time every call. `inputs` in the model's order; None: uniform numbers (or zeros).

    Raises BuildFailed and LinkFailed. Runs in this process, with as many threads as TVM's runtime has been told.
    """
    compilation = Compilation(target, choices or Choices())
    # Packed weights are named by contents, which nobody asks for here: any names do.
    compilation.parameters = tuple(model.params)
    mod = run_phases(model.mod, PHASES, compilation, None)
    library = build_executable(mod, target, exec_mode="bytecode")
    arguments = [tvm.runtime.tensor(array) for array in (inputs if inputs is not None else random_inputs(model))]
    return _run(library, compilation, arguments, [tvm.runtime.tensor(array) for array in model.params.values()], rounds)


def random_inputs(model: Any) -> list[Array]:
    """Numbers for a model's inputs, alike in every call."""
    main = model.mod["main"]
    generator = np.random.default_rng(0)
    arrays: list[Array] = []
    for param in main.params[: int(main.attrs["num_input"])]:
        shape, dtype = tuple(int(dim) for dim in param.ty.shape.values), str(param.ty.dtype)
        floating = dtype.startswith(("float", "bfloat"))
        arrays.append(generator.uniform(0, 1, shape).astype(dtype) if floating else np.zeros(shape, dtype))
    return arrays


def _run(
    library: Library, compilation: Compilation, inputs: Sequence[Any], weights: Sequence[Any], rounds: int
) -> Profile:
    executable = library.module
    with tempfile.TemporaryDirectory(prefix="hone-profile-") as folder:
        for call in compilation.kernels:
            path = Path(folder) / f"{call.name}.so"
            call.build(compilation.target).export(path)
            executable.import_module(tvm_ffi.load_module(str(path), keep_module_alive=False))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    packed = machine["main_transform_params"]([list(weights)])
    arguments = [*inputs, packed]
    for _ in range(_WARMUPS):
        machine["main"](*arguments)
    totals = []
    for _ in range(rounds):
        started = time.perf_counter_ns()
        result = machine["main"](*arguments)
        totals.append(time.perf_counter_ns() - started)
    recorder = _Recorder()
    machine.set_instrument(recorder)
    for _ in range(rounds):
        recorder.begin_round()
        machine["main"](*arguments)
        recorder.end_round()
    kernels = {call.name: call for call in compilation.kernels}
    functions = {function.name: function for function in compilation.functions}
    results = list(result) if compilation.returns_tuple else [result]
    return Profile(
        calls=recorder.calls(kernels, functions),
        total_us=statistics.median(totals) / 1e3,
        overhead_us=recorder.overhead_us(),
        outputs=tuple(np.array(tensor.numpy()) for tensor in results),
        placements=tuple(compilation.placements),
    )


class _Recorder:
    """The instrument: the virtual machine calls it before and after each of its calls."""

    def __init__(self) -> None:
        self._rounds: list[list[tuple[str, int, int]]] = []
        self._spans: list[tuple[int, int]] = []
        self._shapes: list[tuple[tuple[int, ...], ...]] = []
        self._open: list[int] = []

    def begin_round(self) -> None:
        self._rounds.append([])
        self._spans.append((time.perf_counter_ns(), 0))

    def end_round(self) -> None:
        self._spans[-1] = (self._spans[-1][0], time.perf_counter_ns())

    def __call__(self, _function: Any, symbol: str, before: bool, _result: Any, *arguments: Any) -> int:
        if symbol.startswith(_BUILTIN) or symbol == "main":
            return _RUN
        if before:
            self._open.append(time.perf_counter_ns())
            return _RUN
        ended = time.perf_counter_ns()
        self._rounds[-1].append((str(symbol), self._open.pop(), ended))
        if len(self._rounds) == 1:
            self._shapes.append(tuple(tuple(a.shape) for a in arguments if isinstance(a, tvm.runtime.Tensor)))
        return _RUN

    def calls(
        self, kernels: Mapping[str, KernelCall], functions: Mapping[str, ScheduledFunction]
    ) -> tuple[ProfiledCall, ...]:
        begin, _ = self._spans[-1]
        return tuple(
            ProfiledCall(
                name=calls[0][0],
                kernel=kernels.get(calls[0][0]),
                function=functions.get(calls[0][0]),
                shapes=shapes,
                times_us=tuple((ended - started) / 1e3 for _, started, ended in calls),
                start_us=(calls[-1][1] - begin) / 1e3,
            )
            for calls, shapes in zip(zip(*self._rounds, strict=True), self._shapes, strict=True)
        )

    def overhead_us(self) -> float:
        rest = [
            (end - begin) - sum(ended - started for _, started, ended in calls)
            for (begin, end), calls in zip(self._spans, self._rounds, strict=True)
        ]
        return statistics.median(rest) / 1e3
