"""Running a template's kernel as a compiled model would, and epilogues in float64 to compare with."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
import tvm

from hone.compiler.target import CpuTarget
from hone.compiler.templates.packing import Packer
from hone.compiler.workload import Operand, Step, TensorType, Workload

HOST = CpuTarget.detect(num_threads=1)
#: Two threads, and nothing too small for them.
THREADS = CpuTarget(
    **{
        **{field: getattr(HOST, field) for field in HOST.__dataclass_fields__},
        "num_threads": 2,
        "parallel_min_us": 0.0,
    }
)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
NEON = CpuTarget.of_features("generic", ("neon",), triple="aarch64-linux-gnu")


def random_inputs(workload: Workload, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(tensor.shape).astype(np.float32) for tensor in workload.inputs]


def run(template: Any, workload: Workload, inputs: list[Any], candidate: Any = None, target: CpuTarget = HOST) -> Any:
    """The kernel's output; what it did not write is NaN."""
    candidate = candidate or template.candidates(workload, target)[0]
    kernel = template.build(workload, candidate, target)
    packed = Packer(workload, inputs).pack(template, candidate, target)
    out = tvm.runtime.tensor(np.full(workload.output.shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in packed), out)
    return out.numpy()


def value(at: int) -> Operand:
    return Operand("value", at)


def _one(op: str, *constants: float) -> tuple[Step, ...]:
    return (Step(op, (value(0), *(Operand("constant", constant=number) for number in constants))),)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


#: name -> (steps on the result alone, the same in float64)
UNARY_EPILOGUES: dict[str, tuple[tuple[Step, ...], Callable[[Any], Any]]] = {
    "relu": (_one("relu"), lambda x: np.maximum(x, 0)),
    "relu6": (_one("relu6"), lambda x: np.clip(x, 0, 6)),
    "leakyrelu": (_one("leakyrelu", 0.1), lambda x: np.where(x > 0, x, 0.1 * x)),
    "silu": (_one("silu"), lambda x: x * _sigmoid(x)),
    "gelu": (_one("gelu"), _gelu),
    "sigmoid": (_one("sigmoid"), _sigmoid),
    "tanh": (_one("tanh"), np.tanh),
    "hardswish": (
        (
            Step("add", (value(0), Operand("constant", constant=3.0))),
            Step("relu6", (value(1),)),
            Step("multiply", (value(0), value(2))),
            Step("divide", (value(3), Operand("constant", constant=6.0))),
        ),
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
    ),
    "gelu of steps": (
        (
            Step("divide", (value(0), Operand("constant", constant=float(np.sqrt(2))))),
            Step("erf", (value(1),)),
            Step("add", (value(2), Operand("constant", constant=1.0))),
            Step("multiply", (value(0), value(3))),
            Step("multiply", (value(4), Operand("constant", constant=0.5))),
        ),
        _gelu,
    ),
}


def tensors(*shapes: tuple[int, ...]) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, "float32") for shape in shapes)
