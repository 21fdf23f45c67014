"""Workloads of two operators back to back and of attention, and what they should give, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hone.compiler.workload import TensorType, Workload
from tests.cutlass.workloads import conv2d, matmul, numpy_dtype, reference


def pair(first, columns, epilogue0=(), epilogue=(), extra=(), **attributes):
    """`first` (a product or a convolution) and, behind it, one with so many columns.

    `extra`: (shape, dtype) of both epilogues' operands, which are inputs from 3 on.
    """
    dtype, middle = first.inputs[0].dtype, first.output.shape[-1]
    convolution = first.op == "conv2d"
    weight = (columns, 1, 1, middle) if convolution else (middle, columns)
    if attributes.get("transpose_b1"):
        weight = (columns, middle)
    told = {
        **dict(first.attributes),
        "epilogue0": tuple((step.op, tuple(tuple(o.fields()) for o in step.operands)) for step in epilogue0),
        "intermediate": dtype,
        "weights": (1, 2),
        **attributes,
    }
    inputs = (*first.inputs[:2], TensorType(weight, dtype), *(TensorType(tuple(s), d) for s, d in extra))
    output = TensorType((*first.output.shape[:-1], columns), dtype)
    return Workload(f"{first.op}_{first.op}", inputs, output, tuple(sorted(told.items())), tuple(epilogue))


def products(m, k, middle, columns, dtype="float16", *, transposed=False, **more):
    shape = (middle, k) if transposed else (k, middle)
    first = matmul((m, k), shape, dtype, **({"transpose_b": True} if transposed else {}))
    return pair(first, columns, **({"transpose_b1": True} if transposed else {}), **more)


def convolutions(data, weight, columns, dtype="float16", *, strides=(1, 1), padding=(1, 1, 1, 1), **more):
    return pair(conv2d(data, weight, dtype, strides=strides, padding=padding), columns, **more)


def pair_reference(workload, arrays):
    """What is between is rounded to its dtype, as it is when two kernels do it."""
    told = workload.fields()
    steps = Workload.from_fields({**told, "epilogue": told["attributes"]["epilogue0"]}).epilogue
    op = workload.op.split("_")[0]
    attributes = dict(workload.attributes)
    middle = workload.inputs[2].shape[-1 if op == "conv2d" or attributes.get("transpose_b1") else 0]
    shape = (*workload.output.shape[:-1], middle)
    first = replace(workload, op=op, epilogue=steps, output=TensorType(shape, attributes["intermediate"]))
    between = reference(first, arrays).astype(numpy_dtype(attributes["intermediate"]))
    if op == "conv2d":
        attributes |= {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    attributes["transpose_b"] = bool(attributes.get("transpose_b1"))
    operands = (TensorType(shape, attributes["intermediate"]), *workload.inputs[2:3], *workload.inputs[2:])
    second = replace(workload, op=op, inputs=operands, attributes=tuple(sorted(attributes.items())))
    # The second weight stays at position 2 too, which no step reads, so that operands keep theirs.
    return reference(second, [between, arrays[2], *arrays[2:]])


def attention(
    *,
    batch=2,
    heads=3,
    queries=5,
    keys=16,
    depth=8,
    values=None,
    dtype="float16",
    layouts=("bhsd",) * 3,
    output="bhsd",
    mask=None,
    parts=3,
):
    """`mask`: its shape; dimensions that `layouts` name by a digit have `parts` parts."""

    def shape(layout, rows, columns):
        sizes = {"b": batch, "h": heads, "s": rows, "d": columns}
        return tuple(sizes.get(letter, parts) for letter in layout)

    values = depth if values is None else values
    inputs = [
        TensorType(shape(layout, rows, columns), dtype)
        for layout, rows, columns in zip(layouts, (queries, keys, keys), (depth, depth, values), strict=True)
    ]
    if mask is not None:
        inputs.append(TensorType(tuple(mask), dtype))
    told = {"layouts": tuple(layouts), "output_layout": output, "masked": mask is not None, "scale": depth**-0.5}
    return Workload(
        "attention",
        tuple(inputs),
        TensorType(shape(output, queries, values), dtype),
        tuple(sorted({**told, "weights": ()}.items())),
    )


def attention_reference(workload, arrays):
    told = dict(workload.attributes)

    def ordered(array, layout):
        for digit in [letter for letter in layout if letter.isdigit()]:
            array = np.take(array, int(digit), layout.index(digit))
            layout = layout.replace(digit, "")
        kept = "".join(letter for letter in "bhsd" if letter in layout)
        missing = tuple(at for at, letter in enumerate("bhsd") if letter not in layout)
        return np.expand_dims(np.einsum(f"{layout}->{kept}", array), missing)

    q, k, v = (
        ordered(array.astype(np.float64), layout) for array, layout in zip(arrays[:3], told["layouts"], strict=True)
    )
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * told["scale"]
    if told["masked"]:
        scores = scores + arrays[3].astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)
    absent = tuple(at for at, letter in enumerate("bhsd") if letter not in told["output_layout"])
    kept = "".join(letter for letter in "bhsd" if letter in told["output_layout"])
    return np.einsum(f"{kept}->{told['output_layout']}", result.squeeze(absent))
