"""What a machine can do at most, measured: fused multiply-adds a second, and bytes a second from each level of memory.

A workload cannot take less time than its arithmetic or its traffic needs (Williams, Waterman, Patterson, "Roofline: an
insightful visual performance model for multicore architectures", 2009). A search knows by it when to stop, and
`hone explain` how far from the machine's limit a kernel is. Algorithms that need fewer multiplications than the
definition of an operator (Winograd's, say) can pass it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import te
from tvm.s_tir import Schedule

from hone.compiler.build import build_functions
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp.bf16 import FEATURES, missing_features
from hone.compiler.templates.cpp.compiler import host_compiler
from hone.compiler.templates.cpp.geometry import LANES
from hone.compiler.templates.cpp.render import render
from hone.compiler.templates.cpp.template import RenderedKernel
from hone.compiler.templates.cutlass.epilogue import COLUMN_SUM
from hone.compiler.templates.cutlass.problem import result_shape
from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm import aligned_empty

#: Of the arithmetic probe: terms of each sum, and sums in one thread's turn (both operands stay in the first cache).
_NUM_TERMS, _NUM_TURNS = 128, 400
_NUM_TIMES = 7
_SAMPLE_NS = 2_000_000
#: Working sets of the traffic probe, all threads together: within a second-level cache, a third, and memory.
_FOOTPRINTS = (1 << 20, 8 << 20, 256 << 20)
_NUM_ATTEMPTS, _PLAUSIBLE = 4, 0.85
#: After so long no further attempt is made.
_MAX_NS = 3_000_000_000
#: Of the probe of bfloat16: sums in registers, what is added to each in a call, and multiply-adds of an instruction.
_BF16_SUMS, _BF16_TURNS, _BF16_PRODUCTS = 24, 20_000, 32


@dataclass(frozen=True, slots=True)
class Roofline:
    """`gflops` of float32 (a multiply-add counts two) and of one thread alone; `gflops_bf16` of dot products in
    bfloat16, as float32 where the CPU has none; `bandwidths` are GB/s by the size in bytes of what is read, the
    smallest first."""

    num_threads: int
    gflops: float
    gflops_one_thread: float
    gflops_bf16: float
    bandwidths: tuple[tuple[int, float], ...]

    @property
    def is_plausible(self) -> bool:
        """Whether every thread had a core of its own while this was measured."""
        alone = self.num_threads * self.gflops_one_thread
        return min(self.gflops, self.gflops_bf16) >= _PLAUSIBLE * alone

    def nanoseconds(self, operations: float, num_bytes: float, *, bf16: bool = False) -> float:
        """The least time for so much arithmetic and traffic, on all threads."""
        rate = self.gflops_bf16 if bf16 else self.gflops
        return max(operations / rate, num_bytes / self.bandwidth(num_bytes))

    def bandwidth(self, num_bytes: float) -> float:
        return next((rate for size, rate in self.bandwidths if num_bytes <= size), self.bandwidths[-1][1])

    def of(self, workload: Workload) -> float:
        """The least nanoseconds of a call."""
        return self.nanoseconds(operations(workload), traffic(workload), bf16=is_bf16(workload))

    def fields(self) -> dict[str, Any]:
        return {
            "num_threads": self.num_threads,
            "gflops": self.gflops,
            "gflops_one_thread": self.gflops_one_thread,
            "gflops_bf16": self.gflops_bf16,
            "bandwidths": [list(pair) for pair in self.bandwidths],
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Roofline:
        """What `fields()` told. Raises KeyError, TypeError and ValueError for anything else."""
        return cls(
            int(fields["num_threads"]),
            float(fields["gflops"]),
            float(fields["gflops_one_thread"]),
            float(fields["gflops_bf16"]),
            tuple((int(size), float(rate)) for size, rate in fields["bandwidths"]),
        )


def operations(workload: Workload) -> float:
    """Arithmetic operations of a workload as its operator defines them; where that has no sums, one an element."""
    outputs = float(math.prod(result_shape(workload) if _sums_rows(workload) else workload.output.shape))
    steps = outputs * len(workload.epilogue)
    if workload.op in ("matmul_matmul", "conv2d_conv2d"):
        return _pair_operations(workload) + steps
    weight = workload.inputs[1].shape if len(workload.inputs) > 1 else ()
    if workload.op.startswith("conv2d_transpose"):  # each input goes to every place of a filter: weights are IOHW
        return 2 * workload.inputs[0].num_elements * math.prod(weight[1:]) + steps
    if workload.op.startswith(("conv", "depthwise")) and len(weight) >= 3:
        return 2 * outputs * math.prod(weight[1:]) + steps
    if "matmul" in workload.op or workload.op in ("gemm", "gemv"):
        return 2 * outputs * workload.inputs[0].shape[-1] + steps
    return outputs * (1 + len(workload.epilogue))


def _sums_rows(workload: Workload) -> bool:
    """Whether the output holds sums of what the operator gives."""
    return bool(workload.epilogue) and workload.epilogue[-1].op == COLUMN_SUM


def _pair_operations(workload: Workload) -> float:
    """Of two operators back to back, the second one pointwise."""
    data, weight = workload.inputs[0].shape, workload.inputs[1].shape
    if workload.op == "conv2d_conv2d":  # weights are OHWI
        between, depth = weight[0], math.prod(weight[1:])
    else:
        between, depth = (weight if dict(workload.attributes).get("transpose_b") else weight[::-1])[0], data[-1]
    rows = workload.output.num_elements / workload.output.shape[-1]
    return 2 * rows * between * (depth + workload.output.shape[-1])


def traffic(workload: Workload) -> float:
    """Bytes that a workload reads and writes at least."""
    return float(sum(num_bytes(tensor) for tensor in (*workload.inputs, workload.output)))


def is_bf16(workload: Workload) -> bool:
    return dict(workload.attributes).get("precision") == "bf16"


def num_bytes(tensor: TensorType) -> int:
    return tensor.num_elements * max(1, int(tvm.DataType(tensor.dtype).bits) // 8)


def measure_roofline(target: CpuTarget, clock: Callable[[], int] = time.perf_counter_ns) -> Roofline:
    """Measure this machine; takes a second, or some where other work is in the way. Raises BuildFailed where TVM makes
    no code for the target."""
    began = clock()
    found = _measure_once(target, clock)
    for _ in range(_NUM_ATTEMPTS - 1):
        if found.is_plausible or clock() - began > _MAX_NS:
            break
        again = _measure_once(target, clock)
        best = max(found, again, key=lambda one: one.gflops)
        found = replace(best, gflops_bf16=max(found.gflops_bf16, again.gflops_bf16))
    return found


def _measure_once(target: CpuTarget, clock: Callable[[], int]) -> Roofline:
    bandwidths: list[tuple[int, float]] = []
    for footprint in _FOOTPRINTS:
        bandwidths.append((footprint, _bandwidth(target, footprint, clock)))
    gflops = _gflops(target, target.num_threads, clock)
    return Roofline(
        num_threads=target.num_threads,
        gflops=gflops,
        gflops_one_thread=_gflops(target, 1, clock),
        gflops_bf16=gflops if missing_features(target) else _gflops_bf16(target, clock),
        bandwidths=tuple(bandwidths),
    )


def _gflops(target: CpuTarget, num_threads: int, clock: Callable[[], int]) -> float:
    """Sums of products of operands in the first cache, with as many sums in registers as there are."""
    best = 0.0
    for rows, vectors in ((target.num_vector_registers // 2 - 3, 2), (target.num_vector_registers - 4, 1)):
        columns = vectors * target.lanes
        left, right = np.ones((_NUM_TERMS, rows), np.float32), np.ones((_NUM_TERMS, columns), np.float32)
        shape = (num_threads, _NUM_TURNS, rows, columns)
        function = _sums(target, shape, parallel=num_threads > 1)
        nanoseconds = _time(function, [left, right], shape, clock)
        best = max(best, 2.0 * math.prod(shape) * _NUM_TERMS / nanoseconds)
    return best


def _gflops_bf16(target: CpuTarget, clock: Callable[[], int]) -> float:
    """Dot products on registers: TVM's LLVM has none of bfloat16, so the probe is rendered C++. Raises BuildFailed."""
    name = "hone_probe_peak_bf16"
    turns = _BF16_TURNS * target.num_threads
    result = {"shape": (LANES,), "dtype": "float32", "code": 2, "bits": 32}
    values = {"name": name, "arguments": [result], "parallel": target.num_threads > 1, "failure": "it never does"}
    source = render("peak_bf16.cpp", {**values, "sums": _BF16_SUMS, "turns": turns})
    kernel = RenderedKernel(name, name, source, host_compiler(FEATURES))
    return 2.0 * turns * _BF16_SUMS * _BF16_PRODUCTS / _time(kernel, [], (LANES,), clock)


