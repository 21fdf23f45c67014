"""Which operator it is that TVM does not take, when it refuses a whole graph.

Its messages tell what an inner pass met, rarely where that came from. So each operator is compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from hone.compiler.build import GraphRefused
from hone.types import Array


@dataclass(frozen=True, slots=True)
class _Single:
    """One operator as a model: see `pipeline.Model`."""

    mod: tvm.IRModule
    params: Mapping[str, Array] = field(default_factory=dict)


def refused_operator(mod: tvm.IRModule, compile_one: Callable[[Any], object], has_time: Callable[[], bool]) -> str:
    """The first operator of `main` that is refused by itself, by its name in Relax; empty where all are taken alone, or
    time is over before. `compile_one` compiles a `pipeline.Model`, and raises GraphRefused."""
    for name, single in _singles(mod):
        if not has_time():
            return ""
        try:
            compile_one(_Single(single))
        except GraphRefused:
            return name
    return ""


def _singles(mod: tvm.IRModule) -> Iterator[tuple[str, tvm.IRModule]]:
    """Each operator once for each kind of use: by its name, the types of its inputs, and its attributes."""
    seen: set[tuple[str, ...]] = set()
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
                continue
            name = str(call.op.name).removeprefix("relax.")
            kinds = tuple(str(argument.ty) if _is_value(argument) else str(argument) for argument in call.args)
            use = (name, *kinds, str(call.attrs), str(call.ty_args))
            if use in seen:
                continue
            seen.add(use)
            yield name, _alone(call, mod)


def _alone(call: relax.Call, mod: tvm.IRModule) -> tvm.IRModule:
    """A module whose `main` is this call of values that it is given."""
    params: list[relax.Var] = []

    def given(argument: Any) -> Any:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([given(part) for part in argument.fields])
        if not _is_value(argument) or not isinstance(argument, relax.Var):
            return argument
        params.append(relax.Var(f"given_{len(params)}", argument.ty))
        return params[-1]

    arguments = [given(argument) for argument in call.args]
    builder = relax.BlockBuilder(
        tvm.IRModule({name: func for name, func in mod.functions.items() if name.name_hint != "main"})
    )
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(call.op, arguments, call.attrs, call.ty_args))
        builder.emit_func_output(result)
    single = builder.finalize()
    single["main"] = single["main"].with_attr("num_input", len(params))
    return single


def _is_value(argument: Any) -> bool:
    """A tensor or a tuple of some, and not a shape, a number or the like."""
    return isinstance(getattr(argument, "ty", None), (relax.TensorType, relax.TupleType))
