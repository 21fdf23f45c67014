"""Operators that TVM's importer does not know and no others express, as Relax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tvm
from onnx import helper
from tvm import relax, te

#: (block builder, inputs, attributes) -> the operator's result.
Converter = Callable[[relax.BlockBuilder, Sequence[Any], Mapping[str, Any]], Any]


def _bit_cast(builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """BitCast: the same bits as another type of the same width."""
    target = helper.tensor_dtype_to_np_dtype(attributes["to"]).name

    def reinterpret(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: tvm.tirx.reinterpret(target, x(*at)), name="bit_cast")

    return builder.emit_te(reinterpret, inputs[0], primfunc_name_hint="bit_cast")


CONVERTERS: Mapping[str, Converter] = MappingProxyType({"BitCast": _bit_cast})