def _sums(target: CpuTarget, shape: tuple[int, int, int, int], *, parallel: bool) -> Any:
    left = te.placeholder((_NUM_TERMS, shape[2]), "float32", name="left")
    right = te.placeholder((_NUM_TERMS, shape[3]), "float32", name="right")
    term = te.reduce_axis((0, _NUM_TERMS), "term")
    sums = te.compute(shape, lambda _, __, r, c: te.sum(left(term, r) * right(term, c), axis=term), name="sums")
    schedule = Schedule(te.create_prim_func([left, right, sums]))
    block = schedule.get_sblock("sums")
    thread, turn, row, column, reduced = schedule.get_loops(block)
    outer, lane = schedule.split(column, [None, target.lanes])
    schedule.reorder(thread, turn, reduced, row, outer, lane)
    kept = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(kept, turn, preserve_unit_loops=True)
    if parallel:
        schedule.parallel(thread)
    for loop in (row, outer):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    stored = schedule.get_loops(kept)
    _, stored_lane = schedule.split(stored[-1], [None, target.lanes])
    schedule.vectorize(stored_lane)
    schedule.unroll(stored[-2])
    first = schedule.decompose_reduction(block, reduced)
    for loop in schedule.get_loops(first)[2:-1]:
        schedule.unroll(loop)
    return build_functions({"sums": schedule.mod["main"]}, target).function("sums")


