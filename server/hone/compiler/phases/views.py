"""Views of planned tensors become tensors in their storage, which kernels take like any other."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from hone.compiler.phases.concats import num_bytes
from hone.compiler.phases.graph import operator_of
from hone.compiler.phases.types import tensor_type

_ALLOC, _VIEW = "relax.builtin.alloc_tensor", "relax.memory.view"
#: Fields of a DLTensor, by TVM's numbers.
_DATA, _BYTE_OFFSET = 1, 8


def allocate_views(mod: tvm.IRModule) -> tvm.IRModule:
    """For `plan_memory`, of `main`: what is viewed and returned gets storage of its own, since it is not planned.

    Kernels want tensors that begin where their data does, so a tensor that the VM made at an offset gets its data
    pointer moved there (`_settle`).
    """
    main = mod["main"]
    bindings, storages, settles = list[Any](), dict[Any, Any](), False
    builder = relax.BlockBuilder()
    settle = builder.add_func(_settle(), "hone_settle")
    viewed = {
        binding.value.args[0]
        for block in main.body.blocks
        for binding in block.bindings
        if operator_of(binding.value) == _VIEW
    }

    def bind(var: Any, value: Any) -> None:
        bindings.append(relax.VarBinding(var, value))

    for binding in (binding for block in main.body.blocks for binding in block.bindings):
        var, value = binding.var, binding.value
        if var in viewed and operator_of(value) == _ALLOC:
            tensor = tensor_type(var)
            assert tensor is not None
            size = relax.ShapeExpr([num_bytes(tensor)])
            storage = builder.normalize(relax.op.memory.alloc_storage(size, 0, "global", "uint8"))
            storages[var] = relax.Var("storage", storage.ty)
            bind(storages[var], storage)
            bind(var, _tensor(builder, storages[var], 0, var))
        elif operator_of(value) == _VIEW:
            offset = int(value.args[3].value)
            bind(var, _tensor(builder, storages[value.args[0]], offset, var))
            if offset:
                settles = True
                call = builder.normalize(relax.Call(settle, [var]))
                bind(relax.Var("_", call.ty), call)
        else:
            if var in viewed:
                storages[var] = value.args[0]
            bindings.append(binding)
    body = relax.SeqExpr([relax.BindingBlock(bindings)], main.body.body)
    functions = {name: func for name, func in mod.functions.items() if str(name.name_hint) != "main"}
    functions[mod.get_global_var("main")] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    if settles:
        functions[settle] = builder.get()[settle]
    return tvm.IRModule(functions, attrs=mod.attrs)


def _tensor(builder: Any, storage: Any, offset: int, like: Any) -> Any:
    return builder.normalize(
        relax.op.memory.alloc_tensor(storage, relax.prim_value(offset), like.ty.shape, str(like.ty.dtype))
    )


def _settle() -> Any:
    """Of a DLTensor: `data` moved by `byte_offset`, which is then 0.

    What frees the memory knows the storage, not `data`.
    """
    tensor = tirx.Var("tensor", "handle")
    data = tirx.tvm_struct_get(tensor, 0, _DATA, "handle")
    offset = tirx.tvm_struct_get(tensor, 0, _BYTE_OFFSET, "uint64")
    moved = tirx.handle_add_byte_offset(data, tirx.Cast("int64", offset))
    return tirx.PrimFunc(
        [tensor],
        tirx.SeqStmt(
            [
                tirx.Evaluate(tirx.tvm_struct_set(tensor, 0, _DATA, moved)),
                tirx.Evaluate(tirx.tvm_struct_set(tensor, 0, _BYTE_OFFSET, tirx.const(0, "uint64"))),
            ]
        ),
    )
