"""Packed weights: what `main_transform_params` makes, each result named by what it is made of.

The name is a digest of the contents of the sources and of the computation between, so specializations of one model
(and different models) that need the same packing of the same weight find it under the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi.structural
from tvm import relax

from hone.kernels.digest import digest_of
from hone.types import Array

TRANSFORM = "main_transform_params"


def packing_keys(mod: tvm.IRModule, sources: Sequence[str]) -> tuple[str, ...]:
    """Keys of the results in order; `sources` are the content digests of the parameters. Asks for unscheduled code."""
    names = {str(var.name_hint): func for var, func in mod.functions.items()}
    function = names.get(TRANSFORM)
    if function is None:
        return ()
    keys: dict[Any, Any] = {}
    bundle = function.params[0] if function.params else None
    functions = {
        var: _function_key(func) for var, func in mod.functions.items() if not isinstance(func, relax.Function)
    }

    def key(expression: Any) -> Any:
        if expression in keys:
            return keys[expression]
        if isinstance(expression, relax.TupleGetItem):
            held = key(expression.tuple_value)
            if held == "bundle":
                return "sources"
            if held == "sources":
                return ["source", sources[int(expression.index)]]
            return ["item", int(expression.index), held]
        if isinstance(expression, relax.Tuple):
            return ["tuple", *(key(item) for item in expression.fields)]
        if isinstance(expression, relax.Call):
            callee, arguments = expression.op, list(expression.args)
            told = [str(getattr(callee, "name", "")), *(key(argument) for argument in arguments)]
            return ["call", digest_of({"call": told, "type": str(expression.ty), "attrs": str(expression.attrs)})]
        if expression in functions:
            return functions[expression]
        return str(expression)

    if bundle is not None:
        keys[bundle] = "bundle"
    for block in function.body.blocks:
        for binding in block.bindings:
            keys[binding.var] = key(binding.value)
    results = key(function.body.body)
    if results == "sources":  # nothing to do: the parameters are returned as they came
        results = ["tuple", *(["source", source] for source in sources)]
    return tuple(digest_of({"packed": item}) for item in results[1:])


def content_digest(array: Array) -> str:
    """SHA-256 of the items' bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _function_key(func: Any) -> str:
    # A hash of the structure, in which names do not matter; the sources' contents and the type of the result go into
    # the key beside it.
    return f"{tvm_ffi.structural.structural_hash(func):016x}"
