"""Dtypes as CUTLASS and DLPack name them, and kernels' arguments as their sources check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram
from hone.compiler.workload import Workload

ELEMENTS: Mapping[str, str] = {
    "float32": "float",
    "float16": "cutlass::half_t",
    "bfloat16": "cutlass::bfloat16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int32": "int32_t",
}

_DLPACK = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "int8": (0, 8),
    "uint8": (1, 8),
    "int32": (0, 32),
}


def arguments_of(
    workload: Workload, program: EpilogueProgram, alignments: Sequence[int], output_alignment: int
) -> list[dict[str, Any]]:
    """The kernel's tensors: the operator's operands aligned to so many items, the epilogue's, and the output.

    Alignments are of addresses, in bytes, never more than one access has.
    """
    arguments = []
    kinds = {operand.at: operand.kind for operand in program.operands}
    for at, tensor in enumerate(workload.inputs):
        if at < len(alignments):
            items = alignments[at]
        else:
            items = output_alignment if kinds.get(at) in ("tensor", "row", "image") else 1
        arguments.append(_argument(f"input {at}", tensor.dtype, items))
    return [*arguments, _argument("output", workload.output.dtype, output_alignment)]


def _argument(label: str, dtype: str, items: int) -> dict[str, Any]:
    code, bits = _DLPACK[dtype]
    alignment = min(MAX_ACCESS_BYTES, DTYPE_BYTES[dtype] * items)
    return {"label": label, "dtype": dtype, "code": code, "bits": bits, "alignment": alignment}
