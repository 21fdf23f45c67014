"""Templates over blocked channels in tests: what fills blocks up is poison, and so is an output before a kernel ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate, Template
from hone.compiler.templates.packing import Packer
from hone.compiler.workload import TensorType, Workload

HOST = CpuTarget.detect(num_threads=1)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
AVX512 = CpuTarget.of_features("skylake-avx512", ("avx2", "fma", "avx512f"))
NEON = CpuTarget.of_features("generic", ("neon",), triple="aarch64-linux-gnu")


def width_of(channels: int) -> int:
    from hone.compiler.phases.blocks import block_width

    return block_width(channels, HOST)


def blocked_shape(shape: Sequence[int], width: int) -> tuple[int, ...]:
    n, c, h, w = shape
    return (n, -(-c // width), h, w, width)


def to_blocks(plain: np.ndarray, width: int) -> np.ndarray:
    """What fills up the last block is NaN: it must never get into a real channel."""
    n, c, h, w = plain.shape
    blocks = -(-c // width)
    filled = np.full((n, blocks * width, h, w), np.nan, np.float32)
    filled[:, :c] = plain
    return np.ascontiguousarray(filled.reshape(n, blocks, width, h, w).transpose(0, 1, 3, 4, 2))


def to_plain(blocks: np.ndarray, channels: int) -> np.ndarray:
    n, b, h, w, width = blocks.shape
    return blocks.transpose(0, 1, 4, 2, 3).reshape(n, b * width, h, w)[:, :channels]


def workload(op: str, inputs: Sequence[np.ndarray], output: Sequence[int], epilogue: Any = (), **attributes: Any):
    types = tuple(TensorType(array.shape, "float32") for array in inputs)
    return Workload(op, types, TensorType(tuple(output), "float32"), tuple(sorted(attributes.items())), tuple(epilogue))


def run(
    template: Template, work: Workload, inputs: Sequence[np.ndarray], candidate: Candidate | None = None,
    target: CpuTarget = HOST,
) -> np.ndarray:  # fmt: skip
    candidate = candidate or template.candidates(work, target)[0]
    kernel = template.build(work, candidate, target)
    packed = Packer(work, inputs).pack(template, candidate, target)
    out = tvm.runtime.tensor(np.full(work.output.shape, np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(array) for array in packed), out)
    return out.numpy()


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * max(1e-6, float(np.abs(want).max(initial=0.0))))
