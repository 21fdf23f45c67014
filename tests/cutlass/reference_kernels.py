"""Kernels in numpy behind the templates' interface, to test what calls kernels without building any.

They take what CUTLASS's templates take (and pairs and attention beside), compute in float32 from the operands as
stored, and round once, to the output's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from hone.compiler.cuda.pairs import first_epilogue
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.cutlass.epilogue import EpilogueProgram
from hone.compiler.templates.cutlass.problem import convolution_of, matmul_of
from hone.compiler.templates.packing import tensor_of
from hone.engines.tvm import aligned_empty
from hone.kernels.digest import digest_of
from hone.types import NUMPY_DTYPES

WORKSPACE_BYTES = 48


def erf(x):
    return np.vectorize(math.erf, otypes=[np.float32])(x)


STEPS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "relu": lambda a: np.maximum(a, 0),
    "relu6": lambda a: np.clip(a, 0, 6),
    "leakyrelu": lambda a, slope: np.where(a > 0, a, a * slope),
    "silu": lambda a: a / (1 + np.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1 + erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "softplus": lambda a: np.logaddexp(a, 0),
    "tanh": np.tanh,
    "erf": erf,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "round": np.rint,
    "negative": np.negative,
    "clip": np.clip,
    "hardsigmoid": lambda a: np.clip(a / 6 + 0.5, 0, 1),
    "hardswish": lambda a: a * np.clip(a / 6 + 0.5, 0, 1),
    "mish": lambda a: a * np.tanh(np.logaddexp(a, 0)),
}


def run_steps(steps, result, inputs):
    values = [result]
    for step in steps:
        read = []
        for operand in step.operands:
            if operand.kind == "value":
                read.append(values[operand.at])
            else:
                read.append(np.float32(operand.constant) if operand.kind == "constant" else inputs[operand.at])
        values.append(STEPS[step.op](*read).astype(np.float32))
    return values[-1]


def convolve(data, weight, strides, padding, dilation, groups):
    """NHWC by OHWI."""
    top, left, bottom, right = padding
    data = np.pad(data, ((0, 0), (top, bottom), (left, right), (0, 0)))
    _, kh, kw, _ = weight.shape
    dh, dw = dilation
    h = (data.shape[1] - dh * (kh - 1) - 1) // strides[0] + 1
    w = (data.shape[2] - dw * (kw - 1) - 1) // strides[1] + 1
    results = []
    for part, kernel in zip(np.split(data, groups, axis=3), np.split(weight, groups, axis=0), strict=True):
        total = 0
        for r in range(kh):
            for s in range(kw):
                window = part[:, r * dh :: strides[0], s * dw :: strides[1]][:, :h, :w]
                total = total + window @ kernel[:, r, s].T
        results.append(total)
    return np.concatenate(results, axis=3).astype(np.float32)


def compute(workload, inputs):
    """The workload's output in float32, from float32 arrays."""
    if workload.epilogue and workload.epilogue[-1].op == "column_sum":
        whole = compute(replace(workload, epilogue=workload.epilogue[:-1]), inputs)
        columns = whole.shape[-1]
        groups = workload.output.num_elements // columns
        return whole.reshape(groups, -1, columns).sum(axis=1).reshape(workload.output.shape)
    told = dict(workload.attributes)
    if workload.op == "matmul":
        b = np.swapaxes(inputs[1], -1, -2) if told.get("transpose_b") else inputs[1]
        return run_steps(workload.epilogue, np.matmul(inputs[0], b), inputs)
    if workload.op == "conv2d":
        result = convolve(*inputs[:2], told["strides"], told["padding"], told["dilation"], told["groups"])
        return run_steps(workload.epilogue, result, inputs)
    if workload.op == "matmul_matmul":
        first = np.swapaxes(inputs[1], -1, -2) if told.get("transpose_b") else inputs[1]
        second = np.swapaxes(inputs[2], -1, -2) if told.get("transpose_b1") else inputs[2]
        between = run_steps(first_epilogue(workload), np.matmul(inputs[0], first), inputs)
        return run_steps(workload.epilogue, np.matmul(stored(between, told["intermediate"]), second), inputs)
    if workload.op == "conv2d_conv2d":
        result = convolve(*inputs[:2], told["strides"], told["padding"], told["dilation"], told["groups"])
        between = stored(run_steps(first_epilogue(workload), result, inputs), told["intermediate"])
        return run_steps(workload.epilogue, convolve(between, inputs[2], (1, 1), (0,) * 4, (1, 1), 1), inputs)
    assert workload.op == "attention"
    return attend(told, inputs)