def _bandwidth(target: CpuTarget, footprint: int, clock: Callable[[], int]) -> float:
    """Bytes a nanosecond of reading so many bytes over and over."""
    columns = 8 * target.lanes
    shape = (target.num_threads, footprint // (4 * columns * target.num_threads), columns)
    data = te.placeholder(shape, "float32", name="data")
    term = te.reduce_axis((0, shape[1]), "term")
    out = (shape[0], columns)
    sums = te.compute(out, lambda thread, c: te.sum(data(thread, term, c), axis=term), name="sums")
    schedule = Schedule(te.create_prim_func([data, sums]))
    block = schedule.get_sblock("sums")
    thread, column, reduced = schedule.get_loops(block)
    outer, lane = schedule.split(column, [None, target.lanes])
    schedule.reorder(thread, reduced, outer, lane)
    kept = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(kept, thread, preserve_unit_loops=True)
    if target.num_threads > 1:
        schedule.parallel(thread)
    schedule.unroll(outer)
    schedule.vectorize(lane)
    first = schedule.decompose_reduction(block, reduced)
    for loop in schedule.get_loops(first)[1:-1]:
        schedule.unroll(loop)
    function = build_functions({"sums": schedule.mod["main"]}, target).function("sums")
    values = aligned_empty(shape, np.dtype(np.float32))
    values[...] = 1.0
    return 4.0 * math.prod(shape) / _time(function, [values], out, clock)


def _time(function: Any, inputs: Sequence[Any], shape: tuple[int, ...], clock: Callable[[], int]) -> float:
    """Nanoseconds of a call, at its best: what disturbs a measurement makes it longer only."""
    tensors = [tvm_ffi.from_dlpack(_aligned(array)) for array in inputs]
    tensors.append(tvm_ffi.from_dlpack(aligned_empty(shape, np.dtype(np.float32))))
    function(*tensors)
    started = clock()
    function(*tensors)
    repeats = max(1, _SAMPLE_NS // max(1, clock() - started))
    times = []
    for _ in range(_NUM_TIMES):
        started = clock()
        for _ in range(repeats):
            function(*tensors)
        times.append((clock() - started) / repeats)
    return min(times)


def _aligned(array: Any) -> Any:
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
