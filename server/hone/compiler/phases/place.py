"""Place: what is only concatenated is written where the concatenation has it, and the copy is left out.

Works on `main` with destinations (`pass_destinations`), before storage is planned. A part that a call computes becomes
a view of the whole, at its offset; the whole is allocated in front of the first of them, and the plan, which knows
views, keeps its storage from the first write to the last read of any. Every byte of a whole is written by one call,
once, so it does not matter who reads a part or the whole, and when. `views.py` makes tensors of the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, topi

from hone.compiler.choices import KernelCall
from hone.compiler.nans import keep_nan
from hone.compiler.phases.concats import ALIGNMENT, keeps_runs, num_bytes
from hone.compiler.phases.graph import operator_of
from hone.compiler.phases.schedule import ScheduledFunction, function_digest
from hone.compiler.phases.types import tensor_type
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from hone.compiler.workload import TensorType, Workload

ALLOC = "relax.builtin.alloc_tensor"
#: Nanoseconds of a call, of a view that does not begin where its storage does, and bytes copied a nanosecond.
_CALL_NS, _VIEW_NS, _COPY = 200, 40, 10.0


@dataclass(frozen=True, slots=True)
class Placement:
    """One concatenation, by its function: how many parts are written in place, and the bytes that are copied no more.

    Parts that are inputs, weights or outputs of the model, or that live in another concatenation, are copied.
    """

    name: str
    shape: tuple[int, ...]
    num_in_place: int
    num_copied: int
    bytes_in_place: int


@dataclass(frozen=True, slots=True)
class Part:
    """An operand of a concatenation: the tensor that it is allocated as (None: not here), and where it goes."""

    operand: Any
    tensor: Any | None
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Concat:
    at: int
    name: str
    whole: Any
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Plan:
    """`home` has the tensors that lie in others; `copied` the parts that are not there when a concatenation ends."""

    home: dict[Any, tuple[Any, int]]
    copied: dict[int, tuple[Part, ...]]
    placements: list[tuple[Concat, Placement]]

    def locate(self, tensor: Any) -> tuple[Any, int]:
        """The tensor that has storage of its own, and the offset in it."""
        offset = 0
        while tensor in self.home:
            tensor, inside = self.home[tensor]
            offset += inside
        return tensor, offset


def place(
    mod: tvm.IRModule, kernels: Sequence[KernelCall], target: CpuTarget
) -> tuple[tvm.IRModule, list[ScheduledFunction], list[Placement]]:
    """The module without the copies, the functions that it calls for what is copied still, and the report."""
    main = mod["main"]
    tensors = Tensors(main)
    plan = plan_places(list(_concats(main, mod, tensors, {call.name: call.workload for call in kernels})), tensors)
    if not plan.placements:
        return mod, [], []
    rewriter = _Rewriter(plan)
    rewritten = rewriter.rewrite(main)
    functions = {name: func for name, func in mod.functions.items() if str(name.name_hint) != "main"}
    functions[mod.get_global_var("main")] = rewritten
    told = []
    for var, (func, num_calls) in rewriter.copies.items():
        plain = plain_schedule(func, target)
        functions[var] = keep_nan(plain.func)
        told.append(
            ScheduledFunction(
                name=str(var.name_hint),
                digest=function_digest(func),
                rule=plain.rule,
                microseconds=plain.microseconds,
                parallel=plain.parallel,
                num_calls=num_calls,
            )
        )
    return tvm.IRModule(functions, attrs=mod.attrs), told, [placement for _, placement in plan.placements]


def names_called(mod: tvm.IRModule) -> set[str]:
    """The functions of the module that its functions of Relax call."""
    called: set[str] = set()

    def see(expression: Any) -> None:
        if isinstance(expression, tvm.ir.GlobalVar):
            called.add(str(expression.name_hint))

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, see)
    return called


class Tensors:
    """What a function with destinations allocates, and which variables are the same memory."""

    def __init__(self, function: Any) -> None:
        self._roots: dict[Any, Any] = {}
        self._tuples: dict[Any, Any] = {}
        #: Allocated tensors that are returned, or that something else than a kernel takes: they stay as they are.
        self.escaped: set[Any] = set()
        self.bindings = [binding for block in function.body.blocks for binding in block.bindings]
        for binding in self.bindings:
            self._see(binding)
        self._escape(function.body.body)

    def root(self, expression: Any) -> Any | None:
        """The allocated tensor that an expression is, or is a reshape of."""
        return self._roots.get(expression) if isinstance(expression, relax.Var) else None

    def _see(self, binding: Any) -> None:
        value = binding.value
        name = operator_of(value)
        if isinstance(binding, relax.MatchCast):
            self._escape(value)
        elif name == ALLOC:
            self._roots[binding.var] = binding.var
        elif isinstance(value, relax.Var) or name == "relax.reshape":
            source = value if isinstance(value, relax.Var) else value.args[0]
            if source in self._roots:
                self._roots[binding.var] = self._roots[source]
            elif source in self._tuples:
                self._tuples[binding.var] = self._tuples[source]
        elif isinstance(value, relax.Tuple):
            self._tuples[binding.var] = value
        elif isinstance(value, relax.TupleGetItem):
            known = self._tuples.get(value.tuple_value)
            item = known.fields[int(value.index)] if known is not None else None
            if self.root(item) is not None:
                self._roots[binding.var] = self.root(item)
        elif not (_is_kernel_call(value) and all(isinstance(arg, relax.Var) for arg in value.args if _is_tensor(arg))):
            self._escape(value)

    def _escape(self, expression: Any) -> None:
        pending = list(relax.analysis.free_vars(expression))
        while pending:
            var = pending.pop()
            if var in self._tuples:
                pending.extend(relax.analysis.free_vars(self._tuples[var]))
            if self.root(var) is not None:
                self.escaped.add(self.root(var))


def _is_tensor(expression: Any) -> bool:
    return isinstance(getattr(expression, "ty", None), relax.TensorType | relax.TupleType)


def _is_kernel_call(value: Any) -> bool:
    """Of a function of TIR or a kernel by name, which reads its arguments, writes the last ones and keeps none."""
    if not isinstance(value, relax.Call):
        return False
    return isinstance(value.op, tvm.ir.GlobalVar | relax.ExternFunc) or operator_of(value) == "relax.call_packed"


def _concats(main: Any, mod: tvm.IRModule, tensors: Tensors, workloads: Mapping[str, Workload]) -> Iterator[Concat]:
    for at, binding in enumerate(tensors.bindings):
        call = binding.value
        if not isinstance(call, relax.Call):
            continue
        if isinstance(call.op, tvm.ir.GlobalVar):
            name, takes = str(call.op.name_hint), keeps_runs(mod[call.op])
        elif isinstance(call.op, relax.ExternFunc):
            name = str(call.op.global_symbol)
            takes = name in workloads and stacks_runs(workloads[name])
        else:
            continue
        if not takes:
            continue
        parts, begin = [], 0
        for operand in call.args[:-1]:
            tensor = tensor_type(operand)
            size = num_bytes(tensor) if tensor is not None else 0
            parts.append(Part(operand, tensors.root(operand), begin, size))
            begin += size
        whole = tensor_type(call.args[-1])
        if tensors.root(call.args[-1]) is None or whole is None or num_bytes(whole) != begin:
            continue
        if all(part.size for part in parts):
            yield Concat(at, name, tensors.root(call.args[-1]), tuple(parts))


def stacks_runs(workload: Workload) -> bool:
    """Whether a kernel only concatenates, and each part is one run of bytes of the result."""
    if workload.op != "stack_channels" or workload.epilogue or workload.output.shape[0] != 1:
        return False
    width = workload.output.shape[4]
    channels: tuple[int, ...] = workload.attribute("channels")
    return (
        all(factor == 1 for factor in workload.attribute("factors"))
        and all(tensor.shape[4] == width for tensor in workload.inputs)
        and all(count % width == 0 for count in channels[:-1])
    )


def plan_places(concats: Sequence[Concat], tensors: Tensors) -> Plan:
    """From the last concatenation to the first, so that what is part of a larger one lies there already.

    A concatenation whose parts all lie side by side in a larger one (a dense block) is a view of that.
    """
    plan = Plan({}, {}, [])
    for concat in reversed(concats):
        if _lies_in_another(concat, plan, tensors):
            copied: list[Part] = []
        else:
            placed = [part for part in concat.parts if _fits(part, concat, plan, tensors)]
            # A tensor that occurs twice lies where it occurs first.
            homes = {part.tensor: part for part in reversed(placed)}
            copied = [part for part in concat.parts if homes.get(part.tensor) is not part]
            if any(part.begin % ALIGNMENT for part in copied):
                continue  # the copy takes its destination for aligned, as every kernel does
            in_place = sum(part.size for part in homes.values())
            views = sum(part.begin > 0 for part in concat.parts)
            if not homes or in_place / _COPY <= _CALL_NS * (len(copied) - 1) + _VIEW_NS * views:
                continue
            for part in homes.values():
                plan.home[part.tensor] = (concat.whole, part.begin)
        plan.copied[concat.at] = tuple(copied)
        shape = tensor_type(concat.whole)
        assert shape is not None
        num_copied = len(copied)
        moved = sum(part.size for part in concat.parts) - sum(part.size for part in copied)
        told = Placement(concat.name, shape.shape, len(concat.parts) - num_copied, num_copied, moved)
        plan.placements.insert(0, (concat, told))
    return plan


def _fits(part: Part, concat: Concat, plan: Plan, tensors: Tensors) -> bool:
    return (
        part.tensor is not None
        and part.tensor not in tensors.escaped
        and part.tensor not in plan.home
        and not part.tensor.same_as(concat.whole)
        and part.begin % ALIGNMENT == 0
        and part.tensor.ty.dtype == concat.whole.ty.dtype
    )


def _lies_in_another(concat: Concat, plan: Plan, tensors: Tensors) -> bool:
    """Gives the concatenation its place there, if so."""
    if concat.whole in plan.home or concat.whole in tensors.escaped:
        return False
    if not all(part.tensor in plan.home for part in concat.parts):
        return False
    places = [(part, *plan.locate(part.tensor)) for part in concat.parts]
    _, holder, first = places[0]
    if any(not root.same_as(holder) or offset != first + part.begin for part, root, offset in places):
        return False
    plan.home[concat.whole] = (holder, first)
    return True


class _Rewriter:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._builder = relax.BlockBuilder()
        self._bindings: list[Any] = []
        self._allocated: set[Any] = set()
        #: The functions that copy parts, unscheduled, and how often each is called.
        self.copies: dict[Any, tuple[Any, int]] = {}
        self._copy_of: dict[TensorType, Any] = {}

    def rewrite(self, main: Any) -> Any:
        allocations = {
            binding.var: binding
            for block in main.body.blocks
            for binding in block.bindings
            if operator_of(binding.value) == ALLOC
        }
        wholes = {concat.at: concat.whole for concat, _ in self._plan.placements}
        for at, binding in enumerate(binding for block in main.body.blocks for binding in block.bindings):
            if at in wholes:
                for part in self._plan.copied[at]:
                    self._copy(part, wholes[at], allocations)
            elif binding.var in allocations:
                self._allocate(binding, allocations)
            else:
                self._bindings.append(binding)
        body = relax.SeqExpr([relax.BindingBlock(self._bindings)], main.body.body)
        return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)

    def _allocate(self, binding: Any, allocations: Mapping[Any, Any]) -> None:
        if binding.var in self._plan.home:
            value = self._view(binding.var, *self._plan.locate(binding.var), allocations)
            binding = relax.VarBinding(binding.var, value)
        elif binding.var in self._allocated:
            return
        self._allocated.add(binding.var)
        self._bindings.append(binding)

    def _view(self, like: Any, whole: Any, offset: int, allocations: Mapping[Any, Any]) -> Any:
        if whole not in self._allocated:  # in front of the first that lies in it
            self._allocate(allocations[whole], allocations)
        return self._builder.normalize(
            relax.op.memory.view(whole, like.ty.shape, str(like.ty.dtype), relax.prim_value(offset))
        )

    def _copy(self, part: Part, whole: Any, allocations: Mapping[Any, Any]) -> None:
        holder, offset = self._plan.locate(whole)
        view = self._view(part.operand, holder, offset + part.begin, allocations)
        place = relax.Var("place", view.ty)
        self._bindings.append(relax.VarBinding(place, view))
        call = self._builder.normalize(relax.Call(self._copier(part.operand), [part.operand, place]))
        self._bindings.append(relax.VarBinding(relax.Var("_", call.ty), call))

    def _copier(self, operand: Any) -> Any:
        tensor = tensor_type(operand)
        assert tensor is not None
        var = self._copy_of.get(tensor)
        if var is None:
            source = te.placeholder(tensor.shape, tensor.dtype, "part")
            copied = topi.identity(source)
            func = te.create_prim_func([source, copied]).without_attr("global_symbol")
            self._copy_of[tensor] = var = self._builder.add_func(func, "hone_copy_part")
            self.copies[var] = (func, 0)
        func, num_calls = self.copies[var]
        self.copies[var] = (func, num_calls + 1)
        return var