def attend(told, inputs):
    def ordered(array, layout):
        for digit in [letter for letter in layout if letter.isdigit()]:
            array = np.take(array, int(digit), layout.index(digit))
            layout = layout.replace(digit, "")
        return np.einsum(f"{layout}->{in_order(layout)}", array)

    q, k, v = (ordered(array, layout) for array, layout in zip(inputs[:3], told["layouts"], strict=True))
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * told["scale"]
    if told["masked"]:
        scores = scores + inputs[3]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = np.matmul(weights / weights.sum(-1, keepdims=True), v)
    return np.einsum(f"{in_order(told['output_layout'])}->{told['output_layout']}", result)


def in_order(layout):
    return "".join(letter for letter in "bhsd" if letter in layout)


def stored(array, dtype):
    return array.astype(dtype).astype(np.float32) if dtype == "float16" else array


def numpy_of(tensor: Any):
    array = tensor.numpy()
    if str(tensor.dtype) == "bfloat16" and array.dtype == np.uint16:
        array = array.view(NUMPY_DTYPES["BF16"])
    return array.astype(np.float32)


def write(tensor: Any, values):
    dtype = str(tensor.dtype)
    numpy_dtype = NUMPY_DTYPES["BF16"] if dtype == "bfloat16" else np.dtype(dtype)
    array = aligned_empty(tuple(tensor.shape), numpy_dtype)
    array[...] = values.astype(numpy_dtype)
    tensor.copyfrom(tensor_of(array))


class ReferenceTemplate:
    """Takes every workload of its operators whose epilogue CUTLASS's templates can express."""

    def __init__(self, *ops: str) -> None:
        self.name = "reference"
        self.ops = ops

    def matches(self, workload, target):
        if workload.op not in self.ops:
            return False
        if workload.op == "matmul":
            return matmul_of(workload) is not None and EpilogueProgram.of(workload) is not None
        if workload.op == "conv2d":
            return convolution_of(workload) is not None and EpilogueProgram.of(workload) is not None
        return not workload.epilogue or workload.epilogue[-1].op != "column_sum"

    def candidates(self, workload, target):
        return [Candidate.of(self.name, tile=1), Candidate.of(self.name, tile=2)]

    def packing(self, workload, candidate, target):
        return {}

    def workspace_bytes(self, workload, candidate, target):
        return WORKSPACE_BYTES

    def digest(self, workload, candidate, target):
        return digest_of({"reference": workload.fields(), "candidate": candidate.fields()})

    def build(self, workload, candidate, target):
        raise AssertionError("reference kernels are registered, not built")


def everything() -> tuple[ReferenceTemplate, ...]:
    return (ReferenceTemplate("matmul", "conv2d", "attention", "matmul_matmul", "conv2d_conv2d"),)


@contextmanager
def registered(kernels: Sequence[Any]) -> Iterator[dict[str, int]]:
    """The kernels as global functions meanwhile; gives how often each was called."""
    calls: dict[str, int] = {}
    for call in kernels:
        calls[call.name] = 0

        def run(*tensors, workload=call.workload, name=call.name):
            *inputs, workspace, output = tensors
            assert (str(workspace.dtype), tuple(workspace.shape)) == ("uint8", (WORKSPACE_BYTES,)), workspace.shape
            for tensor, wanted in zip([*inputs, output], [*workload.inputs, workload.output], strict=True):
                assert (tuple(tensor.shape), str(tensor.dtype)) == (wanted.shape, wanted.dtype)
            calls[name] += 1
            write(output, compute(workload, [numpy_of(tensor) for tensor in inputs]))

        tvm_ffi.register_global_func(call.name, run, override=True)
    try:
        yield calls
    finally:
        for call in kernels:
            tvm_ffi.registry.remove_global_func(call.name)


def run_registered(compiled, params, inputs):
    """The compiled twin's outputs, its kernels being numpy's."""
    with registered(compiled.kernels) as calls:
        machine = tvm.relax.VirtualMachine(compiled.library.module, tvm.cpu())
        packed = machine["main_transform_params"]([[tvm.runtime.tensor(array) for array in params]])
        result = machine["main"](*(tvm.runtime.tensor(array) for array in inputs), packed)
        outputs = list(result) if compiled.returns_tuple else [result]
        arrays = [output.numpy() for output in outputs]
    assert all(count for count in calls.values()), "a kernel was never called"
    assert all(name.startswith(KERNEL_PREFIX) for name in calls)
    return arrays
