"""Partition: groups become calls of kernels by name, each with a workspace that the memory plan owns.

The call is `R.call_dps_packed(kernel, inputs)` with two results: the kernel's workspace, bytes that nothing reads, and
its output. Nothing in the module knows how the kernel is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tvm
from tvm import relax

from hone.compiler.choices import Choices, KernelCall
from hone.compiler.cuda.groups import Group, find_groups
from hone.compiler.cuda.pairs import choose_pairs, find_pairs, read_counts
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.phases.types import OPAQUE
from hone.compiler.templates.base import Candidate, Template
from hone.compiler.workload import TensorType, Workload


class CudaTemplate(Template[CudaTarget], Protocol):
    """A template whose kernels take a workspace in front of their output."""

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int: ...


Templates = Sequence[CudaTemplate]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kernels that one could replace."""

    fused: Workload
    first: Workload
    second: Workload


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a module asks of kernels: each workload and how often it is called; and the pairs among them."""

    counts: Mapping[Workload, int]
    pairs: Mapping[Pair, int]


def takers(workload: Workload, target: CudaTarget, templates: Templates) -> list[CudaTemplate]:
    """All templates that can do the workload, in order of preference."""
    return [template for template in templates if template.matches(workload, target)]


def wanted(mod: tvm.IRModule, target: CudaTarget, templates: Templates, math: str) -> Wanted:
    counts: dict[Workload, int] = {}
    pairs: dict[Pair, int] = {}
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            groups, found = _groups_and_pairs(function, target, templates, math)
            for group in groups:
                counts[group.workload] = counts.get(group.workload, 0) + 1
            for first, second, both in found:
                pair = Pair(both.workload, groups[first].workload, groups[second].workload)
                pairs[pair] = pairs.get(pair, 0) + 1
    return Wanted(counts, pairs)


def partition(
    mod: tvm.IRModule, target: CudaTarget, choices: Choices, templates: Templates, math: str
) -> tuple[tvm.IRModule, list[KernelCall]]:
    """Every group that a template takes, replaced by a call; what is called, each kernel once."""
    kernels: dict[Workload, KernelCall] = {}
    functions = dict(mod.functions.items())
    for name, function in mod.functions.items():
        if not isinstance(function, relax.Function):
            continue
        groups, pairs = _groups_and_pairs(function, target, templates, math)
        groups = choose_pairs(groups, pairs, set(choices.kernels))
        for group in groups:
            if group.workload not in kernels:
                kernels[group.workload] = _choose(group.workload, target, choices, templates)
            kernels[group.workload].num_calls += 1
        rewriter = _Rewriter(mod, groups, kernels, target)
        functions[name] = rewriter.visit_expr(function)
        functions.update(rewriter.packings())
    mod = tvm.IRModule(functions, attrs=mod.attrs)
    return relax.transform.DeadCodeElimination()(mod), list(kernels.values())


def _groups_and_pairs(
    function: Any, target: CudaTarget, templates: Templates, math: str
) -> tuple[list[Group], list[tuple[int, int, Group]]]:
    def matches(workload: Workload) -> bool:
        return any(template.matches(workload, target) for template in templates)

    groups = find_groups(function, matches, math)
    return groups, find_pairs(groups, read_counts(function), matches)


def _choose(workload: Workload, target: CudaTarget, choices: Choices, templates: Templates) -> KernelCall:
    """What was measured to be best; else the first candidate of the first template."""
    candidate = choices.kernels.get(workload.digest)
    able = takers(workload, target, templates)
    template = next((t for t in able if candidate is not None and t.name == candidate.template), None)
    if candidate is None or template is None:
        template = able[0]  # a group is made only where a template matches
        candidate = template.candidates(workload, target)[0]
    return KernelCall(workload, template, candidate, template.digest(workload, candidate, target))


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Leaves groups out and calls their kernels where their last members stood."""

    def __init__(
        self, mod: tvm.IRModule, groups: Iterable[Group], kernels: Mapping[Workload, KernelCall], target: CudaTarget
    ) -> None:
        super().__init__(mod)
        self._kernels, self._target = kernels, target
        groups = list(groups)
        self._last = {group.result: group for group in groups}
        self._dropped = {binding.var for group in groups for binding in group.bindings} - self._last.keys()

    def packings(self) -> dict[Any, Any]:
        """The functions that the rewritten one calls to pack weights."""
        return {var: func for var, func in self.builder_.get().functions.items() if isinstance(func, tvm.tirx.PrimFunc)}

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self._dropped:
            return
        group = self._last.get(binding.var)
        if group is None:
            super().visit_var_binding_(binding)
            return
        kernel = self._kernels[group.workload]
        template: Any = kernel.template
        packings = template.packing(group.workload, kernel.candidate, self._target)
        arguments = []
        for at, value in enumerate(group.inputs):
            argument = self.visit_expr(value)
            if not isinstance(argument, relax.Var | tvm.ir.GenericConst):
                argument = self.builder_.emit(argument)
            if at in packings:
                argument = self._pack(packings[at], argument, group.workload.inputs[at])
            arguments.append(argument)
        # A tensor of no bytes is none that a memory plan knows.
        num_bytes = max(1, template.workspace_bytes(group.workload, kernel.candidate, self._target))
        workspace = relax.TensorType((num_bytes,), "uint8")
        output: TensorType = group.workload.output
        call = relax.call_dps_packed(
            kernel.name, relax.Tuple(arguments), [workspace, relax.TensorType(output.shape, output.dtype)]
        )
        both = self.builder_.emit(call)
        super().visit_var_binding_(relax.VarBinding(binding.var, relax.TupleGetItem(both, 1)))

    def _pack(self, packing: Any, value: Any, source: TensorType) -> Any:
        function = self.builder_.add_func(packing.prim_func(source).with_attr("op_pattern", OPAQUE), "pack")
        ty = relax.TensorType(packing.result.shape, packing.result.dtype)
        return self.builder_.emit(relax.call_tir(function, relax.Tuple([value]), ty))
