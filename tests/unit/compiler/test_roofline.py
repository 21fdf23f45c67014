"""What the machine can do at most, and what a workload needs at least."""

from __future__ import annotations

import pytest

from hone.compiler.roofline import Roofline, measure_roofline, operations, traffic
from hone.compiler.target import CpuTarget
from hone.compiler.workload import Operand, Step, TensorType, Workload

LIMITS = Roofline(2, 100.0, 60.0, 200.0, ((1 << 20, 50.0), (8 << 20, 25.0), (256 << 20, 10.0)))
RELU = Step("relu", (Operand("value"),))


def tensor(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype)


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload("conv2d", (tensor(1, 4, 8, 8, 16), tensor(32, 64, 3, 3)), tensor(1, 2, 8, 8, 16)), 2 * 32 * 64 * 576),
        (
            Workload("depthwise_conv2d", (tensor(1, 2, 8, 8, 16), tensor(32, 1, 3, 3)), tensor(1, 2, 8, 8, 16)),
            2 * 32 * 64 * 9,
        ),
        (
            Workload("matmul", (tensor(5, 7), tensor(7, 3)), tensor(5, 3), epilogue=(RELU,)),
            2 * 5 * 3 * 7 + 15,
        ),
        (Workload("conv2d_transpose", (tensor(1, 4, 5, 5), tensor(4, 6, 2, 2)), tensor(1, 6, 10, 10)), 2 * 100 * 24),
        (Workload("pool2d", (tensor(1, 1, 4, 4, 16),), tensor(1, 1, 2, 2, 16)), 64),
    ],
    ids=lambda value: value.op if isinstance(value, Workload) else "",
)
def test_operations_are_those_of_the_definition(workload, expected):
    assert operations(workload) == expected


def test_traffic_counts_every_tensor_once_at_its_width():
    workload = Workload("matmul", (tensor(5, 7), tensor(7, 3, dtype="bfloat16")), tensor(5, 3))
    assert traffic(workload) == 4 * 35 + 2 * 21 + 4 * 15


def test_the_limit_is_arithmetic_or_traffic_whichever_takes_longer():
    assert LIMITS.nanoseconds(1000, 100) == 10.0
    assert LIMITS.nanoseconds(1000, 100, bf16=True) == 5.0
    assert LIMITS.nanoseconds(1000, 5000) == 100.0


def test_bandwidth_is_that_of_the_smallest_memory_that_holds_it():
    assert LIMITS.bandwidth(1 << 20) == 50.0
    assert LIMITS.bandwidth((1 << 20) + 1) == 25.0
    assert LIMITS.bandwidth(1 << 40) == 10.0


def test_fields_tell_all():
    assert Roofline.from_fields(LIMITS.fields()) == LIMITS


def test_a_figure_of_threads_without_cores_is_not_plausible():
    assert not Roofline(4, 100.0, 60.0, 200.0, LIMITS.bandwidths).is_plausible
    assert Roofline(2, 118.0, 60.0, 200.0, LIMITS.bandwidths).is_plausible


def test_this_machine_is_measured():
    measured = measure_roofline(CpuTarget.detect(1))
    assert measured.num_threads == 1
    assert measured.gflops > 1
    assert measured.gflops_bf16 > 1
    assert [size for size, _ in measured.bandwidths] == sorted(size for size, _ in measured.bandwidths)
    assert all(rate > 0.1 for _, rate in measured.bandwidths)
